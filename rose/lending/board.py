"""The states that the two engines of a device publish to each other, in shared memory: one writer a
board, any number of readers.

A board is a file of fixed size in /dev/shm: header (magic, layout, sequence number, checksum), then
its fields as float64. Each write has a number of its own, and the checksum is over that number and
the fields: a reader takes a copy and checks it. So a torn, damaged, foreign or outdated board is
never taken for a state: `read` returns None, and `why` states what is wrong. Times are
CLOCK_MONOTONIC, which all processes of a node share and nobody sets.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from pathlib import Path
from typing import Generic, TypeVar

import xxhash

MAGIC = b"ROSEBRD1"
_HEADER = struct.Struct("<8sQQQ")  # magic, layout, sequence, checksum
LOOK_S = 1.0  # for boards that are not there yet
TRIES = 8  # a copy is torn when it was taken during a write, which takes microseconds
INFINITE = float("inf")


@dataclasses.dataclass
class Online:
    """The online engine's state, written by its scheduler each step and by a beat in between."""

    pid: float = 0
    pid_started: float = 0  # clock ticks after boot: tells a process from its number's next owner
    beat: float = 0  # when this was written
    steps: float = 0
    running: float = 0  # requests
    waiting: float = 0
    step_ends: float = 0  # predicted, at the P99 residual; 0: no step is running
    decode_s: float = 0  # mean time of a step that decodes what runs now; 0: nothing does
    # the latest time until which every online request meets its target, its own steps at their P99
    # time counted, if the device were taken from S until then; infinite without requests
    hold_until: float = INFINITE
    prompt_share: float = 1  # of lending.step_share, by how soon first tokens came
    kv_total: float = 0  # bytes of KV cache of this engine's whole pool
    kv_used: float = 0  # bytes, by requests (cached prefixes that nobody uses are free)
    kv_held: float = 0  # bytes that this engine may use now; the rest is lent, or was
    kv_wanted: float = 0  # bytes that it wants to hold
    lends: float = 1  # 0: nothing is lent, as when this engine misses its targets by itself
    finished: float = 0  # requests since start, of these kinds ...
    met: float = 0  # ... within both P99 targets
    finished_lending: float = 0  # ... while anything was lent
    met_lending: float = 0
    aborted: float = 0  # by clients or for want of memory; not met
    preempted: float = 0  # times that a running request lost its memory
    prompt_tokens: float = 0
    made_tokens: float = 0
    busy_s: float = 0  # in steps
    step_error: float = 0  # mean absolute error of predicted step times, as a share
    step_p99: float = 0  # 99th percentile of measured / predicted


@dataclasses.dataclass
class Rollout:
    """The rollout engine's state, written by its scheduler each step and while the gate is shut."""

    pid: float = 0
    pid_started: float = 0
    beat: float = 0
    steps: float = 0
    running: float = 0
    waiting: float = 0
    step_ends: float = 0  # predicted; 0: no step is running
    open: float = 0  # 1: the gate is open
    shut_by: float = 0  # a `gate.Reason`
    open_s: float = 0  # since start
    shut_s: float = 0  # since start, with requests waiting at it
    busy_s: float = 0  # in steps
    kv_total: float = 0
    kv_used: float = 0
    kv_budget: float = 0  # bytes that it may use now: what is more has been given back
    frozen: float = 0  # 1: revoked in this training step, it may not grow
    prompt_tokens: float = 0
    made_tokens: float = 0  # by lent compute
    evicted: float = 0  # requests aborted and handed back
    wasted_tokens: float = 0  # computed for them, prompt and made; to be computed again elsewhere
    step_error: float = 0
    step_p99: float = 0


@dataclasses.dataclass
class Control:
    """The operator's word, written by the process that started both engines."""

    pid: float = 0
    pid_started: float = 0
    beat: float = 0
    lend: float = 0  # 0: stop at once
    share: float = 1  # of what could be lent, at this hour
    epoch: float = 0  # training steps seen: a new one ends a freeze


@dataclasses.dataclass
class Epoch:
    """The training run's progress, written by the rank that lends the rollout engine to it."""

    pid: float = 0
    pid_started: float = 0
    beat: float = 0
    # the policy version that the rollout engine loaded last: another one ends a freeze
    epoch: float = -1


State = TypeVar("State", Online, Rollout, Control, Epoch)


def folder(name: str) -> Path:
    """Where the boards of the device `name` are; one folder per user and device."""
    return Path("/dev/shm") / f"rose-{os.getuid()}-{name}"


