"""Control: the stream of tasks, and the groups in progress. Every trajectory is counted exactly once.

Group k of the stream is determined by the run's seed and k alone, so a resumed run meets the same
tasks. A trajectory whose environment failed is replaced by another member of the same group, with a
name and sampling seed of its own; too many failures in a row stop the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from rose.protocol import Phase, StartTrajectory, Trajectory


class TooManyFailures(RuntimeError):
    """Environments fail one after the other; the message holds the last cause."""


def seed_of(*parts: object) -> int:
    """31-bit seed from a name: stable between processes, machines and runs."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) & 0x7FFFFFFF


@dataclass
class _Group:
    phase: Phase
    env_seed: int
    size: int
    running: set[str] = field(default_factory=set)
    finished: list[Trajectory] = field(default_factory=list)
    replaced: int = 0


class Groups:
    """Groups in progress: which trajectories run, which are in. `seeded`: their turns get sampling seeds."""

    def __init__(self, run_seed: int, max_failures_in_row: int, seeded: bool) -> None:
        self._run_seed, self._max_failures, self._seeded = run_seed, max_failures_in_row, seeded
        self._groups: dict[str, _Group] = {}
        self._late: dict[str, list[str]] = {}  # complete group -> spare trajectories of it that still run
        self._failures_in_row = 0
        self.failed = 0  # over the run

    def open(self, name: str, phase: Phase, env_seed: int, size: int, spare: int = 0) -> list[StartTrajectory]:
        """Begin a group; the messages that start its members. `spare` more are started: the first `size` that are in
        make the group, and `late` names the others."""
        group = self._groups[name] = _Group(phase, env_seed, size)
        return [self._start(name, group, f"{name}.{member}") for member in range(size + spare)]

    def _start(self, name: str, group: _Group, trajectory: str) -> StartTrajectory:
        group.running.add(trajectory)
        return StartTrajectory(trajectory, name, group.phase, group.env_seed,
                               seed_of(self._run_seed, trajectory) if self._seeded else None)

    def finished(self, trajectory: Trajectory) -> list[Trajectory] | None:
        """Count a trajectory; the whole group, ordered by id, once all members are in. Words about
        trajectories that are not running (dropped groups) change nothing."""
        self._failures_in_row = 0
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

    def failed_trajectory(self, trajectory: str, name: str, error: str) -> StartTrajectory | None:
        """The replacement of a failed trajectory. Raises `TooManyFailures`."""
        self.failed += 1
        self._failures_in_row += 1
        if self._failures_in_row >= self._max_failures:
            raise TooManyFailures(f"{self._failures_in_row} environments failed in a row "
                                  f"(env.max_failures_in_row={self._max_failures}); the last, {trajectory}: {error}")
        group = self._groups.get(name)
        if group is None or trajectory not in group.running:
            return None
        group.running.remove(trajectory)
        group.replaced += 1
        member = trajectory.removeprefix(name).partition("r")[0]  # the group's own name may hold an r, as g12r1
        return self._start(name, group, f"{name}{member}r{group.replaced}")

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


def train_seed(run_seed: int, index: int) -> int:
    """Environment seed of training group `index`: even, as no held-out task's is (see `rose.envs.base`)."""
    return seed_of(run_seed, "train", index) & ~1


def eval_seed(seed: int, index: int) -> int:
    """Environment seed of held-out task `index`, odd: the same in every run with the same eval.seed."""
    return seed_of(seed, "eval", index) | 1
