"""Record spans, instants and counters of a rank, as JSON lines in
RUN/events/ATTEMPT/ROLE-RANK.jsonl. That file has the newest few MiB; older lines are in
ROLE-RANK.000001.jsonl and so on.

Times are wall-clock seconds, so that the ranks of one machine share a time axis; nothing corrects
for clocks that differ between machines. Lines are flushed about each second and at `close`. A crash
loses the lines since the last flush. On a full disk, new lines are lost.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from rose.files import Lossy

FLUSH_SECONDS = 1.0
# Size at which a new file begins. observe.keep_steps removes only whole files, so lines of older
# steps stay, up to this size. A rank of the default run writes 2 MiB in 60 steps. Quotas commonly
# allow 0.1 to 1 MiB a file.
SEGMENT_BYTES = 2**22
SEGMENT = f"{'[0-9]' * 6}.jsonl"  # pattern of an older file's name after "ROLE-RANK."


class NullRecorder:
    """A recorder that records nothing. A rank uses it when `observe.trace` is off."""

    def span(self, name: str, start: float, end: float, /, **args: Any) -> None:
        """Record an event that lasted from `start` to `end` (wall clock, seconds)."""

    def instant(self, name: str, /, **args: Any) -> None:
        """Record an event that happens now."""

    def counter(self, name: str, value: float, /) -> None:
        """Record the present value of a quantity."""

    @contextmanager
    def timed(self, name: str, /, **args: Any) -> Iterator[dict[str, Any]]:
        """Record the block as a span, even if it raises. The block may add to the yielded args."""
        start = time.time()
        try:
            yield args
        finally:
            self.span(name, start, time.time(), **args)

    def close(self) -> None:
        """Write the buffered lines. Nothing may be recorded afterwards."""


class Recorder(NullRecorder):
    """The recorder of a rank; any thread may record. `attempt` counts the starts of this run."""

    def __init__(self, run_dir: Path | str, rank: int, role: str, name: str, attempt: int = 1):
        path = Path(run_dir) / "events" / str(attempt) / f"{role}-{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._header = {"kind": "rank", "rank": rank, "role": role, "name": name}
        self._header |= {"attempt": attempt}
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._closing = threading.Event()
        self._open_file()
        self._flusher = threading.Thread(target=self._flush_regularly, name="recorder", daemon=True)
        self._flusher.start()

    def span(self, name: str, start: float, end: float, /, **args: Any) -> None:
        self._write(kind="span", name=name, start=start, end=end, args=args)

    def instant(self, name: str, /, **args: Any) -> None:
        self._write(kind="instant", name=name, time=time.time(), args=args)

    def counter(self, name: str, value: float, /) -> None:
        self._write(kind="counter", name=name, time=time.time(), value=value)

    def close(self) -> None:
        self._closing.set()
        self._flusher.join()
        self._file.close()

    def _write(self, **event: Any) -> None:
        line = self._encoder.encode(event) + b"\n"
        with self._lock:
            self._file.write(line)

    def _open_file(self) -> None:
        self._file = io.BufferedWriter(Lossy(self._path, "ab"))
        if self._file.tell():
            self._file.write(b"\n")  # the end of a line that an earlier process left incomplete
        self._file.write(self._encoder.encode(self._header | {"time": time.time()}) + b"\n")
        self._file.flush()

    def _flush_regularly(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            with self._lock:
                self._file.flush()
                if self._file.tell() >= SEGMENT_BYTES:
                    self._begin_segment()

    def _begin_segment(self) -> None:
        """Give the full file the next number, and continue in an empty file. If that can't be
        created, continue in the full file."""
        before = self._path.parent.glob(f"{self._path.stem}.{SEGMENT}")
        number = 1 + max((int(path.stem.rpartition(".")[2]) for path in before), default=0)
        full, numbered = self._file, self._path.with_suffix(f".{number:06d}.jsonl")
        with suppress(OSError):
            self._path.rename(numbered)
            try:
                self._open_file()
            except OSError:
                numbered.rename(self._path)
                raise
            full.close()


def _plain(value: Any) -> Any:
    """Convert numpy scalars and arrays, paths and enums, which args may have."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@dataclass(frozen=True)
class RankEvents:
    """The events of one rank in one attempt. `events` are the lines, in the order written."""

    rank: int
    role: str
    name: str
    attempt: int
    events: list[dict[str, Any]]


def read_events(run_dir: Path | str) -> Iterator[RankEvents]:
    """Yield a `RankEvents` per recorder, by attempt and rank; skip lines that a crash cut off."""
    found = []
    for path in (Path(run_dir) / "events").glob("*/*.jsonl"):
        with path.open("rb") as file:
            header = next(read_lines(file), None)
        if header and header.get("kind") == "rank":
            place = (header["attempt"], header["rank"], path.name.partition(".")[0])
            found.append((place, path, header))
    # "ROLE-RANK.000001.jsonl" sorts before "ROLE-RANK.jsonl", which is the newest.
    found.sort(key=lambda item: item[:2])
    for (attempt, rank, _), files in groupby(found, key=lambda item: item[0]):
        events: list[dict[str, Any]] = []
        for _, path, of in files:
            header = of
            with path.open("rb") as file:
                events += (event for event in read_lines(file) if event.get("kind") != "rank")
        yield RankEvents(rank, header["role"], header["name"], attempt, events)


def read_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the complete JSON objects of a binary file of JSON lines, or of its lines. Skip lines
    that a crash cut off."""
    for line in lines:
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(value, dict):
            yield value
