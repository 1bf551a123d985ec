"""Control: the stream of tasks, and the groups in progress. Every trajectory is counted exactly
once.

Group k of the stream depends only on the run's seed, the weights of its environments and k. So a
resumed run gets the same tasks, and so does every batching policy. A trajectory whose environment
failed is replaced by another member of the same group, with a name and sampling seed of its own. A
task that fails again and again is given up: its group starts from the beginning with another task.
The run stops when more than a configured share of the tasks fails each time.
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

# 2^64 divided by the golden ratio. Points at this distance on a circle of length 2^64 spread more
# evenly than points at any other distance.
GOLDEN = 0x9E3779B97F4A7C15
# A task fails each time if it has failed at least this often (or `Bounds.in_row`, if lower), and as
# often as its group has trajectories, without a success in between. So an environment that fails at
# a third of all starts hardly ever counts.
FEW_FAILURES = 3
# The share of tasks that fail each time is taken over this many tasks that ended last, and over the
# running tasks.
RECENT_TASKS = 100
# This many tasks may fail each time in addition to the share. Otherwise the first task, if it
# failed, would end the run.
SPARED_TASKS = 4


class TooManyFailures(RuntimeError):
    """Raised when too large a share of the tasks fails each time; the message has the last
    cause."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a domain's failures."""

    in_row: int  # failures in a row after which a task is given up (max_failures_in_row)
    share: float  # share of failing tasks above which the run ends (max_failed_tasks)
    key: str  # configuration key under which the two limits are


@dataclass(frozen=True)
class Task:
    """The task of all trajectories of a group: the name of an environment, and a seed."""

    domain: str
    seed: int


@dataclass
class _Group:
    phase: Phase
    task: Task
    size: int
    spare: int = 0  # members that start beyond `size`
    running: set[str] = field(default_factory=set)
    finished: list[Trajectory] = field(default_factory=list)
    replaced: int = 0  # failed members so far
    lost: set[str] = field(default_factory=set)  # members that failed by their hosts' deaths
    failures: int = 0  # failures since the last success

    def fails(self, bounds: Bounds) -> bool:
        """True if the task fails each time, see `FEW_FAILURES`."""
        return self.failures >= max(min(FEW_FAILURES, bounds.in_row), self.size)


@dataclass
class Replaced:
    """The trajectories to start in place of a failed one.

    If the failed trajectory's task was given up, the group starts again with another task.
    `running` and `done` are the old task's trajectories, which are to be dropped.
    """

    starts: list[StartTrajectory] = field(default_factory=list)
    given_up: str = ""  # reason; "" if the task was not given up
    running: list[str] = field(default_factory=list)
    done: list[Trajectory] = field(default_factory=list)


class Groups:
    """The groups in progress. `bounds` has an entry for each domain. If `seeded`, turns get
    sampling seeds. `branching` is the shape of training groups' trees; None: no forks."""

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
        # complete group -> its spare trajectories that still run
        self._late: dict[str, list[str]] = {}
        # domain -> for each of its last tasks, whether it was given up. Each domain has its own
        # share, so that domains that work don't hide one that fails.
        self._ended = {domain: deque[bool](maxlen=RECENT_TASKS) for domain in bounds}
        self.failed = self.given_up = 0  # trajectories and tasks, over the run

    def open(
        self, name: str, phase: Phase, task: Task, size: int, spare: int = 0
    ) -> list[StartTrajectory]:
        """Begin a group and return the messages that start its members. The message of a member
        that forks comes after its parent's. `spare` further members start, which never fork. The
        first `size` members that finish make up the group; `late` returns the others."""
        group = self._groups[name] = _Group(phase, task, size, spare)
        return self._members(name, group, "")

    def _members(self, name: str, group: _Group, suffix: str) -> list[StartTrajectory]:
        """Return the messages that start all members; `suffix` is appended to their names."""
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
        """Count a finished trajectory; return the group, ordered by id, once all members have
        finished, else None. A trajectory that is not running (of a dropped group) is ignored."""
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
        """Return the trajectories of a just completed group that still run and aren't needed."""
        return self._late.pop(name)

    def failed_trajectory(
        self, trajectory: str, name: str, error: str, lost: bool = False, certain: bool = False
    ) -> Replaced:
        """Replace a failed trajectory by another member, or its group's task by another task.

        1. `certain`: every trajectory of the task would fail, so the task is given up.
        2. `lost`: the trajectory failed because of its hosts' deaths, which may have an outside
           cause. Such a failure doesn't count, but the member's next failure gives the task up.
        3. Any other failure counts; the task is given up after max(`Bounds.in_row`, group size).

        Raises `TooManyFailures`.
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
        """Begin the group again with another task of its domain. The seed's parity stays, which
        separates training tasks from held-out ones."""
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
        """Raise `TooManyFailures` if too large a share of the domain's tasks fails each time."""
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
        """Forget a group; return its running trajectories' ids and its finished trajectories."""
        group = self._groups.pop(name, None)
        return (sorted(group.running), group.finished) if group else ([], [])

    def running_in(self, phase: Phase) -> list[str]:
        """Return the names of the phase's groups in progress."""
        return [name for name, group in self._groups.items() if group.phase is phase]

    @property
    def running(self) -> int:
        return sum(len(g.running) for g in self._groups.values())


