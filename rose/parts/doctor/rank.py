"""Exchange files between two nodes, then try one MPI world. Runs on a node of each component.

    python -m rose.parts.doctor.rank                  the world only
    python -m rose.parts.doctor.rank FOLDER SIDE      SIDE: 0 writes first, 1 answers

Emits {"what": "files", "round_trips": [seconds]}, or "missing": path, then {"what": "world",
"size": ranks}. Imports nothing but the standard library until the files have arrived.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

from rose.parts.doctor.finding import Ended, Finding, emit

ROUNDS = 5  # files that go to the other node and are answered
SEEN_S = 10.0  # seconds for a file to appear on the other node, else the folder isn't shared
SLOW_S = 1.0  # seconds for a file to appear, above which the user is warned
POLL_S = 0.005
PART = "files seen between nodes"


def main() -> None:
    if len(sys.argv) > 1:
        emit("files", **exchange(Path(sys.argv[1]), int(sys.argv[2])))
    from mpi4py import MPI

    from rose.comm import mpi_process

    world = MPI.COMM_WORLD
    mpi_process.unlink_shared(world)
    emit("world", size=world.Get_size(), library=MPI.Get_library_version().split("\n")[0].strip())
    world.Barrier()
    os._exit(0)


def exchange(folder: Path, side: int) -> dict:
    """Exchange `ROUNDS` files with the other side. Side 0 writes a file and waits for an answer;
    side 1 waits for a file and answers."""
    end = time.monotonic() + SEEN_S
    while not folder.is_dir():
        if time.monotonic() > end:
            return {"missing": str(folder)}
        time.sleep(POLL_S)
    took = []
    for number in range(ROUNDS):
        began = time.monotonic()
        if side == 0:
            _publish(folder / f"ask-{number}")
        other = folder / f"{'answer' if side == 0 else 'ask'}-{number}"
        if not _appears(other):
            return {"missing": str(other)}
        if side == 1:
            _publish(folder / f"answer-{number}")
        took.append(time.monotonic() - began)
    return {"round_trips": took}


def _publish(path: Path) -> None:
    """Write a file as the run does: under another name, to the disk, and then renamed."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(path.name)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _appears(path: Path) -> bool:
    """True if the file appears, with its content, within `SEEN_S`."""
    end = time.monotonic() + SEEN_S
    while time.monotonic() < end:
        if path.exists() and path.read_text(encoding="utf-8") == path.name:
            return True
        time.sleep(POLL_S)
    return False


def files(done: Ended, folder: Path) -> Finding:
    """Return the finding about `folder` from the events of both sides."""
    events = [event for event in done.events() if event["what"] == "files"]
    unseen = next((event for event in events if "missing" in event), None)
    if unseen is not None:
        words = f"{unseen['node']} did not see {unseen['missing']} within {SEEN_S:g} s"
        remedy = (
            "give an output_dir (--folder) on a file system that all nodes share; "
            f"{folder} is on none"
        )
        return Finding("failed", PART, words, remedy)
    if len(events) < 2:
        words = "not tried, since no job over two components ran"
        return Finding("warning", PART, words, "see the MPI world below")
    here, there = (event["node"] for event in events)
    if here == there:
        words = f"both components ran on {here}"
        return Finding("warning", PART, words, "try again when two nodes are free")
    seconds = statistics.median(min((event["round_trips"] for event in events), key=sum)) / 2
    words = f"a file of {here} is seen on {there} after {1e3 * seconds:.0f} ms"
    if seconds > SLOW_S:
        remedy = "joining and weights wait for it; a mount without attribute caching (actimeo=1 or "
        return Finding("warning", PART, words, remedy + "noac for NFS) is faster")
    return Finding("ok", PART, words)


if __name__ == "__main__":
    main()
