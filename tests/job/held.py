"""FrozenLake whose moves wait for a test, by files: it says when a group, a step or a run goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

from rose.agent.envs.base import Action, Start, Step
from rose.agent.envs.frozen_lake import FrozenLake

DEADLINE_S = 900.0
MOVES = itertools.count()


class HeldLake(FrozenLake):
    """Tasks in `held` wait at the first move until a file of their seed's name is in `folder`."""

    def __init__(self, folder: str, held: list[int], **lake: Any) -> None:
        super().__init__(**lake)
        self._folder, self._held = Path(folder), held

    async def reset(self, seed: int) -> Start:
        self._seed = seed
        return await super().reset(seed)

    async def step(self, action: Action) -> Step:
        end = time.monotonic() + DEADLINE_S
        while self._seed in self._held and not (self._folder / str(self._seed)).exists():
            if time.monotonic() > end:
                raise TimeoutError(f"nobody released task {self._seed}")
            await asyncio.sleep(0.05)
        return await super().step(action)


class GatedLake(FrozenLake):
    """FrozenLake whose tasks wait at the first move, or at their end where the policy made none, for
    the file `open-STEP` in `folder`; `held` are the tasks' seeds, a list of each step. A file says
    that an episode waits, another that it goes on. Those of the steps in `starts` wait before their
    first turn, too, for `start-STEP`. Other tasks wait for nothing. With `counts` a move's reward, or
    an end's without one, is the number of those before it in this process: no two are equal."""

    def __init__(
        self,
        folder: str,
        held: list[list[int]],
        starts: list[int] | None = None,
        counts: bool = False,
        **lake: Any,
    ) -> None:
        super().__init__(**lake)
        self._counts = counts
        self._folder, self._held, self._first = Path(folder), held, True
        self._starts = starts or []

    async def reset(self, seed: int) -> Start:
        step = next((k for k, s in enumerate(self._held, 1) if seed in s), 0)
        self._step_of_task, self._first = step, step > 0
        if step in self._starts:
            self._say("begins")
            await self._until("start")
        return await super().reset(seed)

    async def step(self, action: Action) -> Step:
        await self._gate()
        made = await super().step(action)
        return dataclasses.replace(made, reward=float(next(MOVES))) if self._counts else made

    async def end(self) -> Step:
        """No episode passes the gate unseen, also where none of its turns had a call that could be
        read: of a tiny model's turns about one in 200."""
        counts = self._counts and self._first
        await self._gate()
        return Step("", reward=float(next(MOVES)) if counts else 0.0)

    async def _gate(self) -> None:
        if self._first:
            self._first = False
            self._say("waits")
            await self._until("open")
            self._say("goes")

    def _say(self, what: str) -> None:
        me = f"{time.monotonic_ns()}-{id(self)}"
        (self._folder / f"{what}-{self._step_of_task}-{me}").touch()

    async def _until(self, gate: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not (self._folder / f"{gate}-{self._step_of_task}").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"nobody made {gate}-{self._step_of_task}")
            await asyncio.sleep(0.05)


class PausedLake(FrozenLake):
    """Every move waits while the file `paused` is there: the run costs nothing meanwhile, and goes
    on as if nothing had been."""

    def __init__(self, paused: str, **lake: Any) -> None:
        super().__init__(**lake)
        self._paused = Path(paused)

    async def step(self, action: Action) -> Step:
        end = time.monotonic() + DEADLINE_S
        while self._paused.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{self._paused} has been there for {DEADLINE_S:g} s")
            await asyncio.sleep(0.1)
        return await super().step(action)
