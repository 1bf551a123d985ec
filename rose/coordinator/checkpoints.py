"""Checkpoints of a run. Every trainer rank writes its part; when all parts are on disk, the
coordinator adds its state and commits the folder, while the next steps run.

One checkpoint is written at a time. rose/trainer/checkpoint.py and rose/trainer/saving.py define
its content, and stopping.py decides whether a stop leaves time for one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rose import protocol as p
from rose.config import Config
from rose.coordinator.waiting import RunFailed
from rose.launch import resume
from rose.observe.recorder import NullRecorder
from rose.trainer import checkpoint

POLL_S = 0.25  # seconds between two checks for the trainer ranks' parts
# Seconds for the other ranks to end their part once one rank could not save.
FAILED_S = 60.0


class Checkpoints:
    """Orders, collects and commits checkpoints.

    `trainers` maps index -> rank of the trainer ranks, `send` takes (rank, message). `spared()`
    returns the steps whose checkpoints stay, however old. `on_saved(step)` is called after the
    commit of a step's checkpoint. `on_fault` gets (what, detail) of checkpoints that can't be
    removed.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        trainers: dict[int, int],
        send: Callable[[int, p.Message], None],
        recorder: NullRecorder,
        spared: Callable[[], Collection[int]],
        on_saved: Callable[[int], None],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._config, self._run_dir, self._trainers = config, run_dir, trainers
        self._send, self._recorder = send, recorder
        self._spared, self._on_saved, self._on_fault = spared, on_saved, on_fault
        self._saving: checkpoint.Save | None = None  # ordered, not passed to `finish` yet
        self._committing: asyncio.Task | None = None  # `_commit` of the last checkpoint
        # The last checkpoint could not be saved. The run fails, and tries once more before it ends.
        self._failed = False

    @property
    def ordered(self) -> bool:
        """True if the ranks were ordered to write a checkpoint and `finish` was not called yet."""
        return self._saving is not None

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after `step`."""
        c = self._config
        evaluated = c.eval.keep_best and c.eval.due(step, c.trainer.steps)
        return evaluated or step % c.trainer.checkpoint_every == 0 or step == c.trainer.steps

    async def before_sleep(self, step: int) -> None:
        """Order the checkpoint of `step` if it is due and the trainer is about to sleep."""
        if self._config.trainer_sleeps and self.due(step):
            await self.order(step)

    async def step_ended(self, step: int, state: dict[str, Any]) -> None:
        """Finish the checkpoint of `step` if it is due. Otherwise raise the error of the checkpoint
        before it, if its commit has failed by now."""
        if self.due(step):
            await self.finish(step, state, self._config.trainer.step_timeout_s)
        elif self._committing is not None and self._committing.done():
            await self.committed()

    async def order(self, step: int) -> None:
        """Order every trainer rank to write `step`, after the commit of the checkpoint before it.
        Does nothing if it was ordered. A rank copies its state before it takes its next message."""
        if self.ordered:
            return
        await self.committed()
        folder = checkpoint.begin(self._run_dir, step, self._not_removed)
        if self._failed:  # The disk may be full, so remove now what the commit would remove later.
            keep = max(1, self._config.trainer.checkpoint_keep - 1)
            await self._in_thread(checkpoint.remove_old, self._run_dir, keep, self._spared())
        self._saving = checkpoint.Save(step, folder, time.monotonic())
        for rank in self._trainers.values():
            self._send(rank, p.SaveCheckpoint(step, str(folder)))

    async def finish(self, step: int, state: dict[str, Any], deadline_s: float) -> None:
        """Start a task that commits the checkpoint of `step`, with the coordinator's `state` at the
        step's end. Order it first unless it was ordered before, as on shared devices, where the
        ranks must write it before they release the devices."""
        await self.order(step)
        saving, self._saving = self._saving, None
        self._committing = asyncio.create_task(self._commit(saving, state, deadline_s))

    async def _commit(
        self, saving: checkpoint.Save, state: dict[str, Any], deadline_s: float
    ) -> None:
        """Commit when every rank's part is on disk. Raises `checkpoint.SaveFailed`, or `RunFailed`
        after `deadline_s`."""
        wanted = self._config.trainer.ranks
        with self._recorder.timed("checkpoint", step=saving.step):
            while (found := await self._saved(saving)) < wanted:
                if time.monotonic() - saving.began > deadline_s:
                    raise RunFailed(
                        f"waited {deadline_s:g} s for trainer ranks to save step {saving.step}: "
                        f"{found} of {wanted} saved"
                    )
                await asyncio.sleep(POLL_S)
            keep, spared = self._config.trainer.checkpoint_keep, self._spared()
            await self._in_thread(checkpoint.commit, saving.folder, state, keep, spared)
            self._on_saved(saving.step)
        resume.note_save(self._run_dir, time.monotonic() - saving.began)

    async def _in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        """Call the function in a thread. It passes messages about what it can't remove to its
        last argument; report these as faults."""
        left: list[str] = []  # The other thread must not write the faults itself.
        await asyncio.to_thread(function, *arguments, left.append)
        for what in left:
            self._not_removed(what)

    def _not_removed(self, what: str) -> None:
        self._on_fault("checkpoint not removed", what)

    async def _saved(self, saving: checkpoint.Save) -> int:
        """Return the number of ranks that have saved. If a rank failed, wait until no rank writes
        any more, because the next try may use the same folder. Then raise `checkpoint.SaveFailed`,
        or `RunFailed` if some ranks still write after `FAILED_S`."""
        try:
            return checkpoint.saved(saving.folder)
        except checkpoint.SaveFailed as error:
            until = time.monotonic() + FAILED_S
            while len(checkpoint.marks(saving.folder)) < self._config.trainer.ranks:
                if time.monotonic() > until:
                    raise RunFailed(
                        f"{error}; other trainer ranks still write after {FAILED_S:g} s"
                    ) from None
                await asyncio.sleep(POLL_S)
            raise

    async def committed(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises the error of its commit."""
        while (task := self._committing) is not None:
            try:
                # Shielded, because a stop cancels the step loop but not the checkpoint.
                await asyncio.shield(task)
                self._failed = False
            except (checkpoint.SaveFailed, OSError):
                self._failed = True
                self._forget(task)
                raise
            self._forget(task)

    def _forget(self, task: asyncio.Task) -> None:
        """Allow another checkpoint after this commit, unless one was begun: the step loop and a
        stop may both wait for a commit. Not called after `RunFailed`: ranks may still write."""
        if self._committing is task:
            self._committing = None

    def newest(self) -> int:
        """Return the step of the newest checkpoint on disk; 0 without one."""
        found = checkpoint.latest(self._run_dir)
        return checkpoint.step_of(found) if found else 0

    def cancel(self) -> None:
        """Abandon a checkpoint that is not committed, because the run ends."""
        if self._committing is not None:
            self._committing.cancel()
