"""Spans, instants and counters of a rank: JSON lines in RUN/events/ATTEMPT/ROLE-RANK.jsonl.

Wall-clock seconds, so that the ranks of one machine share a time axis; nothing corrects for clocks
that differ between machines. Lines are flushed about each second and at `close`: a crash loses at
most that, and a full disk what it refuses.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose.files import Lossy

FLUSH_SECONDS = 1.0


class NullRecorder:
    """The recorder that records nothing: what a rank uses when `observe.trace` is off."""

    def span(self, name: str, start: float, end: float, /, **args: Any) -> None:
        """Something that lasted from `start` to `end` (wall clock, seconds)."""

    def instant(self, name: str, /, **args: Any) -> None:
        """Something that happened now."""

    def counter(self, name: str, value: float, /) -> None:
        """A quantity as it is now."""

    @contextmanager
    def timed(self, name: str, /, **args: Any) -> Iterator[dict[str, Any]]:
        """Records the block as a span, also when it raises; yields the args, to be added to."""
        start = time.time()
        try:
            yield args
        finally:
            self.span(name, start, time.time(), **args)

    def close(self) -> None:
        """Write what is buffered; nothing may be recorded afterwards."""


class Recorder(NullRecorder):
    """One per rank; any thread may record. `attempt` counts the starts of this run."""

    def __init__(self, run_dir: Path | str, rank: int, role: str, name: str, attempt: int = 1):
        path = Path(run_dir) / "events" / str(attempt) / f"{role}-{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.BufferedWriter(Lossy(path, "ab"))
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._closing = threading.Event()
        if self._file.tell():
            self._file.write(b"\n")  # ends a line that an earlier process tore
        self._write(kind="rank", rank=rank, role=role, name=name, attempt=attempt, time=time.time())
        self._file.flush()
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

    def _flush_regularly(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            with self._lock:
                self._file.flush()


def _plain(value: Any) -> Any:
    """numpy scalars and arrays, paths and enums that turn up in args."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@dataclass(frozen=True)
class RankEvents:
    """What one rank recorded in one attempt. `events` are the lines, in the order written."""

    rank: int
    role: str
    name: str
    attempt: int
    events: list[dict[str, Any]]


def read_events(run_dir: Path | str) -> Iterator[RankEvents]:
    """One `RankEvents` per file, by attempt and rank; lines that a crash tore are left out."""
    found = []
    for path in (Path(run_dir) / "events").glob("*/*.jsonl"):
        with path.open("rb") as file:
            header = next(read_lines(file), None)
        if header and header.get("kind") == "rank":
            found.append((header["attempt"], header["rank"], path, header))
    for attempt, rank, path, header in sorted(found, key=lambda item: item[:2]):
        with path.open("rb") as file:
            events = [event for event in read_lines(file) if event.get("kind") != "rank"]
        yield RankEvents(rank, header["role"], header["name"], attempt, events)


def read_lines(file) -> Iterator[dict[str, Any]]:
    """The whole JSON objects of a binary file of JSON lines, whatever state a crash left it in."""
    for line in file:
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue  # torn
        if isinstance(value, dict):
            yield value
