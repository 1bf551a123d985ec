"""Classify what a turn changed in its sandbox: nothing, files, or state that needs process images.

    inspector = Inspector(box)
    change = await inspector.look()         # after each turn, while the shell waits for a command

Three quarters of an agent's turns change nothing that a checkpoint would have to keep (Crab, arXiv
2604.28138). Each inspection compares the state with that at the last inspection:
  1. the shell's variables and settings, which the session prints (`backend.SESSION`);
  2. files, processes and open files, which process 1 inspects (`watch`).
A state that can't be inspected counts as changed. An agent can deceive only the inspector of its
own sandbox, and would only lose its own state.

These changes are not noticed:
  - the seed of RANDOM, bash's hash table, `$0`, and the place of getopts within one argument;
  - unsetting a variable of `VOLATILE`;
  - a process's allowed cores and I/O priority;
  - writes through memory into a nameless file (a memfd) that another process has open;
  - data for a terminal that the kernel has not delivered yet (milliseconds).
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass

from rose.parts.sandbox.sandbox import Sandbox

NONE, FILES, PROCESS = "none", "files", "process"
# Variables of bash whose values differ at each command or in each subshell
VOLATILE = re.compile(
    rb"declare -\S+ (BASHPID|BASH_ARG[CV]|BASH_COMMAND|BASH_LINENO|BASH_SOURCE|BASH_SUBSHELL|"
    rb"DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|FUNCNAME|LINENO|PIPESTATUS|RANDOM|SECONDS|SRANDOM|_)(=|$)"
)
CLOCK = re.compile(rb"\x01clock\n(-?\d+)\n")


@dataclass(frozen=True)
class Change:
    """The result of an inspection. `kind`: the least kind of capture that contains the change.
    `why`: the first change found. `unsure`: files that may have changed although inode, size and
    times are the same, because a process can write them through memory; None: all files. Paths are
    relative to the sandbox's root. A capture must copy these files."""

    kind: str
    why: str
    unsure: tuple[str, ...] | None = ()
    seconds: float = 0.0  # duration of the inspection


class Inspector:
    """Inspects a sandbox. The first result is `process`: there is nothing to compare with yet."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self._shell: dict[bytes, bytes] = {}  # part of the shell's state -> its hash
        self._clock = 0

    async def look(self) -> Change:
        """Return what changed since the last call. Raises `SandboxError`."""
        began = time.monotonic()
        kind, why, unsure = await self._look()
        return Change(kind, why, unsure, time.monotonic() - began)

    async def _look(self) -> tuple[str, str, tuple[str, ...] | None]:
        """Return (kind, why, unsure) of the change since the last call; see `Change`."""
        printed = await self.box.account()
        shell, before = parts(printed), self._shell
        clock, clock_before = _clock(printed), self._clock
        self._shell, self._clock = shell, clock
        try:
            seen = await self.box.shell.look()
        except (OSError, NotImplementedError) as error:
            return PROCESS, f"not seen: {error}", None
        unsure = None if seen["unsure"] is None else tuple(seen["unsure"])
        if not before:
            return PROCESS, "the first look", unsure
        if b"end" not in shell:
            return PROCESS, "the shell did not print its whole state", unsure
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
        """Have the next `look` ignore that processes ran because of a capture. Call this after each
        capture of processes. Raises `SandboxError`."""
        await self.box.shell.resume()


def parts(printed: bytes | None) -> dict[bytes, bytes]:
    """Return the hash of each part of the state that a shell printed, by the part's name. The clock
    and volatile variables are left out."""
    found = {}
    for part in (printed or b"").split(b"\1")[1:]:
        name, _, text = part.partition(b"\n")
        if name == b"clock":
            continue
        if name == b"variables":
            text = b"\n".join(line for line in text.split(b"\n") if not VOLATILE.match(line))
        found[name] = hashlib.blake2b(text, digest_size=16).digest()
    return found


def _clock(printed: bytes | None) -> int:
    """Return the time at which the shell's SECONDS were 0, in seconds since 1970. It may be off by
    one; 0 if the shell didn't print it."""
    found = CLOCK.search(printed or b"")
    return int(found[1]) if found else 0
