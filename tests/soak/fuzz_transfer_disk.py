"""tests/soak/fuzz_transfer.py's part `disk`: no room for a version, or not for all of it. Not a
command."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fuzz_transfer_world import TIMEOUT_S, History, Tally, consistent, fork, load, start, world

from rose.transfer import TransferError
from rose.transfer.store import INITIAL


def disk_part(folder: Path, seed: int, every: int, tally: Tally) -> None:
    history, store = History(seed), folder / "limited"
    files = world(folder / "sizes", history, 3, full_every=2).store.rglob("*.*")
    largest = max(path.stat().st_size for path in files if path.is_file())
    for limit in range(0, largest + 1, every):
        limits = resource.RLIMIT_FSIZE, (limit, limit)
        said = _refused(store, history, lambda: resource.setrlimit(*limits))
        _after_full_disk(said, store, history, f"no file above {limit} bytes", tally)
        shutil.rmtree(store)
    if os.geteuid() == 0:
        _small_disk(folder, history, range(0, 16, max(1, every // 256)), tally)


def _refused(store: Path, history: History, fill: Callable[[], object]) -> str:
    """How version 2 ended in a process of its own, with a store of two versions and then no room:
    "" if it was written."""
    said = fork.SimpleQueue()

    def publish() -> None:
        # HDF5 tells of each object that it could not flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        made = world(store, history, 2, full_every=2, timeout_s=5.0)
        fill()
        made.weights = history.at(2)
        try:
            made.publish(2)
            made.tidy()
            said.put("")
        except Exception as error:
            said.put(f"{type(error).__name__}: {error}")

    process = start(publish)
    process.join(2 * TIMEOUT_S)
    return "no answer" if said.empty() else said.get()


def _after_full_disk(said: str, store: Path, history: History, what: str, tally: Tally) -> None:
    named = not said or said.startswith(f"TransferError: {store}/v000002/")
    tally.require(named, f"{what}: no TransferError that names a file: {said}")
    tally.count("full disks" if said else "disks with room")
    left = [str(path) for path in store.rglob(".*")]
    tally.require(not left, f"{what}: left behind: {left}")
    consistent(store, history, what, tally)
    for version in (0, 1):
        try:
            route, live = load(str(store), history, INITIAL, version)
            tally.right(live, history.at(version), f"{what}: by {route}")
        except TransferError as error:
            tally.violation(f"{what}: version {version}: {error}")


def _small_disk(folder: Path, history: History, rooms: range, tally: Tally) -> None:
    """A real file system without room: for more and more of version 2 there is some."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]).returncode:
        print("    no small disk: this user may not mount", file=sys.stderr)
        return
    try:
        for pages in rooms:
            said = _refused(disk / "store", history, lambda: _fill(disk, pages))
            _after_full_disk(said, disk / "store", history, f"{pages} pages of room", tally)
            (disk / "filler").unlink()
            shutil.rmtree(disk / "store")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(disk: Path, pages: int) -> None:
    """But for so many pages of 4 KiB."""
    with (disk / "filler").open("wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail > pages:
            file.write(bytes(4096))
