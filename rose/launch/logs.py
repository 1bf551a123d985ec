"""Send a rank's output to logs/attempt-NNN/<role>-<rank>.log, and keep a link `logs/latest`."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections import deque
from pathlib import Path

from rose.files import Lossy
from rose.observe.status import numbers
from rose.protocol import Role


def attempt_folder(run_dir: Path, attempt: int) -> Path:
    return Path(run_dir) / "logs" / f"attempt-{attempt:03d}"


def rank_log(run_dir: Path, attempt: int, role: Role, rank: int) -> Path:
    return attempt_folder(run_dir, attempt) / f"{Role(role).value}-{rank}.log"


def new_attempt(run_dir: Path) -> int:
    """Make the next attempt's log folder (numbers start at 1), point `logs/latest` at it, and
    return its number. Numbers in status/ count too: a user may have removed an attempt's logs, and
    its ranks' states would be taken for those of a new attempt with the same number."""
    done = [numbers(Path(run_dir) / name) for name in ("logs", "status")]
    attempt = max(itertools.chain.from_iterable(done), default=0) + 1
    folder = attempt_folder(run_dir, attempt)
    folder.mkdir(parents=True)
    link = folder.parent / "latest"
    fresh = folder.parent / ".latest"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(link)  # atomic, so that readers always find a link
    return attempt


def redirect(run_dir: Path, attempt: int, role: Role, rank: int) -> None:
    """Send the stdout and stderr of this process and its children to its log, line by line.
    Printing never fails: on a full disk the text is lost."""
    path = rank_log(run_dir, attempt, role, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        os.dup2(descriptor, number)
        lossy = io.BufferedWriter(Lossy(number, "wb", closefd=False))
        setattr(
            sys,
            name,
            io.TextIOWrapper(lossy, "utf-8", errors="backslashreplace", line_buffering=True),
        )
    os.close(descriptor)


def tail(path: Path, lines: int) -> list[str]:
    """Return the last `lines` lines of a log, or all if it has fewer; none if there is no such
    file."""
    if not Path(path).exists():
        return []
    with open(path, errors="replace", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in deque(file, maxlen=lines)]
