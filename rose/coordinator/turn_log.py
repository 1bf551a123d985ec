"""A record of the turns of running trajectories: in memory for the loss of an environment host, on
disk for a restart of the run.

Environments are determined by their seeds and by the policy's actions. So a trajectory that starts
again and gets its recorded turns reaches the same state, and no token is generated twice. This is
Crab's "chat only" recovery (arXiv 2604.28138), made exact: a recorded turn is only returned for the
context that it was generated for. If the environment behaves differently this time, the contexts
differ from there on, and the trajectory gets new turns.

A file holds the turns that were recorded under one policy version. Each checkpoint removes files
whose turns no restart could use. If a run has failed twice at one step, the recorded turns may be
the reason, so the third start generates them again. The scheduler's policies don't see turns that
are answered from the record. rose/agent/snapshots.py saves the machines that agents work on.
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
# Name of the file with a step, and the starts from it without an orderly end, this one included.
STARTS = "starts"
# Starts in a row from one step that use the recorded turns; the next one doesn't and counts as 1.
MOST_STARTS = 2
# Memory for all running trajectories, enough for some 160 million tokens, or for 5 million with the
# experts of a 30B mixture.
MOST_BYTES = 2**31


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A turn; with `finish` ABORT the tokens of an incomplete turn."""

    key: bytes
    tokens: bytes  # int32 (n,)
    logprobs: bytes  # float32 (n,)
    versions: bytes  # int32 (n,)
    finish: FinishReason
    experts: bytes = b""  # same format as in `TurnResult`
    routed: int = 0


Records = dict[bytes, deque[Record]]  # `_key` -> records in the order of their generation


class _Running:
    """The recorded turns of each running trajectory. Beyond `MOST_BYTES` the oldest trajectory's
    turns are dropped; if its host is lost, they are generated again."""

    def __init__(self) -> None:
        # trajectory -> (`_key`, record) of its turns, in the order of their generation
        self._recorded: dict[str, list[tuple[bytes, Record]]] = {}
        # restarted trajectory -> records that its new host has not requested yet
        self._unclaimed: dict[str, Records] = {}
        # trajectory -> turns in a snapshot of an earlier attempt, which `_recorded` lacks
        self._in_snapshot: dict[str, int] = {}
        self._bytes = 0
        self._full = False

    def add(self, trajectory: str, key: bytes, record: Record, delivered: bool) -> None:
        """Record a turn. `delivered`: its host has the turn already and won't request it."""
        self._recorded.setdefault(trajectory, []).append((key, record))
        self._bytes += _size(record)
        if not delivered and trajectory in self._unclaimed:
            _insert(self._unclaimed[trajectory], key, record)
        while self._bytes > MOST_BYTES:
            self.forget(next(iter(self._recorded)))
            if not self._full:
                print(
                    f"the turns of running trajectories take more than {MOST_BYTES >> 20} MiB: "
                    "those of the oldest are not kept for a lost environment host",
                    flush=True,
                )
            self._full = True

    def restart(self, trajectory: str, turns: int = 0) -> None:
        """Make the recorded turns after the trajectory's first `turns` turns available again."""
        unclaimed = self._unclaimed[trajectory] = defaultdict(deque)
        recorded = self._recorded.get(trajectory, ())
        skip = turns - self._in_snapshot.get(trajectory, 0)
        for key, record in recorded:
            complete = record.finish is not FinishReason.ABORT
            if skip <= 0:
                _insert(unclaimed, key, record)
            skip -= complete

    def resumed(self, trajectory: str, turns: int, earlier: bool) -> bool:
        """Note that the trajectory resumed from a snapshot that holds its first `turns` turns.

        `earlier`: an earlier attempt of the run wrote the snapshot. Returns True if this attempt
        has not counted these turns yet.
        """
        new = earlier and trajectory not in self._in_snapshot
        if new:
            self._in_snapshot[trajectory] = turns
        if trajectory in self._unclaimed:
            self.restart(trajectory, turns)
        return new

    def find(self, request: TurnRequest) -> Record | None:
        """Return the recorded turn of a restarted trajectory, each record once; None if none."""
        if (unclaimed := self._unclaimed.get(request.trajectory)) is None:
            return None
        records = unclaimed.get(_key(request))
        return records.popleft() if records else None

    def turns(self, trajectory: str) -> int:
        return len(self._recorded.get(trajectory, ()))

    def forget(self, trajectory: str) -> None:
        self._in_snapshot.pop(trajectory, None)
        self._unclaimed.pop(trajectory, None)
        self._bytes -= sum(_size(record) for _, record in self._recorded.pop(trajectory, ()))


