"""Broadcast of each trainer rank's finished file to the node memory of all dedicated rollout ranks.

    trainer 0 --+--> rollout 0 of node A: /dev/shm/...  <-- the engines of rollout 0, 1, 2
    trainer 1 --+--> rollout 3 of node B: /dev/shm/...  <-- the engines of rollout 3, 4

One rollout rank per node receives the files and writes them to the node's `rose.transfer.mirror`.
Each trainer rank has a communicator with these receivers only. By MPI_Ibcast it sends a file as a
header (length and name) and pieces. NCCL can send the pieces (`rose.transfer.broadcast_nccl`). It
needs the collectives of several communicators in the same order at all ranks. So receivers take the
files in the order of the trainer ranks' indices, version after version.

A trainer rank's `send` returns at once. A thread calls MPI until the file has left, because MPI
moves large messages only during its calls. A receiver polls from its event loop. A late rank costs
only speed: if a file takes more than `deadline_s` seconds, the rank reports it and takes no further
part, and engines read the store's files. Pieces have no hashes, because readers check the hashes of
the store's manifest, which also detect damage in the mirror.
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

from rose import processes
from rose.comm import address
from rose.comm.mailbox import gather_texts
from rose.transfer.errors import TransferError
from rose.transfer.mirror import Mirror, choose_path

PIECE = 1 << 20  # bytes of a piece; a rank passes it on while it receives the next
WINDOW = 8  # pieces in flight
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # a path in the mirror
_HEADER = struct.Struct("<4sQ116s")  # magic, bytes, name
_MAGIC = b"RSB2"
_GROUP_TAG = 77  # the first tag for MPI_Comm_create_group; each trainer rank adds one
_FIRST_PAUSE_S, _IDLE_PAUSE_S = 0.0003, 0.002
# Pieces of abandoned transfers, kept with their memory until the process ends. MPI can't cancel
# them, and reads or writes the memory whenever a late rank joins in.
_ABANDONED: list[tuple[Transit, np.ndarray]] = []


class Transit(Protocol):
    """A piece in flight: an `MPI.Request`, or an object with its `Test`."""

    def Test(self) -> bool: ...


class Broadcast:
    """The broadcast on one rank. It lives as long as its process, because MPI keeps posted buffers.

    Construction is collective over the ranks `trainers` and `rollouts` of `world`, at least one of
    each, in the order of their roles' indices. `rose.transfer.mirror` explains `run_dir`,
    `limit_bytes` and `folder`. On a rollout rank, `mirror` is the node's. Raises `TransferError` if
    MPI was not started for several threads, and `TimeoutError` if a rank does not take part."""

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
        # Wait long, because a rank that imports from a cold file system is minutes late.
        texts = gather_texts(
            self._group,
            f"{_node(path)}\n{path}",
            max(address.MEET_S, deadline_s),
            "the broadcast's start (transfer.load_timeout_s)",
        )
        first: dict[str, int] = {}  # each node's first rollout rank, as a rank of the group
        for number, text in enumerate(texts[len(trainers) :], len(trainers)):
            first.setdefault(text.partition("\n")[0], number)
        self._writers = list(first.values())
        self.writes = rank in self._writers
        # The communicators that this rank is part of, by trainer rank.
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
        self._pieces = None  # carrier of the files' pieces; None for MPI
        self._previous: threading.Thread | None = None  # thread for the file before the last one
        self._last: threading.Thread | None = None  # thread for the last file
        self._failed = ""  # error that ended this rank's part

    def use_torch(self, device, interface: str | None = None) -> None:
        """Send all further files' pieces by torch.distributed: NCCL, with this rank's GPU `device`
        (a `torch.device`). Collective over all trainer and rollout ranks."""
        from rose.transfer.broadcast_nccl import TorchPieces

        sends = self.root is not None
        self._pieces = TorchPieces(
            self._group, self._comms, sends, self.deadline_s, WINDOW, PIECE, device, interface
        )

    # ----------------------------------------------------------------- a trainer rank's side

    def send(self, name: str, data) -> None:
        """Begin to send the file `name`, a relative path, after all earlier files. Its bytes `data`
        must not change any more. Raises `TransferError` if the name is not allowed."""
        if not _NAME.fullmatch(name) or len(name) > 116:
            raise TransferError(
                f"a broadcast's name is {name!r}; it must be a relative path of letters, digits, "
                "'_', '-' and '.', of 116 characters at most"
            )
        if self._failed:
            return
        buffer = np.frombuffer(data, np.uint8)
        self._previous = self._last
        self._last = threading.Thread(
            target=self._send,
            args=(self._previous, name, buffer),
            name=f"broadcast {name}",
            daemon=True,
        )
        self._last.start()

    def catch_up(self) -> None:
        """Wait until the file before the last one has left, or its deadline has passed. This bounds
        the memory of files that are still to be sent."""
        if self._previous is not None:
            self._previous.join()

    def _send(self, previous: threading.Thread | None, name: str, buffer: np.ndarray) -> None:
        """Send a file, after the thread of the `previous` file has ended."""
        if previous is not None:
            previous.join()
        if self._failed:
            return
        try:
            header = np.frombuffer(_HEADER.pack(_MAGIC, buffer.size, name.encode()), np.uint8)
            end = time.monotonic() + self.deadline_s
            for part in (header.copy(), buffer):
                for _ in self._move(self.root, part, part.size, end, part is buffer):
                    time.sleep(_FIRST_PAUSE_S)
        except Exception as error:  # any error of MPI or torch, whichever carries the pieces
            self._failed = str(error)
            print(
                f"trainer rank {self.root}: broadcast of {name}: {error}; engines read this "
                "version and later ones from the store's files",
                flush=True,
            )
            self._abort_pieces()

    # ----------------------------------------------------------------- a rollout rank's side

    async def receive(self) -> None:
        """Receive files into the mirror until cancelled. Run it as long as the rank lives, even
        while its engine is down, because it passes on pieces for other ranks. On a rank that is not
        its node's first, or after a rank was late, it only waits."""
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
                    if refused:  # The pieces must still pass through this rank to others.
                        buffer = np.empty(min(nbytes, WINDOW * PIECE), np.uint8)
                    end = time.monotonic() + self.deadline_s
                    await self._take(root, buffer, nbytes, end, True)
                    if not refused:
                        self.mirror.finish(name)
        except Exception as error:  # any error of MPI or torch; the rank and its engine go on
            why = f"broadcast of {name} by trainer rank {root}: {error}"
            print(f"{why}; engines of this node read the store's files", flush=True)
            self.mirror.abandon(why)
            await asyncio.to_thread(self._abort_pieces)

    async def _take(
        self, root: int, buffer: np.ndarray, nbytes: int, end: float, body: bool
    ) -> None:
        """Receive a header, or a file if `body`, into `buffer`."""
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
        """Move `nbytes` from or into the buffer, and yield after each poll whether a piece is done.

        A buffer shorter than `nbytes` is used again from its start. `body` is true for a file, and
        false for its header. Raises `TransferError` if not done at the monotonic time `end`."""
        in_flight: deque[tuple[Transit, np.ndarray]] = deque()
        at = 0
        try:
            while at < nbytes or in_flight:
                while at < nbytes and len(in_flight) < WINDOW:
                    low = at % buffer.size
                    piece = buffer[low : low + min(PIECE, nbytes - at)]
                    in_flight.append((self._start(root, piece, at // PIECE % WINDOW, body), piece))
                    at += piece.size
                moved = in_flight[0][0].Test()
                if moved:
                    in_flight.popleft()
                elif time.monotonic() > end:
                    raise TransferError(
                        f"not done within {self.deadline_s:g} s (transfer.load_timeout_s): the "
                        f"last {len(in_flight)} pieces of {at} of {nbytes} bytes did not move"
                    )
                yield moved
        finally:  # The caller may have been cancelled.
            _ABANDONED.extend(in_flight)

    def _start(self, root: int, piece: np.ndarray, slot: int, body: bool) -> Transit:
        """Begin to move a piece, by MPI or by `_pieces`."""
        if body and self._pieces is not None:
            return self._pieces.start(root, piece, slot)
        return self._comms[root].Ibcast([piece, MPI.BYTE], 0)

    def _abort_pieces(self) -> None:
        """Abort the process groups of `_pieces`, if any, and so the pieces in flight, since torch's
        watchdog would end this process for a piece that never ends. MPI can't cancel its pieces."""
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
    """Return a key that is equal for processes which see the same memory under the same path. Two
    containers of one machine may see different memory."""
    if not path:
        return ""
    device = os.stat(path.parent)
    return f"{processes.boot()} {device.st_dev} {device.st_ino} {path.parent}"


def _read_header(header: np.ndarray) -> tuple[str, int]:
    """Return the coming file's name and length. Raises `TransferError` if this is no header."""
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
    """Return this rank's side of the broadcast `kind`: "mpi", "nccl" or "none"
    (transfer.broadcast). `interface` (cluster.interface) is for "nccl". Returns None for "none",
    without rollout ranks, and on a rank that is neither trainer nor rollout.

    Collective over trainer and rollout ranks only. Raises `TransferError` for another kind, and for
    "nccl" if this process sees no GPU."""
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
