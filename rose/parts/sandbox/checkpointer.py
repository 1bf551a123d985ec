"""Checkpoints of one sandbox: capture and store what each turn changed.

    checkpointer = Checkpointer(box, engine, "name")
    await checkpointer.begin()              # after the setup, before the agent's first command
    await checkpointer.after_turn(1)        # while the shell waits; takes milliseconds
    reference = checkpointer.saved(1)       # names the stored turn that has this state
    await checkpointer.settled(1)           # waits until other hosts can restore that turn
    back = await restore(reference, engine)

The policy `classified` captures what the inspector finds changed (Crab, arXiv 2604.28138). `full`
captures everything after each turn. `files` captures files and the shell's variables after each
turn. If processes can't be captured, a capture has only files and variables, and the restored
sandbox names the missing parts. A turn is skipped if there is no room or an error occurs, and the
next capture includes its changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rose.parts.sandbox.backend import SandboxError
from rose.parts.sandbox.capture import FILES, PROCESS, Capture, Listing
from rose.parts.sandbox.engine import Engine, Ticket
from rose.parts.sandbox.inspector import NONE, Change, Inspector
from rose.parts.sandbox.packs import StoreDamaged
from rose.parts.sandbox.pieces import CHUNK_BYTES, PAGE_BYTES
from rose.parts.sandbox.sandbox import Sandbox

CLASSIFIED, FULL = "classified", "full"
POLICIES = (CLASSIFIED, FULL, FILES)
ORDER = (NONE, FILES, PROCESS)  # kinds of captures; each kind includes the kinds before it
BLOCK = 512  # bytes in a unit of st_blocks
# Most bytes that packing may read of a capture; a larger capture is skipped. Packing reads whole
# chunks, so each page with data in a sparse file may count as CHUNK_BYTES.
MOST_BYTES = 8 << 30


@dataclass(frozen=True)
class _Point:
    """A turn whose capture is stored or in the queue."""

    turn: int
    ticket: Ticket | None


@dataclass(frozen=True)
class Restored:
    """A restored sandbox with the state after `turn`. If later turns could not be restored, `turn`
    is earlier than requested, and `wrong` has the errors. `life`: as in `pieces.Manifest`."""

    box: Sandbox
    name: str
    turn: int
    life: int
    wrong: tuple[str, ...] = ()


class Checkpointer:
    """Captures the sandbox `box` after its turns. `origin`: the restored state with which `box`
    began, if any. Only one task may use a checkpointer at a time."""

    def __init__(
        self,
        box: Sandbox,
        engine: Engine,
        name: str,
        policy: str = CLASSIFIED,
        origin: Restored | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: there are {', '.join(POLICIES)}")
        self.box, self.engine, self.name, self.policy = box, engine, name, policy
        # Lives of a name must grow, even if this host's clock is behind an earlier host's.
        self.life = max(time.time_ns(), origin.life + 1 if origin else 0)
        self._inspector = Inspector(box)
        self._points: dict[int, _Point] = {}  # turn -> the capture that has its state
        self._origin = origin
        self._parent = (origin.name, origin.turn) if origin else None
        self._last: _Point | None = None  # the newest capture
        self._last_listing: Listing | None = None  # the newest capture's listing
        # Least kind of the next capture; a turn that changes more raises it. FILES is enough at
        # first: a restored sandbox's processes are already stored.
        self._due_kind = FILES
        # Files that the next capture copies even if they look unchanged; None: all files.
        self._unsure: set[str] | None = set()
        self._size = 0  # bytes of the last capture
        self._too_large = False  # True after a capture that was too large (logged once)
        self._lost = False  # True while no capture has the newest state of the processes
        # Number of turns by kind of capture, and of skipped turns; seconds that captures delayed
        # the agent; bytes of captures, before and after packing.
        self.stats = dict.fromkeys((*ORDER, "skipped", "seconds", "raw_bytes", "bytes"), 0)

    async def begin(self) -> None:
        """Give this life a number above all stored ones and, with the policy `classified`, inspect
        the state with which the first turn is compared. Raises `SandboxError`."""
        # The clock may have stepped back since an earlier episode of this name was stored.
        stored = await asyncio.to_thread(self.engine.store.newest_life, self.name)
        self.life = max(self.life, stored + 1)
        if self.policy == CLASSIFIED:
            await self._inspector.look()

    async def move(self, box: Sandbox) -> None:
        """Continue with `box`, which has an earlier state of this sandbox. The next capture is
        complete. Raises `SandboxError`."""
        self.box, self._inspector = box, Inspector(box)
        self._start_over()
        await self.begin()

    async def after_turn(self, turn: int) -> None:
        """Capture what the turn changed. Raises `SandboxError` when the sandbox is gone. Any other
        failure only costs checkpoints: of this turn, and of turns that share its capture."""
        if self.engine.stopped or not self.box.capture_kinds:
            self.stats["skipped"] += 1
            return
        began = time.monotonic()
        try:
            await self._capture_changes(turn)
        finally:
            self.stats["seconds"] += time.monotonic() - began

    async def _capture_changes(self, turn: int) -> None:
        change = await self._classify()
        self._due_kind = max(self._due_kind, change.kind, key=ORDER.index)
        if change.unsure is None or self._unsure is None:
            self._unsure = None
        else:
            self._unsure |= set(change.unsure)
        if self._last and (_failed(self._last.ticket.packed) or _failed(self._last.ticket.stored)):
            self._start_over()
        if self._due_kind == NONE:
            self.stats[NONE] += 1
            self._points[turn] = self._last
        elif not self.engine.room(self._size):
            self.stats["skipped"] += 1
        else:
            await self._capture(turn)

    async def _classify(self) -> Change:
        """Return what the turn changed, or what the policy captures after every turn."""
        if self.policy == CLASSIFIED:
            return await self._inspector.look()
        return Change(PROCESS if self.policy == FULL else FILES, self.policy, None)

    def _start_over(self) -> None:
        """Make the next capture complete: the last one was not stored, or is of another sandbox."""
        self._points = {t: p for t, p in self._points.items() if p is not self._last}
        self._last = self._last_listing = self._parent = None
        self._due_kind = PROCESS

    async def _capture(self, turn: int) -> None:
        """Take and submit a capture of the due kind, or of files if processes can't be captured."""
        wanted = self._due_kind
        possible = self.box.capture_kinds
        made = await self._take(wanted) if wanted in possible else None
        if made is None and wanted == PROCESS and FILES in possible:
            made = await self._take(FILES)
        if made is None:
            self.stats["skipped"] += 1
            return
        self._size, read = await asyncio.to_thread(_sizes, made.folder)
        if read > MOST_BYTES:
            await self._drop_too_large(made, turn, read)
            return
        self._too_large = False
        listing = await asyncio.to_thread(lambda: made.listing)
        keep = wanted == FILES and self.policy == CLASSIFIED and not self._lost
        ticket = self.engine.submit(
            self.name, turn, made.folder, self._size, self._parent, keep, self.life
        )
        if ticket is None:
            self.stats["skipped"] += 1
            return
        if made.kind == PROCESS:
            await self._inspector.resume()
        self._lost = made.kind != wanted or (self._lost and made.kind == FILES)
        self.stats[made.kind] += 1
        self.stats["raw_bytes"] += self._size
        ticket.packed.add_done_callback(lambda _: self._count_bytes(ticket))
        self._points[turn] = self._last = _Point(turn, ticket)
        self._parent, self._last_listing, self._unsure = (self.name, turn), listing, set()
        self._due_kind = wanted if self._lost and PROCESS in possible else NONE

    async def _drop_too_large(self, made: Capture, turn: int, read: int) -> None:
        self.stats["skipped"] += 1
        await asyncio.to_thread(shutil.rmtree, made.folder, True)
        if not self._too_large:
            words = f"{read >> 20} MiB of files and memory to read, of {MOST_BYTES >> 20} at most"
            self.engine.say(f"sandbox {self.name}: no checkpoints from turn {turn} on: {words}")
        self._too_large = True

    def _count_bytes(self, ticket: Ticket) -> None:
        self.stats["bytes"] += ticket.packed_bytes

    async def _take(self, kind: str) -> Capture | None:
        """Take a capture. If that fails, log it and return None."""
        since = self._last_listing
        if since is not None and self._unsure is None:
            since = None
        elif since is not None and self._unsure:
            since = await asyncio.to_thread(_without, since, self._unsure)
        try:
            return await self.box.capture(kind, self.engine.place(), since)
        except SandboxError as error:
            if not self.engine.refused(str(error)):
                self.engine.say(f"sandbox {self.name}: no capture of {kind}: {error}")
            return None

    # ---------------------------------------------------------------------- what is stored

    def saved(self, turn: int) -> bytes | None:
        """Return a reference to the state after `turn`, for `restore`; None if it was skipped, or
        its capture was found to have failed."""
        point = self._points.get(turn)
        if point is None:
            return None
        found = {"name": self.name, "turn": point.turn, "life": self.life}
        return json.dumps(found).encode()

    async def settled(self, turn: int, wait_s: float = 60.0) -> bool:
        """Return whether another host can restore the state after `turn`. If its capture is still
        queued, give it priority and wait for it, at most `wait_s` seconds."""
        point, origin = self._points.get(turn), self._origin
        if point is None and origin is not None and turn == origin.turn:
            shared = self.engine.store.behind
            return await asyncio.to_thread(shared.has, origin.name, turn, origin.life)
        if point is None:
            return False
        self.engine.urge(self.name)
        await asyncio.wait({point.ticket.stored}, timeout=wait_s)
        return point.ticket.stored.done() and not point.ticket.stored.result()


