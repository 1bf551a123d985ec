"""The turns of trajectories under way: in memory, for those whose environment host is lost, and on
disk, so that a run that starts again goes on with them.

Environments are determined by their seeds and by what the policy does: a trajectory that begins
anew and gets its recorded answers stands where it stood, and no token of it is made twice (Crab's
"chat only" recovery, arXiv 2604.28138, made exact: an answer is only given to the very context that
it was made for, so an environment that answers otherwise this time gets new turns from there on).

A file holds what was recorded under one policy version; files whose turns no restart could use are
removed with each checkpoint. A run that failed twice at one step might do so for its turns: the
third start makes them anew. Policies don't observe turns that are answered from here. Left out: the
state of machines that agents work on (rose/agent/snapshots.py).
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from rose.files import write_whole
from rose.protocol import FinishReason, TurnRequest, TurnResult, unpack_tokens

HEAD = 8  # bytes before a record: its length and CRC-32, little-endian
PATTERN = "v*.turns"
STARTS = "starts"  # file: the step, and how often it was started from without an orderly end
MOST_STARTS = 2
# In memory, of all running trajectories: some 160 million tokens, or 5 with a 30B mixture's experts
MOST_BYTES = 2**31


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A turn, or with `finish` ABORT the tokens that it had when the run ended."""

    key: bytes
    tokens: bytes  # int32 (n,)
    logprobs: bytes  # float32 (n,)
    versions: bytes  # int32 (n,)
    finish: FinishReason
    experts: bytes = b""  # as `TurnResult`'s
    routed: int = 0


Records = dict[bytes, deque[Record]]  # by `_key`, in the order made


class _Running:
    """What was made for running trajectories, of each until it ends, or until all have more than
    `MOST_BYTES`: then the oldest is forgotten, and a lost host's part of it is made anew."""

    def __init__(self) -> None:
        self._made: dict[str, list[tuple[bytes, Record]]] = {}
        self._again: dict[str, Records] = {}  # of trajectories that were started again
        self._before: dict[str, int] = {}  # turns that are not in `_made`, but in a snapshot
        self._bytes = 0
        self._full = False

    def add(self, trajectory: str, key: bytes, record: Record, asked: bool) -> None:
        """`asked`: by the trajectory's host as it is now, which has it."""
        self._made.setdefault(trajectory, []).append((key, record))
        self._bytes += _size(record)
        if not asked and trajectory in self._again:
            _learn(self._again[trajectory], key, record)
        while self._bytes > MOST_BYTES:
            self.forget(next(iter(self._made)))
            if not self._full:
                print(
                    f"the turns of running trajectories take more than {MOST_BYTES >> 20} MiB: of "
                    "the oldest none are kept for a lost environment host",
                    flush=True,
                )
            self._full = True

    def start_again(self, trajectory: str, turns: int = 0) -> None:
        """From its beginning, or with its first `turns` turns."""
        again = self._again[trajectory] = defaultdict(deque)
        made, left = self._made.get(trajectory, ()), turns - self._before.get(trajectory, 0)
        for key, record in made:
            complete = record.finish is not FinishReason.ABORT
            if left <= 0:
                _learn(again, key, record)
            left -= complete

    def resumed(self, trajectory: str, turns: int, earlier: bool) -> bool:
        """It goes on with so many turns from a snapshot, maybe of an `earlier` attempt; whether
        these are new here."""
        new = earlier and trajectory not in self._before
        if new:
            self._before[trajectory] = turns
        if trajectory in self._again:
            self.start_again(trajectory, turns)
        return new

    def find(self, request: TurnRequest) -> Record | None:
        """Of a trajectory that was started again: what had been made, each record once."""
        if (again := self._again.get(request.trajectory)) is None:
            return None
        records = again.get(_key(request))
        return records.popleft() if records else None

    def turns(self, trajectory: str) -> int:
        return len(self._made.get(trajectory, ()))

    def forget(self, trajectory: str) -> None:
        self._before.pop(trajectory, None)
        self._again.pop(trajectory, None)
        self._bytes -= sum(_size(record) for _, record in self._made.pop(trajectory, ()))


