"""Which backends work here: found by starting a sandbox of each, once in a process."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import sys
from dataclasses import dataclass, replace

from rose.sandbox import apptainer, capture, gvisor
from rose.sandbox.backend import SandboxError, Shell, Spec
from rose.sandbox.kernel import SECCOMP
from rose.sandbox.namespaces import NAME, Keeper, Namespaces

BACKENDS = (NAME, gvisor.NAME, apptainer.NAME)  # auto: the first that works
AUTO = "auto"
SECCOMP_MISSING = (
    "libseccomp.so.2 is not installed (Debian: libseccomp2, Red Hat: libseccomp): no filter of "
    "system calls"
)

_keepers: dict[int, Keeper] = {}  # by process: a forked one must not use its parent's


@dataclass(frozen=True)
class Found:
    """What a backend is here: `problem` says why it doesn't work ("" if it does), `lacking` what is
    missing from its wall or its limits."""

    backend: str
    words: str
    problem: str = ""
    lacking: tuple[str, ...] = ()

    @property
    def account(self) -> str:
        """Of one that works, for a run's report."""
        lost = f"; not here: {'; '.join(self.lacking)}" if self.lacking else ""
        return f"sandboxes: {self.backend}, {self.words}{lost}"


def keeper() -> Keeper:
    """This process's. Raises `SandboxError`."""
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


def _kind(found: Keeper) -> str:
    return "with root" if found.root else "without root, in a user namespace"


async def begin(spec: Spec, backend: str) -> tuple[Shell, str]:
    """A running shell and its backend's name. Raises `SandboxError`."""
    problems = []
    for name in BACKENDS if backend == AUTO else (backend,):
        try:
            if name == NAME:
                return await keeper().begin(spec), name
            program = {gvisor.NAME: gvisor, apptainer.NAME: apptainer}[name]
            return await program.begin(spec), name
        except KeyError:
            raise SandboxError(
                f"backend={backend!r}: there are {AUTO}, {', '.join(BACKENDS)}"
            ) from None
        except SandboxError as error:
            problems.append(f"{name}: {error}")
    raise SandboxError(f"no backend for sandboxes works here: {'; '.join(problems)}")


@functools.cache
def announce(name: str) -> None:
    """Name the backend and what it lacks in the log, once in a process."""
    lines = [f"sandboxes: backend {name}"]
    if name == NAME:
        lines[0] += f", {_kind(keeper())}"
        lines += [f"sandboxes: {words}" for words in _lacking(keeper())]
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _lacking(found: Keeper) -> list[str]:
    lacking = [f"no limit of {key}: {why}" for key, why in found.lacking.items()]
    return lacking + ([SECCOMP_MISSING] if SECCOMP is None else [])


def describe() -> list[Found]:
    """Every backend; each is tried by a sandbox that runs one command. For a thread without an
    event loop."""
    return [asyncio.run(_describe(name)) for name in BACKENDS]


async def _describe(name: str) -> Found:
    if name != NAME and shutil.which(name_of_program(name)) is None:
        return Found(name, "", f"{name_of_program(name)} is not installed")
    lacking, words = [], "works"
    try:
        if name == NAME:
            words, lacking = _kind(keeper()), _lacking(keeper())
        shell, _ = await begin(Spec(), name)
        if isinstance(shell, Namespaces):
            if problem := await capture.tried(shell, keeper()):
                lacking.append(f"captures have no processes: {problem}")
            else:
                words += "; captures files and processes"
        elif not shell.captures().get("process", "none"):
            words += "; captures processes with their files, after each turn, as it sees no change"
        else:
            words += "; captures nothing, so no checkpoints and no undo"
        await shell.close()
    except SandboxError as error:
        return Found(name, "", str(error), tuple(lacking))
    finally:
        close()
    return Found(name, words, "", tuple(lacking))


def name_of_program(name: str) -> str:
    return {gvisor.NAME: gvisor.PROGRAM, apptainer.NAME: apptainer.PROGRAM}[name]


def choose(backend: str = AUTO) -> Found:
    """`backend`, or the one that `auto` takes here, tried by a sandbox that runs one command; to
    what it lacks belong those that `auto` would rather take. For a thread without an event loop.
    Raises `SandboxError`."""
    problems = []
    for name in BACKENDS if backend == AUTO else (backend,):
        found = asyncio.run(_describe(name))
        if not found.problem:
            return replace(found, lacking=(*found.lacking, *problems))
        problems.append(f"{name}: {found.problem}")
    raise SandboxError(f"no backend for sandboxes works here: {'; '.join(problems)}")
