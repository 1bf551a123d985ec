"""An agent's program: a process for each trajectory, of which nothing stays behind.

Its environment is made anew: what a program needs to run, the addresses and the key of its
trajectory, and what `env.args.environment` names; nothing of the run's own tokens and variables.
It runs below a reaper (reaper.py), which ends all that it started, at its own end or the host's.
What a killed reaper has left behind is found by the trajectory's name in its environment; if the
host is killed, too, by the watchdog. Left out: a program that kills its reaper, after it has
started others with a cleared environment.
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
from rose.agent.gateway import reaper, watchdog

OWN_PYTHON = ("PYTHONPATH", "VIRTUAL_ENV")  # an agent may be of the run's own packages
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
GATEWAY = "ROSE_GATEWAY_URL"
HOST = f"{os.getpid()}-{secrets.token_hex(8)}"  # this process's name, for the watchdog
MARK = "ROSE_TRAJECTORY"  # in the environment of all that a program starts
LOG_BYTES = 2000  # of a program's last words in an error
MOST_LOG = 16 * 2**20  # bytes of what a program prints that may lie on the disk between two looks
LOG_MODE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # appending: it may be cut
REAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py")))
END_S = 2 * reaper.END_S  # A reaper ends within half of this.


def environment(own: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """`own` variables, and those of this process that programs need or that are `given`. A proxy
    that is given is not for the gateway."""
    kept = processes.bare_environment((*OWN_PYTHON, *given))
    if any(name.lower() in PROXIES for name in given):
        hosts = (
            kept.get("no_proxy") or kept.get("NO_PROXY"),
            urlsplit(own.get(GATEWAY, "")).hostname,
        )
        kept |= dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, hosts)))
    return kept | {"PYTHONUNBUFFERED": "1", watchdog.MARK: HOST} | dict(own)


class Program:
    """`name` is the trajectory's, `pid` that of its reaper, and `code` what it ends with: the
    program's exit code, 128 + N for signal N; `log` gets what it prints."""

    def __init__(self, name: str, pid: int, code: asyncio.Future[int], log: Path) -> None:
        self.name, self.pid, self.code, self._log = name, pid, code, log

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> Program:
        """Start `argv`. Raises OSError when there is no such program."""
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
        """Once it has printed more than `MOST_LOG`, only its last words stay."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > MOST_LOG:
                words = self.last_words()
                os.truncate(self._log, 0)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(words)

    def last_words(self) -> str:
        """What it printed at the end, for an error."""
        return printed(self._log, LOG_BYTES)

    async def end(self) -> None:
        """End it and all that it started; returns once they are gone, or after `END_S`."""
        if not self.code.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            await asyncio.wait({self.code}, timeout=END_S)
        # A reaper that has ended by itself has left nothing.
        if self.code.done() and self.code.exception() is None and self.code.result() >= 0:
            return
        for process in await asyncio.to_thread(_family, self.pid, self.name):
            with contextlib.suppress(psutil.Error):
                process.kill()
                await asyncio.to_thread(process.wait, END_S)


def printed(log: Path, most: int) -> str:
    """Return the last `most` bytes of what a program printed; "" if that can't be read."""
    with contextlib.suppress(OSError):
        # The program may have put a pipe there, at which opening would wait.
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
    """Return a reaper's process, all below it, and this process's descendants that bear the
    trajectory's name, whose own parents may have ended."""
    found = []
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        found += [top, *top.children(recursive=True)]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process not in found and process.environ().get(MARK) == name:
                found.append(process)
    return found
