"""Saves the finished steps of a run that is asked to stop, or that fails.

Nothing can be saved before a step's end, because weights and optimizer states belong neither to the
last step nor to the next. So a stop that arrives while a step is trained waits for the step's end
if it is expected soon enough. `rose.launch.resume.step_end_s` says how long the run may wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rose import protocol as p
from rose.config import Config
from rose.coordinator.checkpoints import Checkpoints
from rose.coordinator.members import Members
from rose.coordinator.records import Progress
from rose.coordinator.shared_devices import Devices
from rose.coordinator.training import Training
from rose.coordinator.waiting import Changes, RunFailed
from rose.launch import resume

RECENT_STEPS = 3  # last steps; the longest training among them predicts that of the next step


class Stopped(Exception):
    """Raised when the user or the system asked the run to end."""


class StepEnd:
    """Predicts and awaits the end of the step that is being trained: when every trainer rank has
    applied it. A run that stops does not wait for engines to load the weights."""

    def __init__(self, changed: Changes) -> None:
        self._changed = changed
        self._began: float | None = None  # monotonic seconds; None: no step is being trained
        self._took: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds

    def training_began(self) -> None:
        self._began = time.monotonic()

    def training_ended(self) -> None:
        self._took.append(time.monotonic() - self._began)
        self._began = None

    def left_s(self) -> float:
        """Return the predicted seconds until the step's end: the duration of the longest recent
        step less the time since its start. Return 0 if that is negative, if no step is trained, and
        for the attempt's first step."""
        if self._began is None:
            return 0.0
        return max(0.0, max(self._took, default=0.0) - (time.monotonic() - self._began))

    async def wait(self, step: int, over: Callable[[], bool], limit_s: float) -> None:
        """Wait until `over()`, for `limit_s` at most; return at once if `step` is predicted to take
        longer. Prints whether it waits."""
        if (left_s := self.left_s()) > limit_s:
            print(
                f"asked to end: step {step} is trained for some {left_s:.0f} s more, and "
                f"{limit_s:.0f} s may be waited (cluster.stop_timeout_s), so it is not saved",
                flush=True,
            )
            return
        print(
            f"asked to end: step {step} is waited for, {limit_s:.0f} s at most, and saved",
            flush=True,
        )
        await self._changed.within(over, limit_s, lambda: "the step's end, to save it and stop")


class Ending:
    """Stops the step loop and saves the last finished step, if its checkpoint is missing."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        progress: Progress,
        members: Members,
        training: Training,
        checkpoints: Checkpoints,
        device: Devices,
        changed: Changes,
    ) -> None:
        self._config, self._run_dir, self._attempt = config, run_dir, attempt
        self._progress, self._members, self._training = progress, members, training
        self._checkpoints, self._device, self._changed = checkpoints, device, changed
        self.step_end = StepEnd(changed)
        self.asked = asyncio.Event()  # set when the run is to end: no further step begins
        self._asked_at = 0.0  # monotonic seconds

    async def unless_asked(self) -> None:
        """Return at once. If the run is to stop, wait instead until the step loop is cancelled:
        after the start of the next step, the finished step could not be saved any more."""
        if self.asked.is_set():
            await asyncio.Event().wait()

    async def wait(self) -> None:
        """Wait until the run is asked to stop and, if there is time, for the end of the step that
        is trained. Then raise `Stopped`."""
        await self.asked.wait()
        self._asked_at = time.monotonic()
        self._changed.set()
        if not self._progress.at_boundary:
            warned = resume.is_warned(self._run_dir, self._attempt)
            limit_s = resume.step_end_s(self._run_dir, self._config.cluster, warned)
            step = self._progress.step + 1
            await self.step_end.wait(step, lambda: self._progress.at_boundary, limit_s)
        raise Stopped("asked to end by a signal")

    async def save_stopped(self) -> None:
        """Save the last step of a run that was asked to stop. Raises `RunFailed` if there is not
        enough time."""
        self._device.end_moves()
        self._training.stop()
        waited_s = time.monotonic() - self._asked_at
        deadline_s = resume.save_s(self._run_dir, self._config.cluster, waited_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self.save_last(deadline_s)
        except TimeoutError:
            raise RunFailed(
                f"step {self._progress.step} was not saved within {deadline_s:.3g} s of the time "
                "to stop (cluster.stop_timeout_s)"
            ) from None

    async def save_failed(self, stepping: asyncio.Task) -> None:
        """Save the finished steps of a run that fails, if no trainer rank is lost. Waits for the
        end of a step that is being trained, and cancels the step loop (`stepping`)."""
        limit_s = self._config.trainer.step_timeout_s
        if not self._progress.at_boundary:
            await self._changed.within(
                lambda: self._progress.at_boundary or stepping.done() or self._trainer_lost(),
                limit_s,
                lambda: "the step's end, to save it before the run fails",
            )
        stepping.cancel()
        step = self._progress.step
        saved = step <= self._checkpoints.newest()
        if not self._progress.at_boundary or self._trainer_lost() or saved:
            return
        self._training.stop()
        deadline_s = min(limit_s, resume.save_s(self._run_dir, self._config.cluster, 0.0))
        try:
            async with asyncio.timeout(deadline_s):
                await self.save_last(deadline_s)
            print(f"step {step} was saved before the run failed", flush=True)
        except Exception as error:  # The run's own failure is raised and not this one.
            print(f"step {step} could not be saved before the run failed: {error!r}", flush=True)

    async def save_last(self, deadline_s: float) -> None:
        """Save the last step within `deadline_s`, if the trainer is between two steps, all its
        ranks are up, and the step has no checkpoint."""
        await self._checkpoints.committed()
        now, newest = self._progress, self._checkpoints.newest()
        if now.at_boundary and now.step > newest and self._training.whole:
            if not self._checkpoints.ordered:
                await self._device.before_save()
            await self._checkpoints.finish(now.step, now.boundary, deadline_s)
            await self._checkpoints.committed()

    def _trainer_lost(self) -> bool:
        return self._members.lost(p.Role.TRAINER)
