"""Find which backends work here, by starting a sandbox with each."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import sys
from dataclasses import dataclass, replace

from rose.parts.sandbox import capture, gvisor
from rose.parts.sandbox.backend import SandboxError, Shell, Spec
from rose.parts.sandbox.kernel import SECCOMP
from rose.parts.sandbox.namespaces import NAME, Keeper, Namespaces

BACKENDS = (NAME, gvisor.NAME)  # the order in which `auto` tries them
AUTO = "auto"
SECCOMP_MISSING = (
    "libseccomp.so.2 is not installed (Debian: libseccomp2, Red Hat: libseccomp): no filter of "
    "system calls"
)

_keepers: dict[int, Keeper] = {}  # process id -> keeper, as a forked process needs its own


@dataclass(frozen=True)
class Found:
    """A backend on this machine. `words`: how it works here. `problem`: why it doesn't work, "" if
    it does. `lacking`: missing parts of its isolation or limits."""

    backend: str
    words: str
    problem: str = ""
    lacking: tuple[str, ...] = ()

    @property
    def account(self) -> str:
        """A line about a working backend, for a run's report."""
        lost = f"; not here: {'; '.join(self.lacking)}" if self.lacking else ""
        return f"sandboxes: {self.backend}, {self.words}{lost}"


def keeper() -> Keeper:
    """Return this process's keeper, and start it if necessary. Raises `SandboxError`."""
    found = _keepers.get(os.getpid())
    if found is None or not found.alive:
        found = _keepers[os.getpid()] = Keeper.start()
        atexit.register(found.close)
    return found


def close() -> None:
    """End this process's keeper and its sandboxes."""
    found = _keepers.pop(os.getpid(), None)
    if found is not None:
        atexit.unregister(found.close)
        found.close()


def _rights(found: Keeper) -> str:
    return "with root" if found.root else "without root, in a user namespace"


async def begin(spec: Spec, backend: str) -> tuple[Shell, str]:
    """Start a sandbox. Return its shell and its backend's name. Raises `SandboxError`."""
    problems = []
    if backend not in (AUTO, *BACKENDS):
        raise SandboxError(f"backend={backend!r}: there are {AUTO}, {', '.join(BACKENDS)}")
    for name in BACKENDS if backend == AUTO else (backend,):
        try:
            return await (keeper() if name == NAME else gvisor).begin(spec), name
        except SandboxError as error:
            problems.append(f"{name}: {error}")
    raise SandboxError(f"no backend for sandboxes works here: {'; '.join(problems)}")


@functools.cache
def announce(name: str) -> None:
    """Log the backend and what it lacks, once per process."""
    lines = [f"sandboxes: backend {name}"]
    if name == NAME:
        lines[0] += f", {_rights(keeper())}"
        lines += [f"sandboxes: {words}" for words in _missing_limits(keeper())]
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _missing_limits(found: Keeper) -> list[str]:
    lacking = [f"no limit of {key}: {why}" for key, why in found.lacking.items()]
    return lacking + ([SECCOMP_MISSING] if SECCOMP is None else [])


def describe() -> list[Found]:
    """Try every backend by starting a sandbox. Call this in a thread without an event loop."""
    return [asyncio.run(_describe(name)) for name in BACKENDS]


async def _describe(name: str) -> Found:
    """Start a sandbox with the backend `name`, and return whether and how it works."""
    if name != NAME and shutil.which(gvisor.PROGRAM) is None:
        return Found(name, "", f"{gvisor.PROGRAM} is not installed")
    lacking, words = [], "works"
    try:
        if name == NAME:
            words, lacking = _rights(keeper()), _missing_limits(keeper())
        shell, _ = await begin(Spec(), name)
        if isinstance(shell, Namespaces):
            if problem := await capture.tried(shell, keeper()):
                lacking.append(f"captures have no processes: {problem}")
            else:
                words += "; captures files and processes"
        elif not shell.captures().get("process", "none"):
            words += "; captures files and processes after each turn, as it can't detect changes"
        else:
            words += "; captures nothing, so no checkpoints and no undo"
        await shell.close()
    except SandboxError as error:
        return Found(name, "", str(error), tuple(lacking))
    finally:
        close()
    return Found(name, words, "", tuple(lacking))


def choose(backend: str = AUTO) -> Found:
    """Start a sandbox with `backend`; if it is "auto", with each backend until one works. Return
    this backend. Its `lacking` includes why the earlier backends don't work. Call this in a thread
    without an event loop. Raises `SandboxError`."""
    problems = []
    for name in BACKENDS if backend == AUTO else (backend,):
        found = asyncio.run(_describe(name))
        if not found.problem:
            return replace(found, lacking=(*found.lacking, *problems))
        problems.append(f"{name}: {found.problem}")
    raise SandboxError(f"no backend for sandboxes works here: {'; '.join(problems)}")
