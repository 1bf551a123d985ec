"""The coordinator's counters of engines: turns, tokens, busy seconds, and steps.

The state that the scheduler decides by is in rose/scheduler/fleet.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose import protocol as p
from rose.scheduler.events import Kind

POOLS = ("dedicated", "hybrid", "borrowed")  # groups of workers in the metrics


@dataclass
class Worker:
    """Counters of one engine process. A restarted engine gets a new `Worker`, with the next
    incarnation."""

    rank: int
    incarnation: int
    version: int
    kind: Kind = "dedicated"
    alive: bool = True
    tokens: int = 0  # received from it since `begin_step`
    total_tokens: int = 0  # received from it in all
    running: int = 0  # sequences that the engine decodes
    waiting: int = 0  # sequences that wait in the engine
    open_turns: int = 0  # turns assigned to it
    failed_loads: int = 0  # failed attempts to load the newest version
    _busy_s: float = 0.0  # seconds with at least one turn, from `begin_step` to `_busy_since`
    _busy_since: float = 0.0  # wall-clock seconds

    @property
    def pool(self) -> str:
        """The element of `POOLS` that the worker counts in."""
        return self.kind if self.kind in POOLS else "borrowed"

    def turn_opened(self, at: float) -> None:
        if self.open_turns == 0:
            self._busy_since = at
        self.open_turns += 1

    def turn_closed(self, at: float, turns: int = 1) -> None:
        self._busy_s = self.busy_s(at)
        self._busy_since = at
        self.open_turns -= turns

    def busy_s(self, at: float) -> float:
        """Return the seconds since `begin_step` in which the engine had at least one turn."""
        return self._busy_s + (at - self._busy_since if self.open_turns else 0.0)

    def begin_step(self, at: float) -> None:
        """Reset the step's counters; turns of the step before may still run."""
        self.tokens = 0
        self._busy_s = 0.0
        self._busy_since = at

    def continue_counts_of(self, before: Worker) -> None:
        """Take over the counts of the engine's process before its restart."""
        self.tokens = before.tokens
        self.total_tokens = before.total_tokens
        self._busy_s = before._busy_s


class Workers(dict[str, Worker]):
    """Name -> worker, and counts that outlive a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.idled: set[str] = set()  # workers that the scheduler does not use (`RestWorker`)
        self.own_ready = False  # true once an engine of the run's job was ready
        self.restarts = 0  # restarts of engines
        self.generated = dict.fromkeys(POOLS, 0)  # pool -> tokens in this attempt
        # pool -> tokens since `begin_step` of workers that have left or were lost
        self.past = dict.fromkeys(POOLS, 0)

    def begin_step(self, at: float) -> None:
        for worker in self.values():
            worker.begin_step(at)
        self.past = dict.fromkeys(POOLS, 0)

    def count(self, name: str, tokens: int) -> None:
        """Count tokens that a worker generated."""
        worker = self[name]
        worker.tokens += tokens
        worker.total_tokens += tokens
        self.generated[worker.pool] += tokens

    def remove(self, name: str) -> None:
        worker = self.pop(name)
        self.past[worker.pool] += worker.tokens

    @property
    def step_tokens(self) -> int:
        """Tokens that workers generated since `begin_step`."""
        return sum(w.tokens for w in self.values()) + sum(self.past.values())

    def busy_s(self, at: float) -> float:
        """Return the seconds since `begin_step` in which a dedicated engine had at least one turn,
        averaged over the engines; 0 without engines."""
        busy = [w.busy_s(at) for _, w in self.of("dedicated")]
        return sum(busy) / len(busy) if busy else 0.0

    def of(self, pool: str) -> list[tuple[str, Worker]]:
        return [(name, w) for name, w in self.items() if w.pool == pool]

    @property
    def own(self) -> int:
        """Number of the run's own workers."""
        return len(self) - len(self.of("borrowed"))

    @property
    def uses_hybrids(self) -> bool:
        """True if any engine on the trainer's devices may take turns."""
        return any(w.alive and name not in self.idled for name, w in self.of("hybrid"))

    def hybrids_up(self) -> set[int]:
        """Return the ranks of the hybrid engines that are up."""
        return {w.rank for _, w in self.of("hybrid") if w.alive}


class Decoding:
    """Counters of all engines since `begin_step`: they generated `tokens` in `steps` engine steps,
    and accepted `accepted` of `drafted` draft tokens. The counts arrive with heartbeats, up to 1 s
    late."""

    NAMES = ("steps", "drafted", "accepted", "generated_tokens")

    def __init__(self) -> None:
        # (worker, incarnation) -> last counts, in the order of `NAMES`
        self._last: dict[tuple[str, int], tuple[int, ...]] = {}
        self.begin_step()

    def begin_step(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0

    def count(self, m: p.WorkerLoad) -> None:
        now = tuple(getattr(m, name) for name in self.NAMES)
        before = self._last.get((m.worker, m.incarnation), (0,) * len(now))
        self._last[m.worker, m.incarnation] = now
        steps, drafted, accepted, tokens = (b - a for a, b in zip(before, now, strict=True))
        self.steps, self.drafted = self.steps + steps, self.drafted + drafted
        self.accepted, self.tokens = self.accepted + accepted, self.tokens + tokens

    def row(self) -> dict[str, float]:
        """Return the step's values for metrics.jsonl."""
        each = {"tokens_per_engine_step": self.tokens / self.steps} if self.steps else {}
        drafts = {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}
        return each | (drafts if self.drafted else {})
