"""Measure a run's use of the disk: bytes and files of each of its folders, and their growth.

Quotas count blocks and inodes. So bytes are those that the disk has allocated, and folders, sockets
and links count as files. Left out: other runs and the model's cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

BLOCK = 512  # bytes of a block in st_blocks, whatever the file system's own blocks are
# Seconds for a walk. Metadata servers of busy clusters answer some 1,000 calls a second, and a run
# with sandboxes has 100,000 files and more. An unfinished count is shown as a lower bound.
WALK_S = 20.0
OWN_FILES = "(files)"  # name for the files directly in the run's folder
MOST_GROWN = 4  # folders that an error names


class Use(NamedTuple):
    """Allocated bytes and number of files, of one folder or of several."""

    bytes: int = 0
    files: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.bytes + other.bytes, self.files + other.files)

    def __sub__(self, other: Use) -> Use:
        return Use(self.bytes - other.bytes, self.files - other.files)


def size(count: float) -> str:
    """Return a number of bytes as text, in a unit that gives few digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def files(count: int) -> str:
    return f"{count:,} file{'s' * (count != 1)}"


def measure(run_dir: Path, within_s: float = WALK_S) -> tuple[dict[str, Use], bool]:
    """Return the use of each folder of the run, and True if the walk finished within `within_s`.

    Leave out files that vanish meanwhile or can't be read. A file with several names counts once.
    """
    found: dict[str, Use] = {}
    until, seen = time.monotonic() + within_s, set()
    waiting = [(Path(run_dir), OWN_FILES)]
    while waiting:
        folder, name = waiting.pop()
        try:
            entries = os.scandir(folder)
        except OSError:
            continue
        with entries:
            for entry in entries:
                if time.monotonic() > until:
                    return found, False
                try:
                    stat = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                inner = S_ISDIR(stat.st_mode)
                of = entry.name if name == OWN_FILES and inner else name
                if inner:
                    waiting.append((Path(entry.path), of))
                elif stat.st_nlink > 1:
                    if (stat.st_dev, stat.st_ino) in seen:
                        continue
                    seen.add((stat.st_dev, stat.st_ino))
                found[of] = found.get(of, Use()) + Use(stat.st_blocks * BLOCK, 1)
    return found, True


def show(run_dir: Path, console: Console) -> None:
    """Print the use of each folder, the largest first, and the total."""
    found, whole = measure(run_dir)
    if not found:
        return
    least = "" if whole else "at least "
    table = Table(title="on disk", title_justify="left")
    table.add_column("folder")
    for name in ("size", "files"):
        table.add_column(name, justify="right")
    for name, use in sorted(found.items(), key=lambda item: item[1], reverse=True):
        table.add_row(escape(name), size(use.bytes), f"{use.files:,}")
    total = sum(found.values(), Use())
    table.add_row("all", least + size(total.bytes), f"{least}{total.files:,}", end_section=True)
    console.print(table)


def growth(before: tuple[Mapping[str, Use], bool], now: tuple[Mapping[str, Use], bool]) -> str:
    """Return a text on which folders of a run grew between two results of `measure`, the most grown
    first. If a walk did not finish, return a text on the largest folders instead."""
    (before, whole), (now, whole_now) = before, now
    if not (whole and whole_now):
        largest = sorted(now, key=lambda name: now[name], reverse=True)[:MOST_GROWN]
        parts = [f"{name} {size(now[name].bytes)} and {files(now[name].files)}" for name in largest]
        return f"of this run, counted in part, are there at least {'; '.join(parts)}"
    more = {name: use - before.get(name, Use()) for name, use in now.items()}
    grown = sorted(
        (name for name, use in more.items() if use.bytes > 0 or use.files > 0),
        key=lambda name: more[name],
        reverse=True,
    )
    if not grown:
        return "no folder of this run grew during this attempt: something else took the room"
    parts = [
        f"{name} by {size(max(0, more[name].bytes))} and {files(max(0, more[name].files))} to "
        f"{size(now[name].bytes)} and {files(now[name].files)}"
        for name in grown[:MOST_GROWN]
    ]
    return f"of this run, during this attempt, grew {'; '.join(parts)}"