class TurnLog:
    """The record on disk, and in `running` the record in memory.

    `step` is the step at which the run starts, and the version of its weights. Turns of later
    versions are not used, because the weights that generated them are lost. A recorded turn is used
    if its oldest token is at most `max_behind` versions older than the weights at its request. If
    that is None, nothing is recorded on disk (rollout.resume_turns).
    """

    def __init__(self, folder: Path, step: int, max_behind: int | None) -> None:
        self._folder, self._max_behind = Path(folder), max_behind
        self._snapshots = self._folder.parent / "snapshots"  # written by the environment hosts
        self._trained: dict[int, list[str]] = {}  # step -> trajectories
        self._forgotten: list[str] = []  # trajectories forgotten since the last checkpoint
        self._known: Records = defaultdict(deque)  # turns that earlier attempts recorded
        self.running = _Running()
        self._file: BinaryIO | None = None
        self._version = -1  # policy version of the open file
        self._newest_known = step  # newest version that may have recorded turns
        self.resumed_turns = self.resumed_tokens = 0  # not generated again, since `begin_step`
        if max_behind is not None:
            self._folder.mkdir(exist_ok=True)
            max_behind = -1 if self._failed_too_often(step) else max_behind
        self._resumes = max_behind is not None and max_behind >= 0
        for path, version in self._files():
            if max_behind is not None and step - max_behind <= version <= step:
                for record in _read(path):
                    _insert(self._known, record.key, record)
            else:
                path.unlink(missing_ok=True)

    def _failed_too_often(self, step: int) -> bool:
        """Count this start at `step`; True if `MOST_STARTS` starts there have failed before."""
        path = self._folder / STARTS
        try:
            last, starts = map(int, path.read_text(encoding="utf-8").split())
        except (OSError, ValueError):
            last, starts = step, 0
        failed = last == step and starts >= MOST_STARTS
        if failed:
            print(
                f"the run failed {starts} times after step {step}: the turns that its unfinished "
                "trajectories had are generated again",
                flush=True,
            )
        write_whole(path, f"{step} {1 if failed or last != step else starts + 1}\n".encode())
        return failed

    def stopped(self) -> None:
        """Reset the count of failed starts, because this attempt ends in order."""
        if self._max_behind is not None:
            (self._folder / STARTS).unlink(missing_ok=True)

    def find(self, request: TurnRequest, version: int) -> TurnResult | None:
        """Return the turn that an earlier attempt recorded for this context; None if none. Each
        record is returned once, with `finish` ABORT if incomplete. `version`: the newest."""
        if not self._known:
            return None
        if version - self._max_behind > self._newest_known:
            self._known.clear()
            return None
        key = _key(request)
        records = self._known.get(key)
        while records:
            record = records.popleft()
            if unpack_tokens(record.versions).min() >= version - self._max_behind:
                if record.finish is not FinishReason.ABORT:
                    self.running.add(request.trajectory, key, record, delivered=True)
                return self._resumed_turn(request, record)
        return None

    def find_in_memory(self, request: TurnRequest) -> TurnResult | None:
        """Return the turn that this attempt recorded before the trajectory's host was lost; None if
        none. Each record is returned once."""
        record = self.running.find(request)
        return self._resumed_turn(request, record) if record is not None else None

    def _resumed_turn(self, request: TurnRequest, record: Record) -> TurnResult:
        self.count_resumed(1, len(record.tokens) // 4)
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
        """Return the (oldest, newest) version at which an earlier attempt may have started a
        trajectory that this attempt starts at `version`; none if newest < oldest."""
        return (version - self._max_behind, self._newest_known) if self._resumes else (0, -1)

    def forget(self, trajectory: str) -> None:
        """Drop the trajectory's turns in memory and its snapshots, which nothing needs again."""
        self.running.forget(trajectory)
        self._forgotten.append(trajectory)
        shutil.rmtree(self._snapshots / trajectory, ignore_errors=True)

    def forget_prefix(self, prefix: str) -> None:
        """Forget the trajectories of earlier attempts whose names start with `prefix`. Their turns
        on disk stay until the file of their version is removed."""
        for path in self._snapshots.glob(f"{prefix}*"):
            self.forget(path.name)

    def trained(self, step: int, trajectories: list[str]) -> None:
        """Note that `step` trains these trajectories; a checkpoint of `step` forgets them."""
        self._trained[step] = trajectories

    def count_resumed(self, turns: int, tokens: int) -> None:
        """Count turns that need not be generated again."""
        self.resumed_turns += turns
        self.resumed_tokens += tokens

    def add(
        self, request: TurnRequest, result: TurnResult, version: int, delivered: bool = True
    ) -> None:
        """Record a turn that ended at `version`; with `finish` ABORT it is incomplete. `delivered`:
        the trajectory's current host gets it. Raises OSError, also for buffered earlier turns."""
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
        self.running.add(request.trajectory, key, record, delivered)
        if self._max_behind is None:
            return
        if self._file is None or version != self._version:
            self.close()
            self._file, self._version = self._path(version).open("ab"), version
        data = msgspec.msgpack.encode(record)
        head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
        self._file.write(head + data)

    def flush(self) -> None:
        """Write the buffered turns, so that they survive this process. Raises OSError."""
        if self._file is not None:
            self._file.flush()

    def checkpoint_saved(self, step: int) -> None:
        """Remove turns and snapshots that a restart from the checkpoint of `step` doesn't need."""
        for late in self._forgotten:  # A host that was dying may have written one more snapshot.
            shutil.rmtree(self._snapshots / late, ignore_errors=True)
        self._forgotten.clear()
        over = set()
        for trained in [each for each in self._trained if each <= step]:
            for trajectory in self._trained.pop(trained):
                self.forget(trajectory)
                over.add(_prompt(trajectory))
        # Earlier attempts may have left snapshots of other members and retries of these groups.
        for other in [path.name for path in self._snapshots.glob("g*") if over]:
            if _prompt(other) in over:
                self.forget(other)
        if self._max_behind is None:
            return
        for path, version in self._files():
            if version < step - self._max_behind:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version:06d}.turns"

    def _files(self) -> list[tuple[Path, int]]:
        """Return the files with their policy versions, oldest first."""
        found = sorted(self._folder.glob(PATTERN))
        return [(path, int(path.stem[1:])) for path in found if path.stem[1:].isdigit()]


