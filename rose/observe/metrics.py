"""Write the run's numbers: a JSON line per training step, evaluation, fault or borrowed rank, and
the same for TensorBoard and trackers (`QueuedTracker`).

A row has `kind` ("step", "eval", "fault", "worker", "host" or "engine"), `step`, `time`
(wall clock, seconds) and its values. metrics.jsonl is authoritative: each row is fsync'd, and a
resumed run drops the rows that it writes again. TensorBoard is a view of it. Never imports torch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from rose.files import write_whole
from rose.observe.recorder import read_lines

FILE = "metrics.jsonl"
# Kinds of rows that record an event, in `what` and `detail`.
EVENTS = ("fault", "worker", "host", "engine")


class QueuedTracker(Protocol):
    """A tracker behind a queue, so that `write` never waits. Its errors are in `faults`."""

    faults: SimpleQueue[str]

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Appends rows to `<run_dir>/metrics.jsonl` and, if `tensorboard`, to `<run_dir>/tensorboard/`.
    Passes them to `trackers`. A tracker's fault becomes a row of its own.

    Opening an existing file drops a last line that a crash cut off. Only the coordinator writes.
    """

    def __init__(
        self, run_dir: Path | str, tensorboard: bool, trackers: Sequence[QueuedTracker] = ()
    ):
        self._trackers, self._step = trackers, 0
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._board = TensorBoard(self.path.parent / "tensorboard") if tensorboard else None
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            _replace(self.path, read_metrics(run_dir))
        self._file = self.path.open("ab")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one row, which is on disk on return. `values` may have `kind` and `time`; NaN
        becomes null."""
        row = {"kind": "step", "step": step, "time": time.time(), **values}
        self._append(row)
        self._step = step
        if self._board:
            self._board.write(row)
        for tracker in self._trackers:
            if numbers := scalars(row):
                tracker.write(step, row["time"], numbers)
            self._write_faults(tracker, step)

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.write(_encode(row))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _write_faults(self, tracker: QueuedTracker, step: int) -> None:
        """Write a row for each fault that the tracker has reported since the last call."""
        while not tracker.faults.empty():
            detail = tracker.faults.get()
            print(f"tracker failed: {detail}", flush=True)
            fault = {"kind": "fault", "what": "tracker failed", "detail": detail}
            self._append({"step": step, "time": time.time(), **fault})

    def truncate(self, after_step: int) -> None:
        """Drop the steps and evaluations later than `after_step`, which a resumed run repeats. Keep
        faults and other events. After a crash, the file is the old or the new one."""
        self._file.close()
        rows = read_metrics(self.path.parent)
        kept = [row for row in rows if row["kind"] in EVENTS or row["step"] <= after_step]
        _replace(self.path, kept)
        self._file = self.path.open("ab")
        if self._board:
            self._board.restart(after_step + 1)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
            self._write_faults(tracker, self._step)
        self._file.close()
        if self._board:
            self._board.close()


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's numbers by dashboards' names, such as `train/loss`. An event has none."""
    if row["kind"] in EVENTS:
        return {}
    prefix = "train" if row["kind"] == "step" else row["kind"]
    return {
        f"{prefix}/{key.removeprefix('eval_')}": float(number)
        for key, number in row.items()
        if key not in ("step", "time") and _is_number(number)
    }


class TensorBoard:
    """Writes a row's numbers (`scalars`) through TensorBoard's own writer."""

    def __init__(self, folder: Path):
        # These imports take half a second, so only a run with TensorBoard has them.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summary = event_pb2, summary_pb2
        # TensorBoard reads files in the order of their names, which begin with the second of their
        # start. Two files of the same second could be swapped, so wait for the next second.
        now = time.time()
        if any(folder.glob(f"*.tfevents.{int(now):010d}.*")):
            time.sleep(1 - now % 1)
        self._writer = EventFileWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        if row["kind"] in EVENTS:
            return
        value = self._summary.Summary.Value
        named = [value(tag=tag, simple_value=number) for tag, number in scalars(row).items()]
        summary = self._summary.Summary(value=named)
        self._add(step=row["step"], wall_time=row["time"], summary=summary)

    def restart(self, step: int) -> None:
        """Announce, as TensorBoard expects it, that everything from `step` on is written again."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step=step, wall_time=time.time(), session_log=start)

    def close(self) -> None:
        self._writer.close()

    def _add(self, **event: Any) -> None:
        self._writer.add_event(self._events.Event(**event))
        self._writer.flush()


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Return all complete rows, in the order written, without a last line that a crash cut off."""
    path = Path(run_dir) / FILE
    if not path.exists():
        return []
    with path.open("rb") as file:
        return _rows(file)


class MetricsReader:
    """Reads a growing metrics.jsonl. It parses each row once, as the file may have megabytes."""

    def __init__(self, run_dir: Path | str) -> None:
        self._path = Path(run_dir) / FILE
        self._rows: list[dict[str, Any]] = []
        self._read = (0, 0)  # the file's inode, and number of bytes read

    def rows(self) -> list[dict[str, Any]]:
        """Return what `read_metrics` returns. The list is the reader's own."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return self._rows
        with file:
            stat = os.fstat(file.fileno())
            inode, read = self._read
            replaced_by_resume = stat.st_ino != inode or stat.st_size < read
            if replaced_by_resume:
                self._rows, read = [], 0
            file.seek(read)
            lines = [line for line in file if line.endswith(b"\n")]
        self._rows += _rows(lines)
        self._read = (stat.st_ino, read + sum(map(len, lines)))
        return self._rows


def rows_of(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the rows of `kind`, ordered by step: for each step, the row written last."""
    last = {row["step"]: row for row in rows if row["kind"] == kind}
    return [last[step] for step in sorted(last)]


def _rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return [row for row in read_lines(lines) if "step" in row and "kind" in row]


def _encode(row: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(row, enc_hook=lambda numpy: numpy.tolist()) + b"\n"


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool) and math.isfinite(value)


def _replace(path: Path, rows: list[dict[str, Any]]) -> None:
    write_whole(path, b"".join(map(_encode, rows)), sync=True)