def first_name(trajectory: str) -> str:
    """Return the trajectory's name without replacements: g12.3 for g12.3r1. The group's own name
    may hold an r, as in g12r1."""
    group, dot, member = trajectory.rpartition(".")
    return f"{group}{dot}{member.partition('r')[0]}"


def fork_points(
    branching: Branching, run_seed: int, group: str, size: int
) -> dict[int, tuple[str, int]]:
    """Return, for each member that forks: (name of the member that it forks off, turn at whose
    start it forks).

    With `branching.ways` (3, 2) members 0 to 5 are a tree: at the first of two turns 2 and 4 fork
    off 0, at the second 1 forks off 0, 3 off 2 and 5 off 4. So a tree is determined when its group
    begins. `branching.at` has the turns; if it is empty, each tree draws them, seeded by its name.
    """
    leaves, found = branching.leaves, {}
    for first in range(0, size, leaves):
        draw = random.Random(seed_of(run_seed, "forks", f"{group}.{first}"))
        turns = branching.at or sorted(
            draw.sample(range(1, branching.depth + 1), len(branching.ways))
        )
        stride = leaves  # members between two siblings
        for ways, turn in zip(branching.ways, turns, strict=True):
            below, stride = stride, stride // ways
            for member in range(stride, leaves, stride):
                if member % below:
                    found[first + member] = (f"{group}.{first + member - member % below}", turn)
    return found


def train_task(run_seed: int, index: int, weights: Mapping[str, float]) -> Task:
    """Return the task of training group `index`. Its seed is even; seeds of held-out tasks are odd
    (see `rose.agent.envs.base`)."""
    return Task(chosen(weights, run_seed, index), seed_of(run_seed, "train", index) & ~1)


def eval_task(seed: int, index: int, weights: Mapping[str, float]) -> Task:
    """Return held-out task `index`, whose seed is odd. It is the same in every run with the same
    eval.seed and weights."""
    return Task(chosen(weights, seed, index), seed_of(seed, "eval", index) | 1)


def chosen(weights: Mapping[str, float], seed: int, index: int) -> str:
    """Return the name for `index`; names are chosen by their weights, in any order of the mapping.

    Successive indices walk round a circle of the weights in steps of the golden ratio. So even a
    few neighbouring indices, such as those of a batch, have each name about as often as its weight
    says. Among 64 indices the count is off by at most three, among 16 by at most two. Independent
    draws would vary more.
    """
    names = sorted(weights)
    largest = max(weights.values())
    edges = list(accumulate(weights[name] / largest for name in names))
    place = ((seed_of(seed, "domain") << 33) + index * GOLDEN) % (1 << 64)
    return names[bisect_right(edges[:-1], (place >> 11) / 2**53 * edges[-1])]


def teaches(group: list[Trajectory], dynamic_sampling: bool) -> bool:
    """False for a group without a response token and, with DAPO's dynamic sampling (arXiv
    2503.14476, section 3.2), for a group whose rewards are all equal: its advantages, and so its
    gradient, are zero."""
    if all(t.response_tokens == 0 for t in group):
        return False
    return not dynamic_sampling or differ([t.reward for t in group])
