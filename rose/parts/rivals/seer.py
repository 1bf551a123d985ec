"""Seer (arXiv 2511.14617): divided rollout, and context-aware scheduling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rose.scheduler.events import Event, GroupFinished, StepBegun, TrajectoryEnded, TurnEnded
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class Seer:
    """Generate a turn in chunks of `chunk_tokens`. After each the turn is queued again, and the
    least loaded worker takes the next one (Seer, arXiv 2511.14617, divided rollout).

    Seer keeps the KV of all engines in one pool (Mooncake), so that a move costs no prefill. Our
    engines don't share their KV: live, the next worker prefills the tokens that its own cache
    lacks, and the simulator charges the same. A turn of at most a chunk isn't divided. Seer's order
    is `longest_first` (context-aware scheduling); its speculative decoding doesn't concern the
    scheduler. 8,192 tokens a chunk (an eighth of an output of 64k) is our value.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        return fleet.least(turn)

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        """Return the new tokens of this attempt; 0 for all that are left."""
        left = turn.max_new_tokens - turn.made_tokens
        return self.chunk_tokens if left > self.chunk_tokens else 0

    def kv_need(self, turn: TurnState) -> int:
        """Return the KV tokens of the turn up to the end of its next chunk. Since this need is
        known, engines can be filled without preemptions, another aim of divided rollout."""
        made = turn.made_tokens
        return turn.context_tokens + min(made + self.chunk_tokens, turn.max_new_tokens)


@dataclass
class _Group:
    probe: str = ""  # the trajectory that goes first, to show how long the others will be
    longest: int = 0  # tokens of the longest finished trajectory; 0 if none has finished
    # Running trajectory -> tokens of its finished turns
    made: dict[str, int] = field(default_factory=dict)
    turns: dict[str, str] = field(default_factory=dict)  # open turn -> its trajectory


class LongestFirst:
    """Longest trajectories first, predicted by others of the same group (Seer, arXiv 2511.14617,
    context-aware scheduling).

    1. Probes go first. The probe of a group is its first trajectory that requests a turn. Among
       probes, the one with the fewest tokens so far goes first, so that short ones end early and
       long ones are found early.
    2. The others follow by the estimate of their group, longest first. The estimate is the tokens
       of the group's longest finished trajectory; without one, the group counts as the longest.

    Ties go by arrival. Seer estimates single responses; here a trajectory of several turns has a
    length. Nothing starves: a step has finitely many turns, and an asynchronous policy admits no
    new groups while old groups take up its bound. Live runs support all of it; running turns aren't
    preempted for waiting turns.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._changed: list[str] = []  # turns whose keys the last event changed

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
        self._changed = []
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
            case StepBegun():  # Forget dropped groups.
                self._groups = {name: group for name, group in self._groups.items() if group.made}

    def changed(self, event: Event, cluster: Cluster) -> Iterable[str]:
        return self._changed

    def _trajectory_ended(self, trajectory: str, tokens: int, name: str) -> None:
        """Update the group's estimate. `tokens` is 0 if the trajectory was cancelled or failed; if
        it was the probe, another becomes the probe."""
        group = self._groups.get(name)
        if group is None:
            return
        group.made.pop(trajectory, None)
        if tokens > group.longest:
            group.longest = tokens
            self._changed = list(group.turns)
        elif not group.longest and group.probe == trajectory:
            group.probe = next(iter(group.turns.values()), "")
            self._changed = list(group.turns)
