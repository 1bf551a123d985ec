"""The turns of trajectories under way, on disk, so that a run that starts again goes on with them.

Environments are determined by their seeds and by what the policy does: a trajectory that begins
anew and gets its recorded answers stands where it stood, and no token of it is made twice (Crab's
"chat only" recovery, arXiv 2604.28138, made exact: an answer is only given to the very context that
it was made for, so an environment that answers otherwise this time gets new turns from there on).

A file holds what was recorded under one policy version; files whose turns no restart could use are
removed with each checkpoint. A run that failed twice at one step might do so for its turns: the
third start makes them anew. Policies don't observe turns that are answered from here. Left out: the
state of machines that agents work on.
"""

from __future__ import annotations

import os
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


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A turn, or with `finish` ABORT the tokens that it had when the run ended."""

    key: bytes
    tokens: bytes  # int32 (n,)
    logprobs: bytes  # float32 (n,)
    versions: bytes  # int32 (n,)
    finish: FinishReason


class TurnLog:
    """`step`: at which the run starts, whose weights are version `step`; turns of later versions
    were made by weights that are lost. `behind`: the most versions that a recorded turn's oldest
    token may be behind the weights of the turn's request; None: nothing is recorded."""

    def __init__(self, folder: Path, step: int, behind: int | None) -> None:
        self._folder, self._behind = Path(folder), behind
        self._known: dict[bytes, deque[Record]] = defaultdict(deque)
        self._file: BinaryIO | None = None
        self._version = -1  # of the open file
        self._newest_known = step
        self.resumed_turns = self.resumed_tokens = 0  # since the step's begin
        if behind is not None:
            self._folder.mkdir(exist_ok=True)
            behind = -1 if self._fails(step) else behind
        for path, version in self._files():
            if behind is not None and step - behind <= version <= step:
                self._learn(_read(path))
            else:
                path.unlink(missing_ok=True)

    def _fails(self, step: int) -> bool:
        """Whether the run has begun at `step` before, and failed, too often; counts this start."""
        path = self._folder / STARTS
        try:
            last, starts = map(int, path.read_text().split())
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

    def _learn(self, records: list[Record]) -> None:
        """Of a context with complete turns only these: what was begun has become one of them."""
        for record in records:
            known = self._known[record.key]
            while known and known[-1].finish is FinishReason.ABORT:
                known.pop()
            if record.finish is not FinishReason.ABORT or not known:
                known.append(record)

    def find(self, request: TurnRequest, version: int) -> TurnResult | None:
        """What an earlier attempt made of this very context, each record once. `version`: of the
        newest weights. `finish` is ABORT if the turn was not complete."""
        if not self._known:
            return None
        if version - self._behind > self._newest_known:
            self._known.clear()
            return None
        records = self._known.get(_key(request))
        while records:
            record = records.popleft()
            if unpack_tokens(record.versions).min() >= version - self._behind:
                self.resumed_turns += 1
                self.resumed_tokens += len(record.tokens) // 4
                return TurnResult(
                    request.turn, record.tokens, record.logprobs, record.versions, record.finish
                )
        return None

    def add(self, request: TurnRequest, result: TurnResult, version: int) -> None:
        """Record a turn that ended under `version`, or with `finish` ABORT one that is cut there.
        Raises OSError, also for what was added before."""
        if self._behind is None or not result.tokens:
            return
        if self._file is None or version != self._version:
            self.close()
            self._file, self._version = self._path(version).open("ab"), version
        data = msgspec.msgpack.encode(
            Record(_key(request), result.tokens, result.logprobs, result.versions, result.finish)
        )
        head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
        self._file.write(head + data)

    def flush(self) -> None:
        """What was added outlives this process. Raises OSError."""
        if self._file is not None:
            self._file.flush()

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is on disk: a restart begins there or later."""
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


def _key(request: TurnRequest) -> bytes:
    """Of the trajectory, its context and how the turn is sampled. Not of the turn's number: an
    agent's concurrent calls come in any order."""
    rest = msgspec.msgpack.encode((request.trajectory, request.sampling))
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
