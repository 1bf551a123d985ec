"""States of a sandbox that its agent can go back to: one from before each of its last commands.

Each is a whole capture in a folder of this machine (`Sandbox.capture`): of processes, too, where
CRIU is, else of files and the shell's variables. Folders that a killed process has left behind are
removed by the next. Left out: captures of what changed alone, which the host's checkpoints are.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rose.sandbox import Sandbox, SandboxError, Spec, probe

MOST = 8  # states of a sandbox: each may take what its disk and its memory hold
PREFIX = f"rose-undo-{os.geteuid()}-"  # of a folder's name; then the process that has it


@dataclass(frozen=True)
class _State:
    before: str  # the command
    folder: Path | None
    problem: str = ""  # why there is none


class Undo:
    def __init__(self) -> None:
        _remove_stale(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._numbers = itertools.count()
        self._states: list[_State] = []

    async def keep(self, box: Sandbox, command: str) -> None:
        """The present state, which `command` is about to change."""
        problem = ""
        for kind in reversed(box.capture_kinds):  # processes, if that works
            folder = self._folder / str(next(self._numbers))
            try:
                await box.capture(kind, folder)
            except SandboxError as error:
                problem = str(error)
            else:
                self._states.append(_State(command, folder))
                break
        else:
            self._states.append(_State(command, None, problem))
        await self._forget(self._states[:-MOST])

    async def back(self, box: Sandbox, commands: int) -> tuple[Sandbox, str]:
        """The sandbox that goes on from before the last `commands`, and what the agent is told;
        `box` itself, with why, if there is none."""
        if commands > len(self._states):
            return box, f"Nothing is undone: {len(self._states)} commands can be."
        state = self._states[-commands]
        what = f"before {state.before[:200]!r}"
        if state.folder is None:
            return box, f"Nothing is undone: the state {what} was not kept: {state.problem}"
        try:
            made = await Sandbox.restore(state.folder)
        except SandboxError as error:
            return box, f"Nothing is undone: the state {what} can't be had again: {error}"
        await box.close()
        await self._forget(self._states[-commands:])
        kept = made.lost or "files, the shell and its processes are what they were."
        return made, f"Undone, to {what}: {kept}"

    async def _forget(self, states: list[_State]) -> None:
        for state in states:
            self._states.remove(state)
            if state.folder is not None:
                await asyncio.to_thread(shutil.rmtree, state.folder, True)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, True)


def problem(backend: str) -> str:
    """Why sandboxes of this backend can't go back; "" if they can. For a thread without an event
    loop. Raises `SandboxError`."""

    async def look() -> str:
        async with await Sandbox.start(Spec(), backend) as box:
            return "" if box.capture_kinds else f"backend {box.backend} captures no state"

    try:
        return asyncio.run(look())
    finally:
        probe.close()


def _remove_stale(where: Path) -> None:
    """Folders of this user's processes that are gone."""
    for folder in where.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
            shutil.rmtree(folder, ignore_errors=True)
