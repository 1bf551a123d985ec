"""Keep the trajectories that failed and were replaced: their tokens so far, the cause, and the
output of the agent's program.

Each has a file in `<run_dir>/failed/`. About the newest `MOST` files stay, so that a run in which
all trajectories fail doesn't fill the disk. A file is a map in msgpack. It has the fields of the
unfinished `Trajectory`, and `cause`, `task`, `output` and `time` (seconds, wall clock). No step
trains on it. A trajectory that can't be kept is dropped, so that no error here ends a run.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rose.files import write_whole

FOLDER = "failed"
MOST = 64  # most files of a run
MOST_BYTES = 8 * 2**20  # most bytes of a file; a longer trajectory is kept without its tokens
WAITING = 16  # most trajectories that wait for the disk; further trajectories are dropped
CLOSE_S = 5.0  # seconds for writing the waiting trajectories at the end


class Keeper:
    """Writes failed trajectories in a thread of its own, so that a hanging disk delays neither the
    host nor its other trajectories."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._waiting: queue.Queue[tuple | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._written = 0

    def keep(self, identity: Any, cause: str, task: str, output: str, made: Any) -> None:
        """Keep a trajectory. `identity` has its `id`, `group` and `domain`. `output`: text that its
        program printed. `made`: the unfinished `Trajectory`; None before the first token."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_waiting, daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._waiting.put_nowait((identity, cause, task, output, made))

    def close(self) -> None:
        """Wait until all trajectories are written, for twice `CLOSE_S` at most."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _write_waiting(self) -> None:
        while (one := self._waiting.get()) is not None:
            try:
                self._write(*one)
            except Exception as error:  # any type, for example from a program's output
                print(f"a failed trajectory is not kept: {type(error).__name__}: {error}")

    def _write(self, identity: Any, cause: str, task: str, output: str, made: Any) -> None:
        about = {name: getattr(identity, name) for name in ("id", "group", "domain")}
        end = {"cause": cause, "task": task, "output": output, "time": time.time()}
        if made is not None:
            made = msgspec.structs.replace(made, experts=b"")
            record = msgspec.to_builtins(made, builtin_types=(bytes,))
        else:
            record = {}
        data = msgspec.msgpack.encode(record | about | end)
        if len(data) > MOST_BYTES:
            data = msgspec.msgpack.encode(about | end)
        self._folder.mkdir(exist_ok=True)
        write_whole(self._folder / f"{about['id']}.msgpack", data)
        self._written += 1
        # A shared disk lists folders slowly, so old files aren't removed each time.
        if self._written % (MOST // 4) == 0:
            for old in by_age(self._folder)[:-MOST]:
                old.unlink(missing_ok=True)


def by_age(folder: Path) -> list[Path]:
    """Return the files, the oldest first. Hosts may remove some of them meanwhile."""
    ages = {}
    for path in folder.glob("*.msgpack"):
        with suppress(OSError):
            ages[path] = path.stat().st_mtime
    return sorted(ages, key=lambda path: (ages[path], path.name))
