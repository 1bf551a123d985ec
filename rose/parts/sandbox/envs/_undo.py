"""Earlier states of a sandbox, which its agent can restore: one from before each recent command.

Each state is a full capture in a folder of this machine (`Sandbox.capture`). It includes processes
if CRIU is installed, else only files and the shell's variables. If a process is killed, the next
process removes its folders. All states of a process together may take `SHARE` of their disk's free
space. Beyond that, the oldest states of all sandboxes are removed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rose import scratch
from rose.parts.sandbox import Sandbox, SandboxError, Spec, probe

MOST = 8  # states of a sandbox, each as large as the sandbox's disk and memory at most
SHARE = 0.25  # share of the space that is free or holds states; other hosts use the same disk
BLOCK = 512  # bytes of a block as counted by st_blocks
PREFIX = f"rose-undo-{os.geteuid()}-"  # start of a folder's name, before the mark of its process


@dataclass(eq=False)
class _State:
    before: str  # the command that came after the state
    folder: Path | None
    problem: str = ""  # the reason, if there is no folder
    bytes: int = 0  # size on disk


_held: list[_State] = []  # states of all sandboxes of this process, the oldest first


class Undo:
    """The states of a sandbox. `resumed`: a restore from a checkpoint has lost earlier states."""

    def __init__(self, resumed: bool = False) -> None:
        self._resumed = resumed
        scratch.remove_stale(PREFIX)
        self._folder = Path(tempfile.mkdtemp(prefix=scratch.prefix(PREFIX)))
        self._numbers = itertools.count()
        self._states: list[_State] = []

    async def keep(self, box: Sandbox, command: str) -> None:
        """Capture the current state, before `command` changes it."""
        problem = ""
        for kind in reversed(box.capture_kinds):  # most complete kind first
            folder = self._folder / str(next(self._numbers))
            try:
                await box.capture(kind, folder)
            except SandboxError as error:
                problem = str(error)
            else:
                state = _State(command, folder, bytes=await asyncio.to_thread(_disk_bytes, folder))
                self._states.append(state)
                _held.append(state)
                break
        else:
            self._states.append(_State(command, None, problem))
        await self._forget(self._states[:-MOST])
        await _make_room(self._folder)

    async def back(self, box: Sandbox, commands: int) -> tuple[Sandbox, str]:
        """Undo the last `commands` commands. Return the restored sandbox and a message for the
        agent. If that fails, return `box` and a message with the reason."""
        if commands > len(self._states):
            since = ", those since the machine was moved" if self._resumed else ""
            return box, f"Nothing is undone: {len(self._states)} commands can be{since}."
        state = self._states[-commands]
        what = f"before {state.before[:200]!r}"
        if state.folder is None:
            return box, f"Nothing is undone: the state {what} was not kept: {state.problem}"
        # `_make_room` must not remove the folder while it is read.
        _held.remove(state)
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
    """Remove the folder of a state. `problem`: the reason, for the agent."""
    if state in _held:
        _held.remove(state)
    folder, state.folder, state.problem = state.folder, None, state.problem or problem
    if folder is not None:
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def _make_room(where: Path) -> None:
    """Remove the oldest states while all states together take more than their share."""
    while _held:
        taken = sum(state.bytes for state in _held)
        most = SHARE * (shutil.disk_usage(where).free + taken)
        if taken <= most:
            return
        words = f"all that is kept for undo takes {most / 2**20:.0f} MiB at most"
        await _remove(_held[0], words)


def _disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * BLOCK for path in folder.rglob("*"))


def problem(backend: str) -> str:
    """Return why sandboxes of this backend can't restore earlier states; "" if they can. The
    calling thread must have no running event loop. Raises `SandboxError`."""

    async def try_capture() -> str:
        async with await Sandbox.start(Spec(), backend) as box:
            return "" if box.capture_kinds else f"backend {box.backend} captures no state"

    try:
        return asyncio.run(try_capture())
    finally:
        probe.close()
