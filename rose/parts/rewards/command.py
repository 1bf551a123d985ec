"""Run a program that checks an answer, in a folder and a process group of its own, with limits.

Where the kernel allows it (unshare(1), as root or in a user namespace), the program has no network
and sees only its own processes, which end with it. Elsewhere a process that leaves the program's
session survives it. Of the worker's environment variables it gets only PATH, LANG and LC_ALL. This
is no protection from hostile code: the program can read and write all that this user can, and the
number of its processes is not bounded.
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
OUTPUT_BYTES = 65_536  # last bytes of the program's output that are kept, for error messages
LARGEST_FILE = GIB  # size limit of a file that the program writes
POLL_S = 0.05  # seconds between two polls of a program's exit code
PROBE_S = 10.0  # most seconds for the test whether unshare works
SPACES = ("--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
REFUSED = "unshare: "  # start of unshare's own error messages
# The first process in the namespaces prints a line, and executes the program only after the worker
# has sent a line back. unshare(1) up to 2.38 sets --kill-child's signal only after its fork. If the
# worker and unshare were killed before that, nothing would end the program. The shell is named
# "unshare", so that its error about a program that it can't execute begins with `REFUSED`.
BEGIN = ("sh", "-c", 'echo; read -r begin && exec "$@" < /dev/null', REFUSED.rstrip(": "))
# A fenced block, in Python or any other language.
CODE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


@functools.cache
def isolation() -> tuple[str, ...]:
    """Return the command prefix that gives a program namespaces of its own; () if the kernel
    refuses them."""
    for users in ((), ("--user", "--map-current-user")):
        prefix = ("unshare", *users, *SPACES)
        if shutil.which("unshare") and _works((*prefix, "true")):
            return prefix
    return ()


def _works(command: Sequence[str]) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False)
        return done.returncode == 0
    return False


def program(name: str) -> str | None:
    """Return the path of the program that `run` would execute; None if there is none."""
    return shutil.which(name, path=_path())


def code_of(text: str) -> str:
    """Return the last fenced block of an answer, or all of it where there is none."""
    blocks = CODE.findall(text)
    return blocks[-1] if blocks else text


async def run(
    argv: Sequence[str], files: dict[str, str], timeout_s: float, memory_gib: float
) -> tuple[int | None, str]:
    """Run `argv` in a temporary folder with `files` (name -> text). Return (exit code, end of its
    output). The code is None if the program was killed after `timeout_s` seconds.

    Raises `ValueError` for a name that leads out of the folder, `OSError` if it can't start.
    """
    if program(argv[0]) is None and not (set(files) & {argv[0], argv[0].removeprefix("./")}):
        raise FileNotFoundError(f"there is no program {argv[0]}")
    with tempfile.TemporaryDirectory(prefix="rose-reward-", ignore_cleanup_errors=True) as folder:
        _write_files(Path(folder), files)
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
        ending = asyncio.create_task(_end_children(process))
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
            ending.cancel()
            _kill_group(process)
            await process.wait()


async def _end_children(process: asyncio.subprocess.Process) -> None:
    """Kill the program's children once it has ended, since they would keep its output open. Poll
    the exit code, as `process.wait` returns only after the output is closed."""
    while process.returncode is None:
        await asyncio.sleep(POLL_S)
    _kill_group(process)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _write_files(folder: Path, files: dict[str, str]) -> None:
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
    """Set limits in the program's process, before it executes the program. The program ends with
    the worker `parent`. Signal handlers are reset, since ranks under Slurm ignore SIGTERM."""
    die_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    nbytes = int(memory_gib * GIB)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


async def _begin(process: asyncio.subprocess.Process) -> bytes:
    """Let the program start once the first process in its namespaces has printed its line. Return
    any other line, which is unshare's error, or b""."""
    line = await process.stdout.readline()
    if line == b"\n":
        process.stdin.write(b"\n")
        process.stdin.close()
        return b""
    return line


async def _tail(stream: asyncio.StreamReader, kept: bytes) -> str:
    """Read the stream to its end, as a full pipe would block the program. Return the last
    `OUTPUT_BYTES` of `kept` and the stream."""
    while chunk := await stream.read(OUTPUT_BYTES):
        kept = (kept + chunk)[-OUTPUT_BYTES:]
    return kept.decode(errors="replace")
