"""An agent's program: one process group for each trajectory, of which nothing stays behind.

Its environment is made anew: what a program needs to run, the addresses and the key of its
trajectory, and what `env.args.environment` names; nothing of the run's own tokens and variables.
It dies with the environment host, and its end ends all that it started, also what has left its
process group: such processes become the host's (`processes.adopt_orphans`) and bear its name. If
the host is killed, the watchdog ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from rose import processes
from rose.agent.gateway import watchdog

OWN_PYTHON = ("PYTHONPATH", "VIRTUAL_ENV")  # an agent may be of the run's own packages
HOST = f"{os.getpid()}-{secrets.token_hex(8)}"  # this process's name, for the watchdog
MARK = "ROSE_TRAJECTORY"  # in the environment of all that a program starts
LOG_BYTES = 2000  # of a program's last words in an error
MOST_LOG = 16 * 2**20  # bytes of what a program prints that may lie on the disk between two looks
LOG_MODE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # appending: it may be cut
END_S = 5.0  # for killed processes to be gone


def environment(own: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """`own` variables, and those of this process that programs need or that are `given`."""
    kept = processes.bare_environment((*OWN_PYTHON, *given))
    return kept | {"PYTHONUNBUFFERED": "1", watchdog.MARK: HOST} | dict(own)


class Program:
    """`name` is the trajectory's, `pid` that of the process, which leads a session of its own, and
    `code` what it ends with, -N for signal N; `log` gets what it prints."""

    def __init__(self, name: str, pid: int, code: asyncio.Future[int], log: Path) -> None:
        self.name, self.pid, self.code, self._log = name, pid, code, log

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> Program:
        """Raises OSError when it can't be started."""
        host = os.getpid()
        with open(os.open(log, LOG_MODE, 0o600), "wb") as file:
            process = await asyncio.create_subprocess_exec(
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
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").strip()
        return ""

    async def end(self) -> None:
        """Kill it and all that it started; returns once they are gone, or after `END_S`."""
        children: list[psutil.Process] = []
        if not self.code.done():  # else they have another parent by now; a look reads all of /proc
            children = await asyncio.to_thread(_family, self.pid, self.name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self.code.done():  # just forked, it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        await asyncio.wait({self.code}, timeout=END_S)
        for process in {*children, *await asyncio.to_thread(_family, self.pid, self.name)}:
            with contextlib.suppress(psutil.Error):
                process.kill()
                await asyncio.to_thread(process.wait, END_S)
        with contextlib.suppress(ChildProcessError):  # those of its group that became the host's
            while os.waitpid(-self.pid, os.WNOHANG) != (0, 0):
                pass


def _family(pid: int, name: str) -> list[psutil.Process]:
    """Return what a process has started, and this process's descendants that bear the trajectory's
    name: of these the parents may be gone. What the look finds ended goes to `_reap`."""
    found = []
    with contextlib.suppress(psutil.Error):
        found += psutil.Process(pid).children(recursive=True)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                _reap(process.pid)
            elif process.pid != pid and process.environ().get(MARK) == name:
                found.append(process)
    return found


def _reap(pid: int) -> None:
    """Reap an ended process that was the first of a PID namespace, as of an agent's own sandbox.

    When the sandbox's keeper has ended, the host adopts it, and nobody waits for it. The host's
    other children are left alone: whoever started one may ask for its exit code at any time."""
    with contextlib.suppress(OSError):  # It is gone, or another process's child.
        if _namespaces(pid) > _namespaces(os.getpid()):
            os.waitpid(pid, os.WNOHANG)


def _namespaces(pid: int) -> int:
    """Return in how many nested PID namespaces, from that of /proc inwards, a process is."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^NSpid:(.*)", status, re.MULTILINE)
    return len(found[1].split()) if found else 0
