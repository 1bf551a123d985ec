"""An agent's program: a process for each trajectory, which leaves no process behind.

A program's environment variables are the variables that every program needs, the addresses and the
key of its trajectory, and those of `env.args.environment`. It gets none of the run's tokens. It
runs below a reaper (reaper.py), which ends all its processes when the program or the host ends. If
a reaper is killed, this module finds its processes by the trajectory's name in their environment.
If the host is killed, too, the watchdog finds them. A program that clears the environment of its
processes and kills its reaper can leave processes behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rose import processes
from rose.parts.adapters.gateway import reaper, watchdog

OWN_PYTHON = ("PYTHONPATH", "VIRTUAL_ENV")  # kept for agents that import the run's packages
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
GATEWAY = "ROSE_GATEWAY_URL"
HOST = f"{os.getpid()}-{secrets.token_hex(8)}"  # name of this process, for the watchdog
MARK = "ROSE_TRAJECTORY"  # variable with the trajectory's name, for all its processes
LOG_BYTES = 2000  # bytes from the end of a program's output, for an error
MOST_LOG = 16 * 2**20  # bytes above which a log is cut, at the next poll
LOG_MODE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # O_APPEND for logs that are cut
REAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py")))
END_S = 2 * reaper.END_S  # seconds to wait for a reaper, twice its own limit


def environment(own: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """Return a program's environment: the variables `own`, and variables of this process that
    programs need or that `given` names. A proxy among them is not used for calls to the gateway."""
    kept = processes.bare_environment((*OWN_PYTHON, *given))
    if any(name.lower() in PROXIES for name in given):
        hosts = (
            kept.get("no_proxy") or kept.get("NO_PROXY"),
            urlsplit(own.get(GATEWAY, "")).hostname,
        )
        kept |= dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, hosts)))
    return kept | {"PYTHONUNBUFFERED": "1", watchdog.MARK: HOST} | dict(own)


class Program:
    """A running program of the trajectory `name`. `pid`: its reaper's process id. `code`: becomes
    the program's exit code, 128 + N if signal N ended it. `log`: the file with its output."""

    def __init__(self, name: str, pid: int, code: asyncio.Future[int], log: Path) -> None:
        self.name, self.pid, self.code, self._log = name, pid, code, log

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> Program:
        """Start `argv`. Raises OSError if there is no such program."""
        host, path = os.getpid(), variables.get("PATH")
        if shutil.which(argv[0], path=path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
        with open(os.open(log, LOG_MODE, 0o600), "wb") as file:
            process = await asyncio.create_subprocess_exec(
                *REAPER,
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=dict(variables),
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(host),
            )
        return cls(name, process.pid, asyncio.ensure_future(process.wait()), log)

    def cut_log(self) -> None:
        """If the log is larger than `MOST_LOG`, keep only its last `LOG_BYTES`."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > MOST_LOG:
                words = self.last_words()
                os.truncate(self._log, 0)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(words)

    def last_words(self) -> str:
        """Return the end of the program's output, for an error."""
        return printed(self._log, LOG_BYTES)

    async def end(self) -> None:
        """End the program and all its processes. Wait `END_S` at most for each of them."""
        if not self.code.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            await asyncio.wait({self.code}, timeout=END_S)
        # A reaper that was not killed has left no process.
        if self.code.done() and self.code.exception() is None and self.code.result() >= 0:
            return
        for process in await asyncio.to_thread(_family, self.pid, self.name):
            with contextlib.suppress(psutil.Error):
                process.kill()
                await asyncio.to_thread(process.wait, END_S)


def printed(log: Path, most: int) -> str:
    """Return the last `most` bytes of a program's output; "" if the log can't be read."""
    with contextlib.suppress(OSError):
        # The program may have replaced its log by a pipe, and opening that must not block.
        file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            about = os.fstat(file)
            if stat.S_ISREG(about.st_mode):
                data = os.pread(file, most, max(0, about.st_size - most))
                return data.decode(errors="replace").strip()
        finally:
            os.close(file)
    return ""


def _family(pid: int, name: str) -> list[psutil.Process]:
    """Return a reaper's process and its descendants. Add those descendants of this process that
    have the trajectory's name in their environment, because their parents may have ended."""
    found = []
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        found += [top, *top.children(recursive=True)]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process not in found and process.environ().get(MARK) == name:
                found.append(process)
    return found
