"""Keeps the trajectories that failed and were replaced: what was said up to there, the cause, and
what the agent's program had printed.

Each is a file of `<run_dir>/failed/`, of which about the newest `MOST` stay, so that a run in which
all fail fills no disk. A file is a map in msgpack: the fields of a `Trajectory` as far as it came,
and `cause`, `task`, `output` and `time` (seconds of the wall clock). Nothing of it is trained on,
and nothing here may cost a run: what can't be kept is left out.
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
from rose.observe.trajectories import Shown, of_record

FOLDER = "failed"
MOST = 64  # files of a run
MOST_BYTES = 8 * 2**20  # A file has at most so many; a longer trajectory is kept without tokens.
WAITING = 16  # So many may wait for the disk; further ones are left out.
CLOSE_S = 5.0  # seconds that the last ones may take
NOT_ONE = (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError)


class Keeper:
    """Writes them in a thread of its own: a disk that hangs holds up neither the host nor its
    other trajectories."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._waiting: queue.Queue[tuple | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._written = 0

    def keep(self, identity: Any, cause: str, task: str, output: str, made: Any) -> None:
        """Keep one. `identity` has its `id`, `group` and `domain`; `made` is the `Trajectory` as
        far as it came, or None before the first token; `output` is what its program printed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._waiting.put_nowait((identity, cause, task, output, made))

    def close(self) -> None:
        """Wait until all are written, for `CLOSE_S` at most."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            try:
                self._write(*one)
            except Exception as error:  # Its texts are a stranger's, and the disk may be full.
                print(f"a failed trajectory is not kept: {type(error).__name__}: {error}")

    def _write(self, identity: Any, cause: str, task: str, output: str, made: Any) -> None:
        about = {name: getattr(identity, name) for name in ("id", "group", "domain")}
        words = {"cause": cause, "task": task, "output": output, "time": time.time()}
        if made is not None:
            made = msgspec.structs.replace(made, experts=b"")
            record = msgspec.to_builtins(made, builtin_types=(bytes,))
        else:
            record = {}
        data = msgspec.msgpack.encode(record | about | words)
        if len(data) > MOST_BYTES:
            data = msgspec.msgpack.encode(about | words)
        self._folder.mkdir(exist_ok=True)
        write_whole(self._folder / f"{about['id']}.msgpack", data)
        self._written += 1
        if self._written % (MOST // 4) == 0:  # To look through the folder takes a shared disk time.
            for old in _by_age(self._folder)[:-MOST]:
                old.unlink(missing_ok=True)


def read(run_dir: Path, most: int = 2 * MOST) -> tuple[list[Shown], list[str]]:
    """Return the newest that are kept, the oldest of them first, and what is wrong with files that
    can't be read."""
    found, damaged = [], []
    for path in _by_age(Path(run_dir) / FOLDER)[-most:]:
        try:
            shown = of_record(msgspec.msgpack.decode(path.read_bytes()))
            if not all(isinstance(shown.record[name], str) for name in ("id", "cause")):
                raise ValueError("id and cause must be texts")
            found.append(shown)
        except FileNotFoundError:  # A newer one has taken its place.
            continue
        except (OSError, *NOT_ONE) as error:
            damaged.append(f"{path}: holds no trajectory: {type(error).__name__}: {error}")
    return found, damaged


def count(run_dir: Path) -> int:
    """Return how many are kept."""
    return len(_by_age(Path(run_dir) / FOLDER))


def _by_age(folder: Path) -> list[Path]:
    """Return the files, the oldest first. Other hosts remove some of them meanwhile."""
    ages = {}
    for path in folder.glob("*.msgpack"):
        with suppress(OSError):
            ages[path] = path.stat().st_mtime
    return sorted(ages, key=lambda path: (ages[path], path.name))