def _insert(known: Records, key: bytes, record: Record) -> None:
    """Add a record, which replaces incomplete records of its context. An incomplete record is not
    added if the context has a complete record."""
    records = known[key]
    while records and records[-1].finish is FinishReason.ABORT:
        records.pop()
    if record.finish is not FinishReason.ABORT or not records:
        records.append(record)


def _prompt(trajectory: str) -> str:
    """Return the first name of the trajectory's group: g12 of g12r1.3r2."""
    return trajectory.partition(".")[0].partition("r")[0]


def _size(record: Record) -> int:
    fields = (record.tokens, record.logprobs, record.versions, record.experts)
    return sum(map(len, fields))


def _key(request: TurnRequest) -> bytes:
    """Return a hash of the trajectory, its context, how many of the context's tokens have known
    experts, and the sampling parameters. The turn's number is left out, because an agent's
    concurrent calls arrive in any order."""
    routed = (request.routed,) if request.routed else ()
    head = msgspec.msgpack.encode((request.trajectory, request.sampling, *routed))
    return xxhash.xxh3_128_digest(head + request.tokens)


def _read(path: Path) -> list[Record]:
    """Return the records before the first that a crash or the disk damaged. Truncates the file
    there, so that it can grow again."""
    data, records, at = path.read_bytes(), [], 0
    decoder = msgspec.msgpack.Decoder(Record)
    with suppress(msgspec.DecodeError, msgspec.ValidationError):  # another release's format
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