async def restore(
    saved: bytes, engine: Engine, backend: str = "auto", exact: bool = False
) -> Restored:
    """Restore a sandbox with the state to which `saved` refers. If that fails and `exact` is False,
    restore the newest earlier turn that can be restored. Raises `SandboxError`."""
    wanted = json.loads(saved)
    name, turn, life, wrong = wanted["name"], wanted["turn"], wanted["life"], []
    await engine.packed(name, turn, life)
    for each in [turn] if exact else [t for t in reversed(engine.store.turns(name)) if t <= turn]:
        folder = engine.place()
        try:
            await asyncio.to_thread(engine.store.load, name, each, folder, life)
            box = await Sandbox.restore(folder, backend)
        except (StoreDamaged, SandboxError, OSError) as error:
            wrong.append(f"turn {each} of sandbox {name} can't be restored: {error}")
        else:
            for words in wrong:
                engine.say(f"{words}; turn {each} is taken")
            return Restored(box, name, each, life, tuple(wrong))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)
    raise SandboxError("; ".join(wrong) or f"no turn of sandbox {name} up to {turn} was stored")


def _failed(future: asyncio.Future[str]) -> bool:
    return future.done() and future.result() != ""


def _without(listing: Listing, paths: set[str]) -> Listing:
    """Return the listing without the files at `paths`. Their other names (hard links) are removed,
    too, because only the entry of a file's first name has the content."""
    inodes = {entry["ino"] for entry in listing if entry["path"] in paths}
    return [entry for entry in listing if entry["ino"] not in inodes]


def _sizes(folder: Path) -> tuple[int, int]:
    """Return the bytes that a folder takes on disk, and the most bytes that packing reads of it."""
    taken = read = 0
    for where, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(where, name))
            data = found.st_blocks * BLOCK
            taken += data
            read += min(found.st_size, data * (CHUNK_BYTES // PAGE_BYTES))
    return taken, read
