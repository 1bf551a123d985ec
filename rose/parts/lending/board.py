"""Boards: the states that the processes of a lent device publish to each other in shared memory.

A board has one writer and any number of readers. It is a file of fixed size in /dev/shm: a header
(magic, layout, sequence number, checksum), then its fields as float64. Each write has a sequence
number of its own, and the checksum covers that number and the fields. A reader takes a copy and
checks it. If the copy is torn, damaged, foreign or outdated, `read` returns None and `why` says
what is wrong. Times are CLOCK_MONOTONIC: all processes of a node share it, and no program can set
it.
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
_HEADER = struct.Struct("<8sQQQ")  # magic, digest of the fields' names, sequence number, checksum
OPEN_RETRY_S = 1.0  # seconds between two attempts to open a board that does not exist yet
# Attempts to copy a board. A copy is torn if a write, which takes microseconds, ran meanwhile.
TRIES = 8
INFINITE = float("inf")
ALIVE_S = 0.1  # seconds for which `is_alive` remembers that it found a process alive
_seen_alive: dict[tuple[float, float], float] = {}  # (pid, its start) -> time when it was alive


@dataclasses.dataclass
class Online:
    """The online engine's state. Its scheduler writes it at each engine step, and at least every
    0.02 s (a beat). Counts and sums are since the engine's start."""

    pid: float = 0
    pid_started: float = 0  # clock ticks after boot, distinguishes processes with the same pid
    beat: float = 0  # time of this write
    steps: float = 0
    running: float = 0  # requests
    waiting: float = 0  # requests
    step_ends: float = 0  # predicted end of the running step at P99; 0: no step is running
    decode_s: float = 0  # mean seconds of a step that decodes all running requests; 0 without any
    # Latest time at which this engine could begin its next step and still meet every request's
    # targets, if its steps take their P99 time. Infinite without requests.
    hold_until: float = INFINITE
    prompt_share: float = 1  # factor on lending.step_share that keeps the median TTFT on target
    kv_total: float = 0  # bytes of this engine's KV cache
    kv_used: float = 0  # bytes held by requests, without cached prefixes that no request uses
    kv_held: float = 0  # bytes that this engine may use now; the others are lent or being returned
    kv_wanted: float = 0  # bytes that this engine wants to hold
    lends: float = 1  # 0: lends nothing, because this engine misses its targets even alone
    finished: float = 0  # requests
    met: float = 0  # finished requests within both P99 targets
    finished_lending: float = 0  # requests that finished while anything was lent
    met_lending: float = 0  # requests of `finished_lending` within both P99 targets
    aborted: float = 0  # requests that clients aborted, or that found no memory; never in `met`
    preempted: float = 0  # times that a running request lost its memory
    prompt_tokens: float = 0
    made_tokens: float = 0  # generated tokens
    busy_s: float = 0  # seconds in engine steps
    shared_s: float = 0  # seconds in engine steps beside which rollout steps could run
    step_error: float = 0  # mean of |predicted - measured| / measured step time
    step_p99: float = 0  # 99th percentile of measured / predicted step time


@dataclasses.dataclass
class Rollout:
    """The rollout engine's state. Its scheduler writes it at each engine step, and while the gate
    (rules/gate.py) lets no step begin. Fields without a comment are as in `Online`."""

    pid: float = 0
    pid_started: float = 0
    beat: float = 0
    steps: float = 0
    running: float = 0
    waiting: float = 0
    step_ends: float = 0
    open: float = 0  # 1: the gate is open
    shut_by: float = 0  # a `gate.Reason`
    open_s: float = 0  # seconds with requests and an open gate
    shut_s: float = 0  # seconds with requests and a shut gate
    busy_s: float = 0
    kv_total: float = 0
    kv_used: float = 0
    kv_budget: float = 0  # bytes that this engine may use now; it has released all others
    frozen: float = 0  # 1: memory was revoked in this training step, so the budget may not grow
    prompt_tokens: float = 0
    made_tokens: float = 0
    evicted: float = 0  # requests evicted and returned to the coordinator
    wasted_tokens: float = 0  # tokens of evicted requests that must be computed again
    step_error: float = 0
    step_p99: float = 0


@dataclasses.dataclass
class Control:
    """The operator's switch. The process that started both engines writes it."""

    pid: float = 0
    pid_started: float = 0
    beat: float = 0
    lend: float = 0  # 1: lend; 0: stop at once
    # 1: the online engine stops rollout steps between layers (rose/parts/lending/flag.py)
    stops: float = 1
    share: float = 1  # share of the lendable memory that is lent at this hour, 0 to 1
    epoch: float = 0  # `Epoch.epoch`; a change ends a freeze