class _File(Generic[State]):
    def __init__(self, path: Path, kind: type[State], create: bool) -> None:
        self.path, self.kind = Path(path), kind
        self._names = [f.name for f in dataclasses.fields(kind)]
        self._fields = struct.Struct(f"<{len(self._names)}d")
        self._layout = xxhash.xxh3_64_intdigest(",".join([kind.__name__, *self._names]).encode())
        if create:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._size = _HEADER.size + self._fields.size
        # Read and written by calls, not mapped: whoever maps a file that another cuts is killed by
        # SIGBUS.
        self._file = os.open(self.path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        if not create and (found := os.fstat(self._file).st_size) != self._size:
            os.close(self._file)
            raise ValueError(
                f"{self.path}: {found} bytes, a board of {kind.__name__} has {self._size}; written "
                "by another version of ROSE?"
            )

    def _checksum(self, sequence: int, data: bytes) -> int:
        return xxhash.xxh3_64_intdigest(data, seed=sequence)

    def close(self) -> None:
        os.close(self._file)


class Writer(_File[State]):
    """Set fields of `state`, then `write`. One writer a board; a new one replaces a dead one's."""

    def __init__(self, path: Path, kind: type[State]) -> None:
        super().__init__(path, kind, create=True)
        self.state = kind(pid=os.getpid(), pid_started=_started(os.getpid()))
        before = os.pread(self._file, _HEADER.size, 0)
        magic, _, sequence, _ = (
            _HEADER.unpack(before) if len(before) == _HEADER.size else (b"", 0, 0, 0)
        )
        self._sequence = sequence if magic == MAGIC else 0
        os.ftruncate(self._file, self._size)

    def write(self) -> None:
        """About 10 microseconds."""
        self.state.beat = time.monotonic()
        data = self._fields.pack(*vars(self.state).values())
        self._sequence += 1
        checksum = self._checksum(self._sequence, data)
        os.pwrite(self._file, _HEADER.pack(MAGIC, self._layout, self._sequence, checksum) + data, 0)


class Reader(_File[State]):
    """Raises `OSError` when there is no board, `ValueError` when it has another size."""

    def __init__(self, path: Path, kind: type[State]) -> None:
        super().__init__(path, kind, create=False)
        self.why = ""

    def read(self, stale_after_s: float = INFINITE) -> State | None:
        """The state, if whole and not older than `stale_after_s`; else None, and `why` says why."""
        for _ in range(TRIES):
            copy = os.pread(self._file, self._size, 0)
            if len(copy) != self._size:
                return self._no(
                    f"{len(copy)} bytes, {self._size} are a board of {self.kind.__name__}"
                )
            magic, layout, sequence, checksum = _HEADER.unpack_from(copy)
            if magic != MAGIC or layout != self._layout:
                return self._no(f"not a board of {self.kind.__name__}, or of another version")
            data = copy[_HEADER.size :]
            if checksum == self._checksum(sequence, data):
                state = self.kind(*self._fields.unpack(data))
                age = time.monotonic() - state.beat
                if age > stale_after_s:
                    return self._no(f"{age:.3g} s old, over {stale_after_s:g}")
                if age < -1e-3:
                    return self._no(f"written {-age:.3g} s in the future")
                return state
            time.sleep(0)
        return self._no("damaged: its checksum is never right")

    def _no(self, why: str) -> None:
        self.why = f"{self.path}: {why}"
        return None


class Peer(Generic[State]):
    """A board that somebody else writes, and may not have made yet. Only a whole state counts; the
    last one tells whether its writer lives."""

    def __init__(self, path, kind: type[State]) -> None:
        self._path, self._kind = path, kind
        self._reader: Reader[State] | None = None
        self._looked_at = float("-inf")
        self.last: State | None = None

    def read(self, stale_after_s: float = INFINITE) -> State | None:
        now = time.monotonic()
        if self._reader is None and now - self._looked_at > LOOK_S:
            self._looked_at = now
            try:
                self._reader = Reader(self._path, self._kind)
            except (OSError, ValueError):
                return None
        found = self._reader.read(stale_after_s) if self._reader else None
        self.last = found or self.last
        return found

    def gone(self) -> bool:
        """Whether there is no such process: none has ever written, or the one that did has
        ended."""
        if (found := self.read()) is not None:
            return not is_alive(found)
        return self.last is None or not is_alive(self.last)


def is_alive(state: Online | Rollout | Control | Epoch) -> bool:
    """Whether the process that wrote it lives (not: another that has its number now)."""
    try:
        return _started(int(state.pid)) == state.pid_started
    except OSError:
        return False


def _started(pid: int) -> float:
    """When a process began, clock ticks after boot: no clock that is set moves it. Raises `OSError`
    if it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(f"process {pid} has ended")
    return float(fields[19])
