"""A program that checks an answer: it runs in a folder of its own, in a process group of its own,
with limits.

Where the kernel allows it, the program has no network, sees no process but its own, and all of them
end with it (unshare(1), as root or in a user namespace); elsewhere a process that leaves its
session stays. It has none of this process's variables but PATH and LANG. It is no wall against
hostile code: the program reads and writes what this user can, and nothing bounds how many processes
it starts.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rose.files import write_whole
from rose.processes import die_with_parent

GIB = 2**30
OUTPUT_BYTES = 65_536  # of the program's, at most kept; it is told of when it fails
LARGEST_FILE = GIB  # that it may write
PROBE_S = 10.0
SPACES = ("--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
REFUSED = "unshare: "  # how its own failures begin
# The first process in the namespaces waits for a word of the worker. That of unshare(1) up to 2.38
# asks only after its fork to be killed with unshare: where the worker, and unshare with it, was
# killed before that, nothing would end the program; so it begins only if the worker lives
# afterwards. The last word is that process's name: what it can't execute is refused as by unshare.
BEGIN = ("sh", "-c", 'echo; read -r begin && exec "$@" < /dev/null', REFUSED.rstrip(": "))
# the last block of Python, or of any language, that an answer shows
CODE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


@functools.cache
def isolation() -> tuple[str, ...]:
    """The words before a program's own that give it namespaces; empty where the kernel refuses."""
    for users in ((), ("--user", "--map-current-user")):
        words = ("unshare", *users, *SPACES)
        if shutil.which("unshare") and _works((*words, "true")):
            return words
    return ()


def _works(command: Sequence[str]) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        return (
            subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False).returncode
            == 0
        )
    return False


def program(name: str) -> str | None:
    """Its path, as `run` would find it; null where there is none."""
    return shutil.which(name, path=_path())


def code_of(text: str) -> str:
    """The last fenced block of an answer, or all of it where there is none."""
    blocks = CODE.findall(text)
    return blocks[-1] if blocks else text


async def run(
    argv: Sequence[str], files: dict[str, str], timeout_s: float, memory_gib: float
) -> tuple[int | None, str]:
    """(exit code, end of what it printed) of `argv` in a folder that holds `files` (name -> text);
    the code is null after `timeout_s` seconds. Nothing of it stays.

    Raises `ValueError` for a name that leads out of the folder, `OSError` where it can't start.
    """
    if program(argv[0]) is None and not (set(files) & {argv[0], argv[0].removeprefix("./")}):
        raise FileNotFoundError(f"there is no program {argv[0]}")
    with tempfile.TemporaryDirectory(prefix="rose-reward-") as folder:
        _lay(Path(folder), files)
        process = await asyncio.create_subprocess_exec(
            *((*isolation(), *BEGIN) if isolation() else ()),
            *argv,
            cwd=folder,
            env=_environment(folder),
            stdin=asyncio.subprocess.PIPE if isolation() else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_limit, memory_gib, os.getpid()),
        )
        try:
            async with asyncio.timeout(timeout_s):
                first = await _begin(process) if isolation() else b""
                output = await _tail(process.stdout, first)
                code = await process.wait()
            if code and isolation() and output.startswith(REFUSED):
                raise OSError(output.strip())
            return code, output
        except TimeoutError:
            return None, ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _lay(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ValueError(f"a file named {name!r} would lie outside of the program's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())


def _environment(folder: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    own = {"PATH": _path(), "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    return kept | own | {"PYTHONDONTWRITEBYTECODE": "1"}


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _limit(memory_gib: float, parent: int) -> None:
    """In the new process, before the program, which ends when the worker `parent` does. Ranks under
    Slurm ignore SIGTERM, which programs would inherit."""
    die_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    nbytes = int(memory_gib * GIB)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


async def _begin(process: asyncio.subprocess.Process) -> bytes:
    """Let a program in namespaces begin, once their first process has said that it is there. What
    came instead of its word: why unshare failed."""
    line = await process.stdout.readline()
    if line == b"\n":
        process.stdin.write(b"\n")
        process.stdin.close()
        return b""
    return line


async def _tail(stream: asyncio.StreamReader, kept: bytes) -> str:
    """The last `OUTPUT_BYTES` of `kept` and all that comes, which is read to its end: a full pipe
    would stop the program."""
    while chunk := await stream.read(OUTPUT_BYTES):
        kept = (kept + chunk)[-OUTPUT_BYTES:]
    return kept.decode(errors="replace")