class TurnLog:
    """`step`: at which the run starts, whose weights are version `step`; turns of later versions
    were made by weights that are lost. `behind`: the most versions that a recorded turn's oldest
    token may be behind the weights of the turn's request; None: nothing is recorded."""

    def __init__(self, folder: Path, step: int, behind: int | None) -> None:
        self._folder, self._behind = Path(folder), behind
        self._snapshots = self._folder.parent / "snapshots"  # of the environment hosts
        self._trained: dict[int, list[str]] = {}  # step -> trajectories
        self._forgotten: list[str] = []  # since the last checkpoint
        self._known: Records = defaultdict(deque)  # by earlier attempts
        self.running = _Running()
        self._file: BinaryIO | None = None
        self._version = -1  # of the open file
        self._newest_known = step
        self.resumed_turns = self.resumed_tokens = 0  # since the step's begin
        if behind is not None:
            self._folder.mkdir(exist_ok=True)
            behind = -1 if self._fails(step) else behind
        self._resumes = behind is not None and behind >= 0
        for path, version in self._files():
            if behind is not None and step - behind <= version <= step:
                for record in _read(path):
                    _learn(self._known, record.key, record)
            else:
                path.unlink(missing_ok=True)

    def _fails(self, step: int) -> bool:
        """Whether the run has begun at `step` before, and failed, too often; counts this start."""
        path = self._folder / STARTS
        try:
            last, starts = map(int, path.read_text(encoding="utf-8").split())
        except (OSError, ValueError):
            last, starts = step, 0
        failed = last == step and starts >= MOST_STARTS
        if failed:
            print(
                f"the run failed {starts} times after step {step}: the turns that its unfinished "
                "trajectories had are made anew",
                flush=True,
            )
        write_whole(path, f"{step} {1 if failed or last != step else starts + 1}\n".encode())
        return failed

    def stopped(self) -> None:
        """This attempt ends in order: its turns are not why."""
        if self._behind is not None:
            (self._folder / STARTS).unlink(missing_ok=True)

    def find(self, request: TurnRequest, version: int) -> TurnResult | None:
        """What an earlier attempt made of this very context, each record once. `version`: of the
        newest weights. `finish` is ABORT if the turn was not complete."""
        if not self._known:
            return None
        if version - self._behind > self._newest_known:
            self._known.clear()
            return None
        key = _key(request)
        records = self._known.get(key)
        while records:
            record = records.popleft()
            if unpack_tokens(record.versions).min() >= version - self._behind:
                if record.finish is not FinishReason.ABORT:
                    self.running.add(request.trajectory, key, record, asked=True)
                return self._taken(request, record)
        return None

    def find_again(self, request: TurnRequest) -> TurnResult | None:
        """As `find`, of what this attempt made before the trajectory's host was lost."""
        record = self.running.find(request)
        return self._taken(request, record) if record is not None else None

    def _taken(self, request: TurnRequest, record: Record) -> TurnResult:
        self.took_over(1, len(record.tokens) // 4)
        return TurnResult(
            request.turn,
            record.tokens,
            record.logprobs,
            record.versions,
            record.finish,
            experts=record.experts,
            routed=record.routed,
        )

    def versions(self, version: int) -> tuple[int, int]:
        """The oldest and the newest by which an earlier attempt may have begun a trajectory that
        starts under `version`; none where the second is less."""
        return (version - self._behind, self._newest_known) if self._resumes else (0, -1)

    def forget(self, trajectory: str) -> None:
        """Nobody will ask for it again."""
        self.running.forget(trajectory)
        self._forgotten.append(trajectory)
        shutil.rmtree(self._snapshots / trajectory, ignore_errors=True)

    def forget_all(self, beginning: str) -> None:
        """Trajectories of earlier attempts whose names begin so; their turns go with those of
        their version."""
        for path in self._snapshots.glob(f"{beginning}*"):
            self.forget(path.name)

    def trained(self, step: int, trajectories: list[str]) -> None:
        """They are part of `step`: once a checkpoint has that, nobody will ask for them."""
        self._trained[step] = trajectories

    def took_over(self, turns: int, tokens: int) -> None:
        """Turns that needn't be made again."""
        self.resumed_turns += turns
        self.resumed_tokens += tokens

    def add(
        self, request: TurnRequest, result: TurnResult, version: int, asked: bool = True
    ) -> None:
        """Record a turn that ended under `version`, or with `finish` ABORT one that is cut there.
        `asked`: by the host that the trajectory has now. Raises OSError, also for what was added
        before."""
        if not result.tokens:
            return
        key = _key(request)
        record = Record(
            key,
            result.tokens,
            result.logprobs,
            result.versions,
            result.finish,
            result.experts,
            result.routed,
        )
        self.running.add(request.trajectory, key, record, asked)
        if self._behind is None:
            return
        if self._file is None or version != self._version:
            self.close()
            self._file, self._version = self._path(version).open("ab"), version
        data = msgspec.msgpack.encode(record)
        head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
        self._file.write(head + data)

    def flush(self) -> None:
        """What was added outlives this process. Raises OSError."""
        if self._file is not None:
            self._file.flush()

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is on disk: a restart begins there or later."""
        for late in self._forgotten:  # a host that died then may have written one more
            shutil.rmtree(self._snapshots / late, ignore_errors=True)
        self._forgotten.clear()
        over = set()
        for trained in [each for each in self._trained if each <= step]:
            for trajectory in self._trained.pop(trained):
                self.forget(trajectory)
                over.add(_prompt(trajectory))
        # of an earlier attempt there may be members and tries that this one had no need of
        for other in [path.name for path in self._snapshots.glob("g*") if over]:
            if _prompt(other) in over:
                self.forget(other)
        if self._behind is None:
            return
        for path, version in self._files():
            if version < step - self._behind:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version:06d}.turns"

    def _files(self) -> list[tuple[Path, int]]:
        """With their versions."""
        found = sorted(self._folder.glob(PATTERN))
        return [(path, int(path.stem[1:])) for path in found if path.stem[1:].isdigit()]


def _learn(known: Records, key: bytes, record: Record) -> None:
    """Of a context with complete turns only these: what was begun has become one of them."""
    records = known[key]
    while records and records[-1].finish is FinishReason.ABORT:
        records.pop()
    if record.finish is not FinishReason.ABORT or not records:
        records.append(record)


def _prompt(trajectory: str) -> str:
    """g12 of g12r1.3r2."""
    return trajectory.partition(".")[0].partition("r")[0]


def _size(record: Record) -> int:
    fields = (record.tokens, record.logprobs, record.versions, record.experts)
    return sum(map(len, fields))


def _key(request: TurnRequest) -> bytes:
    """Of the trajectory, its context, of which it knows the experts so far, and how the turn is
    sampled. Not of the turn's number: an agent's concurrent calls come in any order."""
    routed = (request.routed,) if request.routed else ()
    rest = msgspec.msgpack.encode((request.trajectory, request.sampling, *routed))
    return xxhash.xxh3_128_digest(rest + request.tokens)


def _read(path: Path) -> list[Record]:
    """Up to where a crash tore the file, or the disk damaged it; what is behind is cut off, so that
    the file can grow again."""
    data, records, at = path.read_bytes(), [], 0
    decoder = msgspec.msgpack.Decoder(Record)
    with suppress(msgspec.DecodeError, msgspec.ValidationError):  # of another release
        while at + HEAD <= len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            whole = data[at + HEAD : at + HEAD + length]
            check = int.from_bytes(data[at + 4 : at + HEAD], "little")
            if len(whole) < length or zlib.crc32(whole) != check:
                break
            records.append(decoder.decode(whole))
            at += HEAD + length
    if at < len(data):
        os.truncate(path, at)
    return records
