"""States of a sandbox that its agent can go back to: one from before each of its last commands.

Each is a whole capture in a folder of this machine (`Sandbox.capture`): of processes, too, where
CRIU is, else of files and the shell's variables. Folders that a killed process has left behind are
removed by the next. All states of a process together take `SHARE` of their disk's room; beyond that
the oldest go, whichever sandbox's they are. Left out: captures of what changed alone, which the
host's checkpoints are.
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
SHARE = 0.25  # of what is free with them: other hosts of the machine keep theirs there, too
BLOCK = 512  # bytes, of st_blocks
PREFIX = f"rose-undo-{os.geteuid()}-"  # of a folder's name; then the process that has it


@dataclass(eq=False)
class _State:
    before: str  # the command
    folder: Path | None
    problem: str = ""  # why there is none
    bytes: int = 0  # on its disk


_held: list[_State] = []  # of all sandboxes of this process, the oldest first


class Undo:
    """`resumed`: the sandbox is one that had commands before, whose states are not here."""

    def __init__(self, resumed: bool = False) -> None:
        self._resumed = resumed
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
                state = _State(command, folder, bytes=await asyncio.to_thread(_size, folder))
                self._states.append(state)
                _held.append(state)
                break
        else:
            self._states.append(_State(command, None, problem))
        await self._forget(self._states[:-MOST])
        await _make_room(self._folder)

    async def back(self, box: Sandbox, commands: int) -> tuple[Sandbox, str]:
        """The sandbox that goes on from before the last `commands`, and what the agent is told;
        `box` itself, with why, if there is none."""
        if commands > len(self._states):
            since = ", those since the machine was moved" if self._resumed else ""
            return box, f"Nothing is undone: {len(self._states)} commands can be{since}."
        state = self._states[-commands]
        what = f"before {state.before[:200]!r}"
        if state.folder is None:
            return box, f"Nothing is undone: the state {what} was not kept: {state.problem}"
        _held.remove(state)  # nobody else may remove what is read
        try:
            made = await Sandbox.restore(state.folder)
        except SandboxError as error:
            return box, f"Nothing is undone: the state {what} can't be had again: {error}"
        finally:
            _held.insert(0, state)
        await box.close()
        await self._forget(self._states[-commands:])
        kept = made.lost or "files, the shell and its processes are what they were."
        return made, f"Undone, to {what}: {kept}"

    async def _forget(self, states: list[_State]) -> None:
        for state in states:
            self._states.remove(state)
            await _remove(state, "")

    async def close(self) -> None:
        await self._forget(list(self._states))
        await asyncio.to_thread(shutil.rmtree, self._folder, True)


async def _remove(state: _State, problem: str) -> None:
    if state in _held:
        _held.remove(state)
    folder, state.folder, state.problem = state.folder, None, state.problem or problem
    if folder is not None:
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def _make_room(where: Path) -> None:
    """Remove the oldest states while all together take more than their share."""
    while _held:
        taken = sum(state.bytes for state in _held)
        most = SHARE * (shutil.disk_usage(where).free + taken)
        if taken <= most:
            return
        words = f"all that is kept for undo takes {most / 2**20:.0f} MiB at most"
        await _remove(_held[0], words)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_blocks * BLOCK for path in folder.rglob("*"))


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
