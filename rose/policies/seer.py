"""Seer (arXiv 2511.14617): divided rollout, and context-aware scheduling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rose.scheduler.events import Event, GroupFinished, StepBegun, TrajectoryEnded, TurnEnded
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class Seer:
    """A turn is generated in chunks of `chunk_tokens`; between two of them it goes back to the
    queue, and any worker takes the next: the least loaded one (Seer, arXiv 2511.14617, divided
    rollout).

    Seer keeps the KV of all engines in one pool (Mooncake), so that a move costs no prefill. No
    engine here shares its KV: live, the next worker prefills what its own prefix cache lacks, and
    the simulator charges for it in the same way. A turn that may make no more than a chunk is not
    divided. Its order is `longest_first` (context-aware scheduling); its speculative decoding is no
    matter of a scheduler. 8,192 tokens a chunk (an eighth of an output of 64k) is ours.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        return fleet.least(turn)

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        """New tokens of this attempt; 0: all that are left."""
        left = turn.max_new_tokens - turn.made_tokens
        return self.chunk_tokens if left > self.chunk_tokens else 0

    def kv_need(self, turn: TurnState) -> int:
        """KV tokens of the next chunk, not of the whole output: what a chunk needs is known, so
        engines are filled with no preemption (Seer's divided rollout does both with one cut)."""
        made = turn.made_tokens
        return turn.context_tokens + min(made + self.chunk_tokens, turn.max_new_tokens)


@dataclass
class _Group:
    probe: str = ""  # the trajectory that shows how long the others will be
    longest: int = 0  # tokens of its longest finished trajectory; 0: none has finished
    # trajectory that runs -> tokens of its finished turns
    made: dict[str, int] = field(default_factory=dict)
    turns: dict[str, str] = field(default_factory=dict)  # turn that has not ended -> trajectory


class LongestFirst:
    """The group's own trajectories tell how long the others will be (Seer, arXiv 2511.14617,
    context-aware scheduling).

    Of each group one trajectory is the probe, the first that asks for a turn. Probes go before all
    others, those that have made the fewest tokens first, so that short ones end and long ones show
    themselves early. The others go in order of their group's estimate, the longest first: the
    tokens of its longest finished trajectory. A group of which none has finished counts as the
    longest of all. Equal ones go by arrival.

    Seer estimates single responses; here a trajectory of several turns is what has a length.
    Nothing starves: a step has finitely many turns, and an asynchronous policy admits no new groups
    while old ones hold its places. Live: nothing is missing; a turn that an engine has is not
    preempted for one that waits.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._moved: list[str] = []  # turns whose key the last event changed

    def key(self, turn: TurnState, cluster: Cluster) -> tuple[int, float]:
        group = self._groups.setdefault(turn.group, _Group())
        group.turns[turn.turn] = turn.trajectory
        group.made.setdefault(turn.trajectory, 0)
        if group.longest:
            return 1, -group.longest
        group.probe = group.probe or turn.trajectory
        if group.probe == turn.trajectory:
            return 0, group.made[turn.trajectory] + turn.made_tokens
        return 1, float("-inf")

    def on_event(self, event: Event, cluster: Cluster) -> None:
        self._moved = []
        match event:
            case TurnEnded(turn=name, tokens=tokens):
                turn = cluster.turns[name]
                if (group := self._groups.get(turn.group)) is not None and group.turns.pop(
                    name, None
                ):
                    group.made[turn.trajectory] += tokens
            case TrajectoryEnded(trajectory=name, tokens=tokens):
                self._trajectory_ended(name, tokens, cluster.group_of.get(name, ""))
            case GroupFinished(group=name):
                self._groups.pop(name, None)
            case StepBegun():  # those of dropped groups
                self._groups = {name: group for name, group in self._groups.items() if group.made}

    def changed(self, event: Event, cluster: Cluster) -> Iterable[str]:
        return self._moved

    def _trajectory_ended(self, trajectory: str, tokens: int, name: str) -> None:
        """`tokens` is 0 if it was cancelled or its environment failed: then another becomes the
        probe."""
        group = self._groups.get(name)
        if group is None:
            return
        group.made.pop(trajectory, None)
        if tokens > group.longest:
            group.longest = tokens
            self._moved = list(group.turns)
        elif not group.longest and group.probe == trajectory:
            group.probe = next(iter(group.turns.values()), "")
            self._moved = list(group.turns)
