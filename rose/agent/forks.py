"""Trajectories of a host that fork off each other: tree rollouts (`rollout/branch`).

A trajectory that forks off another waits until that one stands before the turn in question, takes a
copy of its tokens, and brings an environment of its own to the same state: by what the environment
has saved (`Environment.checkpoint`), else by resetting it to the same seed and repeating every
action, where each answer must be the recorded one. That copy is its first snapshot
(rose/agent/snapshots.py): where its host dies it needs no other. If the other ends sooner, or
fails, it begins with the prompt, and what forks off it still does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from rose.agent.envs.base import Action, Start, Step
from rose.protocol import StartTrajectory


@dataclass(frozen=True)
class Fork:
    """A trajectory before one of its turns."""

    first: Start
    played: tuple[tuple[Action, Step], ...]  # what its environment was given, and said
    saved: bytes | None  # by the environment, if it can
    state: dict[str, Any]  # the rest, as the loop names it, for who forks off here


class Forks:
    """`expect` is called before the trajectory that is followed gets its first answer."""

    def __init__(self) -> None:
        # who is followed -> turn -> those that wait
        self._waiting: dict[str, dict[int, list[asyncio.Future[Fork | None]]]] = {}

    def begin(self, trajectory: str) -> None:
        self._waiting[trajectory] = {}

    def expect(self, start: StartTrajectory) -> asyncio.Future[Fork | None] | None:
        """What `start` forks off, None if it must begin with the prompt; None where it follows
        nobody who runs here."""
        if (turns := self._waiting.get(start.follows)) is None:
            return None
        future = asyncio.get_running_loop().create_future()
        turns.setdefault(start.fork, []).append(future)
        return future

    def wanted(self, trajectory: str, turn: int) -> bool:
        return any(not f.done() for f in self._waiting.get(trajectory, {}).get(turn, ()))

    def give(self, trajectory: str, turn: int, fork: Fork) -> None:
        for future in self._waiting[trajectory].pop(turn):
            if not future.done():
                future.set_result(fork)

    def passed(self, trajectory: str, turn: int) -> None:
        """It stands before this turn: nobody can fork off it sooner any more."""
        waiting = self._waiting.get(trajectory, {})
        for each in [each for each in waiting if each < turn]:
            _release(waiting.pop(each))

    def end(self, trajectory: str) -> None:
        """Nobody can fork off it any more."""
        for futures in self._waiting.pop(trajectory, {}).values():
            _release(futures)


def _release(futures: list[asyncio.Future[Fork | None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
