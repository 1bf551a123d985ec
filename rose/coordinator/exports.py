"""Writes the policy of some steps as Hugging Face folders, exports/step_N, while the run continues.

A process of low priority reads the version from the weight store. It reads from a copy made of hard
links, because the trainer removes old versions from the store. One export is written at a time. A
step that is offered in the meantime waits, and of several waiting steps only the newest is written.
A failed export is reported and does not affect the run. rose/export writes the folder itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rose.comm import mpi_process
from rose.config import Config
from rose.processes import die_with_parent
from rose.transfer import versions

LOWEST = 19  # nice value, the lowest Unix priority
MOST_OUTPUT = 2000  # characters of the end of the process's output that are shown


class Exports:
    """Exports steps in the background. `on_fault` gets (what, detail) of failed exports."""

    def __init__(self, config: Config, run_dir: Path, on_fault: Callable[[str, str], None]) -> None:
        self._every, self._last = config.trainer.export_every, config.trainer.steps
        self._keep, self._deadline_s = config.trainer.export_keep, config.trainer.step_timeout_s
        self._run_dir, self._folder = Path(run_dir), Path(run_dir) / "exports"
        self._on_fault = on_fault
        self._tasks: set[asyncio.Task] = set()
        self._one_at_a_time = asyncio.Lock()
        self._newest = 0  # newest step offered
        for left in self._folder.glob(".step_*"):  # left by an attempt that was killed
            _remove(left)

    def resume(self, step: int, store: str) -> None:
        """Export `step`, from which the run continues, if it is due and its folder is missing,
        because the run was interrupted."""
        if not self._out(step).exists():
            self.offer(step, store)

    def offer(self, step: int, store: str) -> None:
        """Begin to export `step`, whose weights are in the store, if its export is due."""
        if not step or not self._every or (step % self._every and step != self._last):
            return
        self._newest = step
        task = asyncio.create_task(self._export(step, Path(store)), name=f"step {step}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stopped(self, step: int, store: str) -> None:
        """Export `step`, the last step of a run that ends early, unless its export was due."""
        self._last = step
        if step != self._newest:
            self.resume(step, store)

    async def finish(self) -> None:
        """Wait for all exports, `trainer.step_timeout_s` at most; report and end those that take
        longer."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=self._deadline_s)
        for task in late:
            self._on_fault(
                "export failed",
                f"{task.get_name()}: not written {self._deadline_s:g} s (trainer.step_timeout_s) "
                "after the last step",
            )
        await self.close()

    async def close(self) -> None:
        """End all exports that are being written."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _out(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    async def _export(self, step: int, store: Path) -> None:
        links = self._folder / f".step_{step}.store"
        try:
            self._folder.mkdir(exist_ok=True)
            kept = await asyncio.to_thread(versions.linked, store, links, step)
            async with self._one_at_a_time:
                if step != self._newest:
                    why = f"step {step}: step {self._newest} was ready before it began"
                    self._on_fault("export left out", why)
                    return
                await self._write(step, kept)
        except Exception as error:  # The run continues without this folder.
            self._on_fault("export failed", f"step {step}: {type(error).__name__}: {error}")
        finally:
            await self._discard(links)

    async def _write(self, step: int, store: Path) -> None:
        out = self._out(step)
        await asyncio.to_thread(_remove, out)  # An earlier attempt may have trained this step, too.
        command = [sys.executable, "-m", "rose.export", str(self._run_dir)]
        command += ["--step", str(step), "--store", str(store), "--out", str(out)]
        process = await asyncio.create_subprocess_exec(
            *command,
            env=mpi_process.environment({"OMP_NUM_THREADS": "1"}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=_prepare_process,
        )
        try:
            async with asyncio.timeout(self._deadline_s):
                raw, _ = await process.communicate()
        except TimeoutError:
            why = f"step {step}: not written within {self._deadline_s:g} s (trainer.step_timeout_s)"
            self._on_fault("export failed", why)
            return
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        output = raw.decode(errors="replace").strip()[-MOST_OUTPUT:]
        if process.returncode:
            self._on_fault("export failed", f"step {step}: {output}")
            return
        print(output, flush=True)
        # Exports of later steps are from an earlier attempt; these steps are trained again.
        written = [number for number in self._written() if number <= step]
        for old in written[: -self._keep]:
            await self._discard(self._out(old))

    def _written(self) -> list[int]:
        """Return the exported steps in ascending order; folders with other names are not ours."""
        found = (re.fullmatch(r"step_(\d+)", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    async def _discard(self, path: Path) -> None:
        """Remove a folder in another thread, and report a failure without raising it."""
        try:
            await asyncio.to_thread(_remove, path)
        except OSError as error:
            self._on_fault("export not removed", str(error))


def _prepare_process() -> None:
    """Lower the priority of the export process, and have it end with its parent."""
    die_with_parent()
    os.nice(LOWEST)


def _remove(path: Path) -> None:
    """Remove a folder or a file. A folder is renamed to a hidden name first, so that an
    incomplete model never has a visible name."""
    if path.is_dir():
        hidden = path.with_name(f".{path.name.removeprefix('.')}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        shutil.rmtree(path.rename(hidden), ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
