"""The command `rose play` as its users start it: with its output in a pipe, or at a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path

from tests import processes

COMMAND = (sys.executable, "-m", "rose.parts.play")
SECONDS = 480


def environment(temporary: Path) -> dict[str, str]:
    temporary.mkdir(exist_ok=True)
    return os.environ | {"TMPDIR": str(temporary), "COLUMNS": "100", "TERM": "xterm"}


def play(*arguments: object, temporary: Path, typed: str = "") -> subprocess.CompletedProcess:
    """`typed` comes through a pipe. `temporary` is the folder for temporary files."""
    command = [*COMMAND, *map(str, arguments)]
    return processes.ran(command, input=typed, env=environment(temporary), timeout=SECONDS)


def frames(said: str) -> list[str]:
    """The lines of a game, from its first map to its verdict."""
    lines = said.splitlines()
    first = next(number for number, line in enumerate(lines) if "turn 1: " in line)
    last = next(n for n, line in enumerate(lines) if re.search("(Success|Failure) after", line))
    return lines[first : last + 1]


class Terminal:
    """The command in the foreground of a terminal of its own."""

    def __init__(self, *arguments: object, temporary: Path) -> None:
        self._here, there = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=there,
            stdout=there,
            stderr=there,
            env=environment(temporary),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(there)
        self._shown = b""
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def shown(self) -> str:
        """All that the terminal got, without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._shown.decode(errors="replace"))

    def until(self, words: str) -> None:
        """Wait until the terminal shows `words`."""
        processes.until(
            lambda: words in self.shown or self.process.poll() is not None, words, SECONDS
        )
        assert words in self.shown, self.shown

    def type(self, keys: str) -> None:
        os.write(self._here, keys.encode())

    def end(self) -> int:
        """Wait for the end; the exit code."""
        return self.process.wait(SECONDS)

    def _read(self) -> None:
        try:
            while data := os.read(self._here, 65536):
                self._shown += data
        except OSError:  # the command has ended
            os.close(self._here)
