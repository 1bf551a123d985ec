"""FrozenLake whose moves wait for a test, by files: it says when a group, a step or a run goes on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from rose.agent.envs.base import Action, Start, Step
from rose.agent.envs.frozen_lake import FrozenLake

DEADLINE_S = 900.0


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
    """FrozenLake whose tasks wait at the first move for the file `open-STEP` in `folder`; `held` are
    the tasks' seeds, a list of each step. A file says that an episode waits, another that it goes
    on."""

    def __init__(self, folder: str, held: list[list[int]], **lake: Any) -> None:
        super().__init__(**lake)
        self._folder, self._held, self._first = Path(folder), held, True

    async def reset(self, seed: int) -> Start:
        self._step_of_task = next(k for k, seeds in enumerate(self._held, 1) if seed in seeds)
        self._first = True
        return await super().reset(seed)

    async def step(self, action: Action) -> Step:
        if self._first:
            self._first, step, me = False, self._step_of_task, f"{time.monotonic_ns()}-{id(self)}"
            (self._folder / f"waits-{step}-{me}").touch()
            end = time.monotonic() + DEADLINE_S
            while not (self._folder / f"open-{step}").exists():
                if time.monotonic() > end:
                    raise TimeoutError(f"nobody opened step {step}")
                await asyncio.sleep(0.05)
            (self._folder / f"goes-{step}-{me}").touch()
        return await super().step(action)


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
