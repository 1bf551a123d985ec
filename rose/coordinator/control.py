"""Control: the stream of tasks, and the groups in progress. Every trajectory is counted exactly
once.

Group k of the stream is determined by the run's seed, the weights of its environments and k alone,
so a resumed run meets the same tasks, and so does every batching policy. A trajectory whose
environment failed is replaced by another member of the same group, with a name and sampling seed of
its own; too many failures of one environment in a row stop the run.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from rose.config import Branching
from rose.protocol import Phase, StartTrajectory, Trajectory, seed_of

# 2^64 by the golden ratio: of all steps round a circle, the one whose points spread best
GOLDEN = 0x9E3779B97F4A7C15


class TooManyFailures(RuntimeError):
    """Environments fail one after the other; the message holds the last cause."""


@dataclass(frozen=True)
class Task:
    """What all trajectories of a group do: an environment, by its name among the run's, and its
    seed."""

    domain: str
    seed: int


@dataclass
class _Group:
    phase: Phase
    task: Task
    size: int
    running: set[str] = field(default_factory=set)
    finished: list[Trajectory] = field(default_factory=list)
    replaced: int = 0
    lost: set[str] = field(default_factory=set)  # members that failed for their hosts' deaths


class Groups:
    """Groups in progress: which trajectories run, which are in. `limits`: of each domain, how many
    failures in a row are too many, and the key that says so. `seeded`: the trajectories' turns get
    sampling seeds. `branching`: the trees that training groups are grown as."""

    def __init__(
        self,
        run_seed: int,
        limits: Mapping[str, tuple[int, str]],
        seeded: bool,
        branching: Branching | None = None,
    ) -> None:
        self._run_seed, self._limits, self._seeded = run_seed, limits, seeded
        self._branching = branching
        self._groups: dict[str, _Group] = {}
        self._late: dict[
            str, list[str]
        ] = {}  # complete group -> spare trajectories of it that still run
        # of one domain: another that works says nothing of it
        self._failures_in_row = dict.fromkeys(limits, 0)
        self.failed = 0  # over the run

    def open(
        self, name: str, phase: Phase, task: Task, size: int, spare: int = 0
    ) -> list[StartTrajectory]:
        """Begin a group; the messages that start its members, each behind that of the one that it
        forks off. `spare` more are started, which never fork: the first `size` that are in make the
        group, and `late` names the others."""
        group = self._groups[name] = _Group(phase, task, size)
        forks = {}
        if self._branching is not None and phase is Phase.TRAIN:
            forks = fork_points(self._branching, self._run_seed, name, size)
        return [
            self._start(name, group, f"{name}.{member}", *forks.get(member, ()))
            for member in range(size + spare)
        ]

    def _start(
        self, name: str, group: _Group, trajectory: str, follows: str = "", fork: int = 0
    ) -> StartTrajectory:
        group.running.add(trajectory)
        return StartTrajectory(
            trajectory,
            name,
            group.phase,
            group.task.domain,
            group.task.seed,
            seed_of(self._run_seed, trajectory) if self._seeded else None,
            follows,
            fork,
        )

    def finished(self, trajectory: Trajectory) -> list[Trajectory] | None:
        """Count a trajectory; the whole group, ordered by id, once all members are in. Words about
        trajectories that are not running (dropped groups) change nothing."""
        self._failures_in_row[trajectory.domain] = 0
        group = self._groups.get(trajectory.group)
        if group is None or trajectory.id not in group.running:
            return None
        group.running.remove(trajectory.id)
        group.finished.append(trajectory)
        if len(group.finished) < group.size:
            return None
        self._late[trajectory.group] = sorted(group.running)
        return sorted(self._groups.pop(trajectory.group).finished, key=lambda t: t.id)

    def late(self, name: str) -> list[str]:
        """Trajectories of a group just complete that still run: nobody needs them."""
        return self._late.pop(name)

    def failed_trajectory(
        self, trajectory: str, name: str, domain: str, error: str, lost: bool = False
    ) -> StartTrajectory | None:
        """The replacement of a failed trajectory. `lost`: for its hosts' deaths, which may have
        come from outside: a member's first such failure isn't one of those in a row, further ones
        are. Raises `TooManyFailures`."""
        self.failed += 1
        group = self._groups.get(name)
        member = first_name(trajectory)
        counts = not lost or (group is not None and member in group.lost)
        if lost and group is not None:
            group.lost.add(member)
        self._failures_in_row[domain] += counts
        most, key = self._limits[domain]
        if (failures := self._failures_in_row[domain]) >= most and counts:
            raise TooManyFailures(
                f"{failures} environments failed in a row ({key}={most}); the last, {trajectory}: "
                f"{error}"
            )
        if group is None or trajectory not in group.running:
            return None
        group.running.remove(trajectory)
        group.replaced += 1
        return self._start(name, group, f"{member}r{group.replaced}")

    def drop(self, name: str) -> tuple[list[str], list[Trajectory]]:
        """Forget a group: its trajectories that still run, and those that were in."""
        group = self._groups.pop(name, None)
        return (sorted(group.running), group.finished) if group else ([], [])

    def running_in(self, phase: Phase) -> list[str]:
        """Groups in progress."""
        return [name for name, group in self._groups.items() if group.phase is phase]

    @property
    def running(self) -> int:
        return sum(len(g.running) for g in self._groups.values())


def first_name(trajectory: str) -> str:
    """g12.3 of g12.3r1: of the member of the group that this one stands for. The group's own name
    may hold an r, as g12r1."""
    group, dot, member = trajectory.rpartition(".")
    return f"{group}{dot}{member.partition('r')[0]}"


def fork_points(
    branching: Branching, run_seed: int, group: str, size: int
) -> dict[int, tuple[str, int]]:
    """Of each member that forks off another: its name, and the turn before which. With ways (3, 2)
    members 0 to 5 are a tree: 2 and 4 fork off 0, then 1 off 0, 3 off 2 and 5 off 4; so a tree is
    determined when its group begins. Where `at` leaves the turns open, a tree draws them by its
    name."""
    leaves, found = branching.leaves, {}
    for first in range(0, size, leaves):
        draw = random.Random(seed_of(run_seed, "forks", f"{group}.{first}"))
        turns = branching.at or sorted(
            draw.sample(range(1, branching.depth + 1), len(branching.ways))
        )
        stride = leaves  # from one sibling to the next
        for ways, turn in zip(branching.ways, turns, strict=True):
            below, stride = stride, stride // ways
            for member in range(stride, leaves, stride):
                if member % below:
                    found[first + member] = (f"{group}.{first + member - member % below}", turn)
    return found


def train_task(run_seed: int, index: int, weights: Mapping[str, float]) -> Task:
    """The task of training group `index`. Its seed is even, as no held-out task's is (see
    `rose.agent.envs.base`)."""
    return Task(chosen(weights, run_seed, index), seed_of(run_seed, "train", index) & ~1)


def eval_task(seed: int, index: int, weights: Mapping[str, float]) -> Task:
    """Held-out task `index`, its seed odd: the same in every run with the same eval.seed and
    weights."""
    return Task(chosen(weights, seed, index), seed_of(seed, "eval", index) | 1)


def chosen(weights: Mapping[str, float], seed: int, index: int) -> str:
    """The name that `index` falls to: names by their weights, whatever their order. Steps of the
    golden ratio round a circle of weights, so that also a few neighbouring indices, as a batch has,
    have each name about as often as they should (64 of them within three, 16 within two), where
    independent draws would leave it to chance."""
    names = sorted(weights)
    largest = max(weights.values())
    edges = list(accumulate(weights[name] / largest for name in names))
    place = ((seed_of(seed, "domain") << 33) + index * GOLDEN) % (1 << 64)
    return names[bisect_right(edges[:-1], (place >> 11) / 2**53 * edges[-1])]


def teaches(group: list[Trajectory], dynamic_sampling: bool) -> bool:
    """False for a group without a response token and, with DAPO's dynamic sampling (arXiv
    2503.14476, section 3.2), for one whose rewards are all equal: its advantages, and so its
    gradient, are zero."""
    if all(t.response_tokens == 0 for t in group):
        return False
    return not dynamic_sampling or len({t.reward for t in group}) > 1
