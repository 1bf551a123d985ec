"""Spans, instants and counters of a rank: JSON lines in RUN/events/ATTEMPT/ROLE-RANK.jsonl, of
which all but the newest few MiB are in ROLE-RANK.000001.jsonl and so on.

Wall-clock seconds, so that the ranks of one machine share a time axis; nothing corrects for clocks
that differ between machines. Lines are flushed about each second and at `close`: a crash loses at
most that, and a full disk what it refuses.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from rose.files import Lossy

FLUSH_SECONDS = 1.0
# Bounds how much of a rank's events stays beyond observe.keep_steps, which removes whole files. A
# rank of the default run writes 2 MiB in 60 steps; quotas commonly allow 0.1 to 1 MiB a file.
SEGMENT_BYTES = 2**22
SEGMENT = f"{'[0-9]' * 6}.jsonl"  # pattern of what follows ROLE-RANK and a dot


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
        self._path = path
        self._header = {"kind": "rank", "rank": rank, "role": role, "name": name}
        self._header |= {"attempt": attempt}
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._closing = threading.Event()
        self._open()
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

    def _open(self) -> None:
        self._file = io.BufferedWriter(Lossy(self._path, "ab"))
        if self._file.tell():
            self._file.write(b"\n")  # ends a line that an earlier process tore
        self._file.write(self._encoder.encode(self._header | {"time": time.time()}) + b"\n")
        self._file.flush()

    def _flush_regularly(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            with self._lock:
                self._file.flush()
                if self._file.tell() >= SEGMENT_BYTES:
                    self._begin_segment()

    def _begin_segment(self) -> None:
        """Go on in an empty file; what is there gets the next number. Where the folder takes no
        more files, all of it stays in one."""
        before = self._path.parent.glob(f"{self._path.stem}.{SEGMENT}")
        number = 1 + max((int(path.stem.rpartition(".")[2]) for path in before), default=0)
        full, numbered = self._file, self._path.with_suffix(f".{number:06d}.jsonl")
        with suppress(OSError):
            self._path.rename(numbered)
            try:
                self._open()
            except OSError:
                numbered.rename(self._path)
                raise
            full.close()


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
    """Yield a `RankEvents` per recorder, by attempt and rank. Lines that a crash tore are left
    out."""
    found = []
    for path in (Path(run_dir) / "events").glob("*/*.jsonl"):
        with path.open("rb") as file:
            header = next(read_lines(file), None)
        if header and header.get("kind") == "rank":
            place = (header["attempt"], header["rank"], path.name.partition(".")[0])
            found.append((place, path, header))
    # A name with a number sorts before the newest file's.
    found.sort(key=lambda item: item[:2])
    for (attempt, rank, _), files in groupby(found, key=lambda item: item[0]):
        events: list[dict[str, Any]] = []
        for _, path, of in files:
            header = of
            with path.open("rb") as file:
                events += (event for event in read_lines(file) if event.get("kind") != "rank")
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
