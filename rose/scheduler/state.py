"""What the scheduler knows of workers and turns; policies read it and change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TurnState:
    turn: str
    trajectory: str
    group: str
    context_tokens: int
    max_new_tokens: int
    sequence: int  # order of arrival
    requested_at: float
    made_tokens: int = 0  # of this turn, by any worker
    attempt: int = 0  # dispatches so far
    worker: str | None = None  # None: in the queue
    heard_at: float = 0.0  # last sign of life since it was assigned
    avoid: str | None = None  # the worker that stalled on it

    @property
    def kv_need(self) -> int:
        """KV-cache tokens the turn may come to hold."""
        return self.context_tokens + self.max_new_tokens


@dataclass
class WorkerState:
    worker: str
    kind: str
    max_sequences: int
    kv_tokens: int
    version: int
    loading: bool = False
    draining: bool = False
    turns: dict[str, int] = field(default_factory=dict)  # turn -> kv_need

    @property
    def kv_assigned(self) -> int:
        return sum(self.turns.values())

    @property
    def load(self) -> float:
        """Share of the tighter of its two capacities that is assigned."""
        return max(len(self.turns) / self.max_sequences, self.kv_assigned / self.kv_tokens)

    def fits(self, turn: TurnState, queue_depth: float) -> bool:
        """Per-worker caps: sequences (plus a few to hide the coordinator's latency) and KV need. A
        turn larger than the whole cache may run alone: the engine preempts and recomputes."""
        if not self.turns:
            return True
        return (len(self.turns) < self.max_sequences * (1 + queue_depth)
                and self.kv_assigned + turn.kv_need <= self.kv_tokens)


@dataclass
class Cluster:
    """The state that policies see."""

    workers: dict[str, WorkerState] = field(default_factory=dict)
    turns: dict[str, TurnState] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)  # trajectory -> worker with its cached prefix
    group_home: dict[str, str] = field(default_factory=dict)  # group -> worker with its prompt cached
    version: int = -1  # the newest published
    requests: dict[str, bool] = field(default_factory=dict)  # capacity asked for -> whether its job runs
    refusals: int = 0  # in a row
    refused_at: float = 0.0

    @property
    def waiting(self) -> int:
        """Turns in the queue."""
        return sum(turn.worker is None for turn in self.turns.values())

    def ready(self) -> list[WorkerState]:
        """Workers that may take turns, by name: those with the newest weights."""
        return sorted((w for w in self.workers.values()
                       if not w.loading and not w.draining and w.version == self.version), key=lambda w: w.worker)
