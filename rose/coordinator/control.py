"""Control: the stream of tasks, and the groups in progress. Every trajectory is counted exactly
once.

Group k of the stream is determined by the run's seed, the weights of its environments and k alone,
so a resumed run meets the same tasks, and so does every batching policy. A trajectory whose
environment failed is replaced by another member of the same group, with a name and sampling seed of
its own. A task that fails again and again is given up: its group begins again with another one.
Only a share of such tasks stops the run.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from rose.config import Branching
from rose.protocol import Phase, StartTrajectory, Trajectory, seed_of
from rose.trainer.algorithms.base import differ

# 2^64 by the golden ratio: of all steps round a circle, the one whose points spread best
GOLDEN = 0x9E3779B97F4A7C15
# A task fails each time once so many of its trajectories have failed since one ended well, and as
# many as its group has: an environment of which a third of all starts fail is only unsteady.
FEW_FAILURES = 3
# The share of tasks that fail each time is that of the last so many which ended, and those running.
RECENT_TASKS = 100
# So many tasks may fail each time besides the share: the first one is no share of anything.
SPARED_TASKS = 4


class TooManyFailures(RuntimeError):
    """Too large a share of the tasks fails each time; the message holds the last cause."""


@dataclass(frozen=True)
class Bounds:
    """Failures of a domain; `key` is where these stand in the configuration."""

    in_row: int  # max_failures_in_row: so many give a task up
    share: float  # max_failed_tasks: more tasks that fail each time end the run
    key: str


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
    spare: int = 0
    running: set[str] = field(default_factory=set)
    finished: list[Trajectory] = field(default_factory=list)
    replaced: int = 0
    lost: set[str] = field(default_factory=set)  # members that failed for their hosts' deaths
    failures: int = 0  # since one of its trajectories ended well

    def fails(self, bounds: Bounds) -> bool:
        """The task fails each time."""
        return self.failures >= max(min(FEW_FAILURES, bounds.in_row), self.size)


@dataclass
class Replaced:
    """The trajectories to start in place of a failed one. Where its task was given up: why, which
    trajectories of the group still run, and which were in; neither are used beside another
    task's."""

    starts: list[StartTrajectory] = field(default_factory=list)
    given_up: str = ""
    running: list[str] = field(default_factory=list)
    done: list[Trajectory] = field(default_factory=list)


class Groups:
    """Groups in progress: which trajectories run, which are in. `bounds`: of each domain.
    `seeded`: the trajectories' turns get sampling seeds. `branching`: the trees that training
    groups are grown as."""

    def __init__(
        self,
        run_seed: int,
        bounds: Mapping[str, Bounds],
        seeded: bool,
        branching: Branching | None = None,
    ) -> None:
        self._run_seed, self._bounds, self._seeded = run_seed, bounds, seeded
        self._branching = branching
        self._groups: dict[str, _Group] = {}
        self._late: dict[
            str, list[str]
        ] = {}  # complete group -> spare trajectories of it that still run
        # Of each domain, as another that works says nothing of it: which of its last tasks were
        # given up.
        self._ended = {domain: deque[bool](maxlen=RECENT_TASKS) for domain in bounds}
        self.failed = self.given_up = 0  # trajectories and tasks, over the run

    def open(
        self, name: str, phase: Phase, task: Task, size: int, spare: int = 0
    ) -> list[StartTrajectory]:
        """Begin a group; the messages that start its members, each behind that of the one that it
        forks off. `spare` more are started, which never fork: the first `size` that are in make the
        group, and `late` names the others."""
        group = self._groups[name] = _Group(phase, task, size, spare)
        return self._members(name, group, "")

    def _members(self, name: str, group: _Group, suffix: str) -> list[StartTrajectory]:
        forks = {}
        if self._branching is not None and group.phase is Phase.TRAIN:
            forks = fork_points(self._branching, self._run_seed, name, group.size)
        starts = []
        for member in range(group.size + group.spare):
            follows, turn = forks.get(member, ("", 0))
            follows += suffix if follows else ""
            starts.append(self._start(name, group, f"{name}.{member}{suffix}", follows, turn))
        return starts

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
        group = self._groups.get(trajectory.group)
        if group is None or trajectory.id not in group.running:
            return None
        group.running.remove(trajectory.id)
        group.finished.append(trajectory)
        group.failures = 0
        if len(group.finished) < group.size:
            return None
        self._late[trajectory.group] = sorted(group.running)
        self._ended[group.task.domain].append(False)
        return sorted(self._groups.pop(trajectory.group).finished, key=lambda t: t.id)

    def late(self, name: str) -> list[str]:
        """Trajectories of a group just complete that still run: nobody needs them."""
        return self._late.pop(name)

    def failed_trajectory(
        self, trajectory: str, name: str, error: str, lost: bool = False, certain: bool = False
    ) -> Replaced:
        """Replace a failed trajectory: by another member, or its group by another task's members.

        `lost`: it failed for its hosts' deaths, which may have come from outside: a member's first
        such failure doesn't count, a second one gives the task up. `certain`: every trajectory of
        the task would fail. Raises `TooManyFailures`.
        """
        self.failed += 1
        group = self._groups.get(name)
        if group is None or trajectory not in group.running:
            return Replaced()
        group.running.remove(trajectory)
        group.replaced += 1
        member, bounds = first_name(trajectory), self._bounds[group.task.domain]
        most = max(bounds.in_row, group.size)
        if certain or member in group.lost:
            group.failures = most
        elif lost:
            group.lost.add(member)
        else:
            group.failures += 1
        cause = f"the last, {trajectory}: {error}"
        self._check_share(group, bounds, cause)
        if group.failures < most:
            again = self._start(name, group, f"{member}r{group.replaced}")
            return Replaced([again])
        times = "none of its trajectories can begin" if certain else f"{most} failures in a row"
        return self._give_up(name, group, f"{times}; {cause}")

    def _give_up(self, name: str, group: _Group, cause: str) -> Replaced:
        """Begin the group again with another task of its domain and its side, training or held-out:
        that is the seed's parity."""
        seed = group.task.seed
        why = f"{group.task.domain} with seed {seed} (group {name}): {cause}"
        self.given_up += 1
        self._ended[group.task.domain].append(True)
        redrawn = seed_of(seed, "given up", group.replaced) & ~1 | seed & 1
        again = _Group(group.phase, Task(group.task.domain, redrawn), group.size, group.spare)
        again.replaced = group.replaced
        self._groups[name] = again
        starts = self._members(name, again, f"r{again.replaced}")
        return Replaced(starts, why, sorted(group.running), group.finished)

    def _check_share(self, group: _Group, bounds: Bounds, cause: str) -> None:
        """Raises `TooManyFailures`."""
        if not group.fails(bounds):
            return
        ended = self._ended[group.task.domain]
        running = [g for g in self._groups.values() if g.task.domain == group.task.domain]
        fail = sum(ended) + sum(g.fails(bounds) for g in running)
        drawn = len(ended) + len(running)
        if fail > bounds.share * drawn + SPARED_TASKS:
            raise TooManyFailures(
                f"{fail} of the last {drawn} tasks of {group.task.domain} fail each time "
                f"({bounds.key}.max_failed_tasks={bounds.share:g}); {cause}"
            )

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
    return not dynamic_sampling or differ([t.reward for t in group])
