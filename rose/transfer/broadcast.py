"""Broadcast of each trainer rank's finished file to the node memory of all dedicated rollout ranks.

    trainer 0 --+--> rollout 0 of node A: /dev/shm/...  <-- the engines of rollout 0, 1, 2
    trainer 1 --+--> rollout 3 of node B: /dev/shm/...  <-- the engines of rollout 3, 4

One rollout rank per node receives, and writes what `rose.transfer.mirror` describes. Each trainer
rank has a communicator with these alone. A file is a header (its length and name) and pieces, each
an MPI_Ibcast, or pieces over NCCL (`rose.transfer.broadcast_nccl`). Receivers take
the trainer ranks' files in the order of their indices, version after version: NCCL wants the
collectives of several communicators in one order at all ranks of a GPU.

A trainer rank's `send` returns at once; a thread calls MPI until the file has left, as MPI moves
large messages only when it is called. A receiver polls from its event loop. Whoever is late costs
speed only: when a file takes more than `deadline_s` seconds the rank reports it and takes no
further part, and engines read the store's files. There is no hash of pieces: readers check those of
the store's manifest, which also cover what may happen to the mirror.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from mpi4py import MPI

from rose.comm import address
from rose.comm.mailbox import gather_texts
from rose.transfer.errors import TransferError
from rose.transfer.mirror import Mirror, choose_path

PIECE = 1 << 20  # bytes; what a rank passes on while it receives the next
WINDOW = 8  # pieces under way
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # becomes a path in the mirror
_HEADER = struct.Struct("<4sQ116s")  # magic, bytes, name
_MAGIC = b"RSB2"
_GROUP_TAG = 77  # of MPI_Comm_create_group, and on for each trainer rank
_FIRST_PAUSE_S, _IDLE_PAUSE_S = 0.0003, 0.002
# Pieces that were given up, with their memory, until the process ends: MPI can't cancel them, and
# reads or writes them whenever a late rank joins in.
_GIVEN_UP: list[tuple[Transit, np.ndarray]] = []


class Transit(Protocol):
    """Something under way: an `MPI.Request`, or one that looks like it."""

    def Test(self) -> bool: ...


class Broadcast:
    """One rank's end, for as long as its process lives: MPI keeps the posted buffers.

    Collective over the ranks `trainers` and `rollouts` of `world`, at least one of each, which are
    in the order of their roles' indices. `run_dir`, `limit_bytes`, `folder`: see
    `rose.transfer.mirror`. `mirror` is the node's, on a rollout rank. Raises `TransferError` when
    MPI was not started for several threads, `TimeoutError` when a rank does not come.
    """

    def __init__(
        self,
        world: MPI.Comm,
        trainers: Sequence[int],
        rollouts: Sequence[int],
        deadline_s: float,
        run_dir: Path,
        limit_bytes: int,
        folder: Path | None = None,
    ):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise TransferError(
                "transfer.broadcast: a trainer rank sends in a thread of its own, and this MPI "
                f"gives thread level {MPI.Query_thread()}, not MPI_THREAD_MULTIPLE "
                f"({MPI.THREAD_MULTIPLE}); build it with that, or choose 'none'"
            )
        self.deadline_s = deadline_s
        self._group = _communicator(world, [*trainers, *rollouts], _GROUP_TAG)
        rank = self._group.Get_rank()
        self.root = rank if rank < len(trainers) else None  # index of the trainer rank
        path = choose_path(run_dir, folder) if self.root is None else ""
        # who imports from a cold file system is minutes late, and no fault of the network's
        texts = gather_texts(
            self._group,
            f"{_node(path)}\n{path}",
            max(address.MEET_S, deadline_s),
            "the broadcast's start (transfer.load_timeout_s)",
        )
        first: dict[str, int] = {}  # node -> its first rollout rank, of the group
        for number, text in enumerate(texts[len(trainers) :], len(trainers)):
            first.setdefault(text.partition("\n")[0], number)
        self._writers = list(first.values())
        self.writes = rank in self._writers
        # by trainer rank, those that this rank is part of
        self._comms = {
            root: _communicator(
                world,
                [trainers[root], *(rollouts[w - len(trainers)] for w in self._writers)],
                _GROUP_TAG + 1 + root,
            )
            for root in range(len(trainers))
            if self.writes or root == self.root
        }
        self.mirror: Mirror | None = None
        if self.root is None:
            where = texts[first[texts[rank].partition("\n")[0]]].partition("\n")[2]
            self.mirror = Mirror(Path(where), len(trainers), limit_bytes)
        self._pieces = None  # what carries files' pieces, if not MPI
        self._before: threading.Thread | None = None  # of the file before the last
        self._sending: threading.Thread | None = None  # of the last
        self._failed = ""

    def use_torch(self, device, interface: str | None = None) -> None:
        """Files' pieces travel over torch.distributed from now on: NCCL, with this rank's GPU
        `device` (a `torch.device`). Collective over all trainer and rollout ranks."""
        from rose.transfer.broadcast_nccl import TorchPieces

        sends = self.root is not None
        self._pieces = TorchPieces(
            self._group, self._comms, sends, self.deadline_s, WINDOW, PIECE, device, interface
        )

    # ----------------------------------------------------------------- a trainer rank's side

    def send(self, name: str, data) -> None:
        """Begin to send the file `name`, a relative path, whose bytes `data` nobody changes any
        more; it leaves after the ones before. Raises `TransferError` on a name that can't be."""
        if not _NAME.fullmatch(name) or len(name) > 116:
            raise TransferError(
                f"a broadcast's name is {name!r}; it must be a relative path of letters, digits, "
                "'_', '-' and '.', of 116 characters at most"
            )
        if self._failed:
            return
        buffer = np.frombuffer(data, np.uint8)
        self._before, self._sending = (
            self._sending,
            threading.Thread(
                target=self._send,
                args=(self._sending, name, buffer),
                name=f"broadcast {name}",
                daemon=True,
            ),
        )
        self._sending.start()

    def catch_up(self) -> None:
        """Until the file before the last one has left, or its deadline has passed: files that wait
        take memory."""
        if self._before is not None:
            self._before.join()

    def _send(self, before: threading.Thread | None, name: str, buffer: np.ndarray) -> None:
        if before is not None:
            before.join()
        if self._failed:
            return
        try:
            header = np.frombuffer(_HEADER.pack(_MAGIC, buffer.size, name.encode()), np.uint8)
            end = time.monotonic() + self.deadline_s
            for part in (header.copy(), buffer):
                for _ in self._move(self.root, part, part.size, end, part is buffer):
                    time.sleep(_FIRST_PAUSE_S)
        except Exception as error:  # MPI's or torch's too, whichever carries the pieces
            self._failed = str(error)
            print(
                f"trainer rank {self.root}: broadcast of {name}: {error}; engines read this "
                "version and later ones from the store's files",
                flush=True,
            )
            self._abort_pieces()

    # ----------------------------------------------------------------- a rollout rank's side

    async def receive(self) -> None:
        """Into the mirror, until cancelled; to be run for as long as the rank lives, also while its
        engine is down: other ranks' pieces come through it. Does nothing on a rank that is not its
        node's first, or once a rank is late."""
        if self.writes:
            await self._receive()
        await asyncio.Event().wait()

    async def _receive(self) -> None:
        header = np.empty(_HEADER.size, np.uint8)
        root, name = 0, "the next file"
        try:
            while True:
                for root in self._comms:
                    await self._take(root, header, header.size, float("inf"), False)
                    name, nbytes = _read_header(header)
                    buffer = self.mirror.open(name, nbytes)
                    refused = buffer is None
                    if refused:  # it must pass through all the same
                        buffer = np.empty(min(nbytes, WINDOW * PIECE), np.uint8)
                    end = time.monotonic() + self.deadline_s
                    await self._take(root, buffer, nbytes, end, True)
                    if not refused:
                        self.mirror.finish(name)
        except Exception as error:  # as in `_send`; the rank and its engine go on
            why = f"broadcast of {name} by trainer rank {root}: {error}"
            print(f"{why}; engines of this node read the store's files", flush=True)
            self.mirror.give_up(why)
            await asyncio.to_thread(self._abort_pieces)

    async def _take(
        self, root: int, buffer: np.ndarray, nbytes: int, end: float, body: bool
    ) -> None:
        pause = _FIRST_PAUSE_S
        for moved in self._move(root, buffer, nbytes, end, body):
            pause = _FIRST_PAUSE_S if moved else min(pause * 1.5, _IDLE_PAUSE_S)
            await asyncio.sleep(0 if moved else pause)

    def close(self) -> None:
        if self.writes:
            self.mirror.close()

    # ----------------------------------------------------------------- how a buffer travels

    def _move(
        self, root: int, buffer: np.ndarray, nbytes: int, end: float, body: bool
    ) -> Iterator[bool]:
        """Move `nbytes` from or into the buffer, again from its start where it is smaller; yields
        between two looks whether something moved. Raises `TransferError` when it is not done at
        the time `end`, of `time.monotonic()`."""
        under_way: deque[tuple[Transit, np.ndarray]] = deque()
        at = 0
        try:
            while at < nbytes or under_way:
                while at < nbytes and len(under_way) < WINDOW:
                    low = at % buffer.size
                    piece = buffer[low : low + min(PIECE, nbytes - at)]
                    under_way.append((self._start(root, piece, at // PIECE % WINDOW, body), piece))
                    at += piece.size
                moved = under_way[0][0].Test()
                if moved:
                    under_way.popleft()
                elif time.monotonic() > end:
                    raise TransferError(
                        f"not done within {self.deadline_s:g} s (transfer.load_timeout_s): the "
                        f"last {len(under_way)} pieces of {at} of {nbytes} bytes did not move"
                    )
                yield moved
        finally:  # also when the caller was cancelled
            _GIVEN_UP.extend(under_way)

    def _start(self, root: int, piece: np.ndarray, slot: int, body: bool) -> Transit:
        if body and self._pieces is not None:
            return self._pieces.start(root, piece, slot)
        return self._comms[root].Ibcast([piece, MPI.BYTE], 0)

    def _abort_pieces(self) -> None:
        """This rank takes no further part. Torch would end the process for pieces that stay under
        way."""
        try:
            if self._pieces is not None:
                self._pieces.abort()
        except Exception as error:
            print(f"broadcast: its process groups were not aborted: {error}", flush=True)


def _communicator(world: MPI.Comm, ranks: list[int], tag: int) -> MPI.Comm:
    group = world.Get_group().Incl(ranks)
    made = world.Create_group(group, tag)
    group.Free()
    return made


def _node(path: Path | str) -> str:
    """Of processes that see the same memory in the same place: containers of one machine may
    not."""
    if not path:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    device = os.stat(path.parent)
    return f"{boot} {device.st_dev} {device.st_ino} {path.parent}"


def _read_header(header: np.ndarray) -> tuple[str, int]:
    """Name and bytes of the file that comes. Raises `TransferError` on bytes that are no header."""
    magic, nbytes, name = _HEADER.unpack(header.tobytes())
    text = name.rstrip(b"\0").decode(errors="replace")
    if magic != _MAGIC or not _NAME.fullmatch(text):
        raise TransferError(
            f"a broadcast's header begins with {_MAGIC!r} and names a relative path, this one with "
            f"{magic!r} and {text!r}"
        )
    return text, nbytes


def make_broadcast(
    kind: str,
    world: MPI.Comm,
    trainers: Sequence[int],
    rollouts: Sequence[int],
    deadline_s: float,
    run_dir: Path,
    limit_bytes: int,
    interface: str | None = None,
) -> Broadcast | None:
    """This rank's end of the broadcast `kind`, "mpi", "nccl" or "none" (transfer.broadcast);
    `interface` (cluster.interface) is for NCCL's. Null for "none", without rollout ranks, and on a
    rank that is neither trainer nor rollout.

    Collective over those ranks, and only those. Raises `TransferError` on another kind, and for
    "nccl" where this process sees no GPU.
    """
    if kind not in ("mpi", "nccl", "none"):
        raise TransferError(f"transfer.broadcast={kind!r}; known are 'mpi', 'nccl' and 'none'")
    me = world.Get_rank()
    if kind == "none" or not rollouts or me not in (*trainers, *rollouts):
        return None
    if kind == "mpi":
        return Broadcast(world, trainers, rollouts, deadline_s, run_dir, limit_bytes)
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise TransferError(
            f"transfer.broadcast='nccl': MPI rank {me} has no GPU, or a torch without NCCL; "
            "'mpi' needs neither"
        )
    made = Broadcast(world, trainers, rollouts, deadline_s, run_dir, limit_bytes)
    made.use_torch(torch.device("cuda", torch.cuda.current_device()), interface)
    return made
