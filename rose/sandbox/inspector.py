"""What a turn did to its sandbox: nothing, files, or more that only a whole process image keeps.

    inspector = Inspector(box)
    change = await inspector.look()         # after each turn, when the shell waits for the next one

Three quarters of an agent's turns change nothing that a checkpoint would have to keep (Crab, arXiv
2604.28138). Compared with the last look are the shell's state, which the session itself tells
(`backend.SESSION`), and what its process 1 sees of files, processes and open files (`watch`). What
can't be seen counts as changed. A program of the agent's can deceive its own sandbox's inspector
only, and so lose its own state.

Not seen: the seed of RANDOM, that such a variable was unset, bash's hash table and `$0`, the place
of getopts within one argument, on which cores and with what I/O priority a process may run, and
writes through memory into a nameless file (a memfd) that another process has open.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass

from rose.sandbox.sandbox import Sandbox

NONE, FILES, PROCESS = "none", "files", "process"
# Variables of bash whose value is another one at each command, or in each child
VOLATILE = re.compile(
    rb"declare -\S+ (BASHPID|BASH_ARG[CV]|BASH_COMMAND|BASH_LINENO|BASH_SOURCE|BASH_SUBSHELL|"
    rb"DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|FUNCNAME|LINENO|PIPESTATUS|RANDOM|SECONDS|SRANDOM|_)(=|$)"
)
CLOCK = re.compile(rb"\x01clock\n(-?\d+)\n")


@dataclass(frozen=True)
class Change:
    """`kind`: the least that a checkpoint of it takes; `why`: in words, what changed first;
    `unsure`: paths in the overlay's upper layer of files to copy even if their inode, size and
    times are those of an earlier copy: they may have been written through memory (None: all)."""

    kind: str
    why: str
    unsure: tuple[str, ...] | None = ()
    seconds: float = 0.0  # that the look took


class Inspector:
    """Of one running sandbox. The first look finds everything new, and so `process`."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self._shell: dict[bytes, bytes] = {}  # part of the shell's state -> its hash
        self._clock = 0

    async def look(self) -> Change:
        """What was done since the last look. Raises `SandboxError`."""
        began = time.monotonic()
        kind, why, unsure = await self._look()
        return Change(kind, why, unsure, time.monotonic() - began)

    async def _look(self) -> tuple[str, str, tuple[str, ...] | None]:
        said = await self.box.account()
        shell, before = parts(said), self._shell
        clock, clock_before = _clock(said), self._clock
        self._shell, self._clock = shell, clock
        try:
            seen = await self.box.shell.look()
        except (OSError, NotImplementedError) as error:
            return PROCESS, f"not seen: {error}", None
        unsure = None if seen["unsure"] is None else tuple(seen["unsure"])
        if not before:
            return PROCESS, "the first look", unsure
        if b"end" not in shell:
            return PROCESS, "the shell does not tell its state", unsure
        for name in shell.keys() | before.keys():
            if shell.get(name) != before.get(name):
                return PROCESS, f"the shell's {name.decode(errors='replace')} changed", unsure
        if seen["processes"] is not None:
            return PROCESS, seen["processes"], unsure
        if abs(clock - clock_before) > 1:
            return PROCESS, "the shell's SECONDS were set", unsure
        if seen["files"] is not None:
            return FILES, seen["files"], unsure
        if seen["blind"]:
            return FILES, f"a change may not be seen: {seen['blind']}", unsure
        if unsure:
            return FILES, f"/{unsure[0]} was open for writing", unsure
        return NONE, "", unsure

    async def resume(self) -> None:
        """To be called when a checkpoint of the processes is taken and they go on: who saves a
        process makes it run, which is not the agent's doing. Raises `SandboxError`."""
        await self.box.shell.resume()


def parts(said: bytes | None) -> dict[bytes, bytes]:
    """The hash of each part of a shell's state by its name; without the volatile variables."""
    found = {}
    for part in (said or b"").split(b"\1")[1:]:
        name, _, text = part.partition(b"\n")
        if name == b"clock":
            continue
        if name == b"variables":
            text = b"\n".join(line for line in text.split(b"\n") if not VOLATILE.match(line))
        found[name] = hashlib.blake2b(text, digest_size=16).digest()
    return found


def _clock(said: bytes | None) -> int:
    """When the shell's SECONDS were 0, in seconds since 1970; one off near the turn of a second."""
    found = CLOCK.search(said or b"")
    return int(found[1]) if found else 0
