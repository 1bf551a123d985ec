"""Tree rollouts (`rollout/branch`): trajectories that fork off other trajectories of their host.

A fork waits until its parent has reached a certain turn and copies the parent's tokens. It resumes
its own environment from the parent environment's state (`Environment.checkpoint`). Without that
method, it resets its environment to the same seed and repeats all actions, whose results must equal
the recorded ones. The copy is also the fork's first snapshot (rose/agent/snapshots.py). If its host
dies, the fork resumes from this snapshot without the parent. If the parent ends or fails before
that turn, the fork starts from the prompt; other trajectories can still fork off it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rose.agent.envs.base import Action, Start, Step
from rose.agent.state import EpisodeState
from rose.protocol import StartTrajectory


@dataclass(frozen=True)
class Fork:
    """The state of a parent trajectory before one of its turns, which its forks copy."""

    first: Start
    played: tuple[tuple[Action, Step], ...]  # all actions so far, with the environment's results
    saved: bytes | None  # result of `Environment.checkpoint`; None without that method
    state: EpisodeState


class Forks:
    """The waiting forks. `expect` must be called before the parent gets its first turn."""

    def __init__(self) -> None:
        # parent -> turn -> futures of the forks that wait for it
        self._waiting: dict[str, dict[int, list[asyncio.Future[Fork | None]]]] = {}

    def begin(self, trajectory: str) -> None:
        """Let forks wait for `trajectory`, which runs on this host."""
        self._waiting[trajectory] = {}

    def expect(self, start: StartTrajectory) -> asyncio.Future[Fork | None] | None:
        """Return a future of the parent's state for the fork `start`. Its result is None if the
        fork must start from the prompt. Return None if the parent doesn't run on this host."""
        if (turns := self._waiting.get(start.follows)) is None:
            return None
        future = asyncio.get_running_loop().create_future()
        turns.setdefault(start.fork, []).append(future)
        return future

    def wanted(self, trajectory: str, turn: int) -> bool:
        """True if a fork waits for the state of `trajectory` before this turn."""
        return any(not f.done() for f in self._waiting.get(trajectory, {}).get(turn, ()))

    def give(self, trajectory: str, turn: int, fork: Fork) -> None:
        """Let the forks that wait for this turn of `trajectory` start from the state `fork`."""
        _resolve(self._waiting[trajectory].pop(turn), fork)

    def passed(self, trajectory: str, turn: int) -> None:
        """Let the forks that wait for an earlier turn of `trajectory` start from the prompt."""
        waiting = self._waiting.get(trajectory, {})
        for each in [each for each in waiting if each < turn]:
            _resolve(waiting.pop(each), None)

    def end(self, trajectory: str) -> None:
        """Let all forks that still wait for `trajectory` start from the prompt."""
        for futures in self._waiting.pop(trajectory, {}).values():
            _resolve(futures, None)


def _resolve(futures: list[asyncio.Future[Fork | None]], fork: Fork | None) -> None:
    for future in futures:
        if not future.done():
            future.set_result(fork)