@dataclasses.dataclass
class Epoch:
    """The training run's progress. The rank that lends the rollout engine to the run writes it."""

    pid: float = 0
    pid_started: float = 0
    beat: float = 0
    epoch: float = -1  # policy version that the rollout engine loaded last


State = TypeVar("State", Online, Rollout, Control, Epoch)


def folder(name: str) -> Path:
    """Return the folder with the boards of this user's device `name`."""
    return Path("/dev/shm") / f"rose-{os.getuid()}-{name}"


class _File(Generic[State]):
    """An open board file of one kind of state."""

    def __init__(self, path: Path, kind: type[State], create: bool) -> None:
        self.path, self.kind = Path(path), kind
        self._names = [f.name for f in dataclasses.fields(kind)]
        self._fields = struct.Struct(f"<{len(self._names)}d")
        self._layout = xxhash.xxh3_64_intdigest(",".join([kind.__name__, *self._names]).encode())
        if create:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._size, self._file = _HEADER.size + self._fields.size, -1
        # The file is not mapped: SIGBUS would kill this process if another one truncated it.
        self._file = os.open(self.path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        if not create and (found := os.fstat(self._file).st_size) != self._size:
            self.close()
            raise ValueError(
                f"{self.path}: {found} bytes, a board of {kind.__name__} has {self._size}; written "
                "by another version of ROSE?"
            )

    def _checksum(self, sequence: int, data: bytes) -> int:
        return xxhash.xxh3_64_intdigest(data, seed=sequence)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        self.close()


class Writer(_File[State]):
    """The writer of a board: set fields of `state`, then call `write`. A board has one writer at a
    time. A new writer continues a dead writer's file."""

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
        """Publish `state`, in about 10 microseconds."""
        self.state.beat = time.monotonic()
        data = self._fields.pack(*vars(self.state).values())
        self._sequence += 1
        checksum = self._checksum(self._sequence, data)
        os.pwrite(self._file, _HEADER.pack(MAGIC, self._layout, self._sequence, checksum) + data, 0)


class Reader(_File[State]):
    """Reads a board. Raises `OSError` if the file is absent, `ValueError` if its size is wrong."""

    def __init__(self, path: Path, kind: type[State]) -> None:
        super().__init__(path, kind, create=False)
        self.why = ""

    def read(self, stale_after_s: float = INFINITE) -> State | None:
        """Return the state if it is whole and at most `stale_after_s` old. Otherwise returns None,
        and `why` has the reason."""
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
        """Keep the reason why the board can't be read, as the result of `read`."""
        self.why = f"{self.path}: {why}"
        return None


class Peer(Generic[State]):
    """Reads a board that may not exist yet, and remembers its last whole state in `last`."""

    def __init__(self, path, kind: type[State]) -> None:
        self._path, self._kind = path, kind
        self._reader: Reader[State] | None = None
        self._tried_at = float("-inf")
        self.last: State | None = None

    def read(self, stale_after_s: float = INFINITE) -> State | None:
        now = time.monotonic()
        if self._reader is None and now - self._tried_at > OPEN_RETRY_S:
            self._tried_at = now
            try:
                self._reader = Reader(self._path, self._kind)
            except (OSError, ValueError):
                return None
        found = self._reader.read(stale_after_s) if self._reader else None
        self.last = found or self.last
        return found

    def gone(self) -> bool:
        """True if no living process writes the board: none ever has, or the last has ended."""
        if (found := self.read()) is not None:
            return not is_alive(found)
        return self.last is None or not is_alive(self.last)


def is_alive(state: Online | Rollout | Control | Epoch) -> bool:
    """True if the process that wrote `state` lives. Another process with its pid doesn't count. A
    positive answer is kept for ALIVE_S. The engines ask at each step and beat, and reading /proc
    each time would take half of their time between two beats."""
    writer, now = (state.pid, state.pid_started), time.monotonic()
    if now - _seen_alive.get(writer, -INFINITE) < ALIVE_S:
        return True
    try:
        alive = _started(int(state.pid)) == state.pid_started
    except OSError:
        return False
    if alive:
        _seen_alive[writer] = now
    return alive


def _started(pid: int) -> float:
    """Return when a process began, in clock ticks after boot; setting the clock doesn't change it.
    Raises `OSError` if the process has ended."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(f"process {pid} has ended")
    return float(fields[19])
