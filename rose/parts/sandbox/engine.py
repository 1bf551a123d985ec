"""An environment host's queue of its sandboxes' captures, which are packed and then stored.

    capture (raw, local) --save--> local store --copy, bytes_per_s--> shared store
                          packed                                      stored

One process (`packer`) does both steps. A capture is urgent if a caller waits for it or if its
sandbox has begun its next turn. Urgent captures come first, then the oldest. Turns of one sandbox
are processed in order, and several sandboxes at once, so that a large turn delays no other sandbox.
The bytes of raw captures that wait are bounded. Beyond the bound a turn is skipped, and the next
capture includes its changes. If a disk is full, checkpointing stops with one message; the run goes
on.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.files import REMEDIES, held, own_folder
from rose.parts.sandbox import left
from rose.parts.sandbox.backend import MIB, SandboxError
from rose.parts.sandbox.packer import PackerProcess
from rose.parts.sandbox.store import Store

AT_ONCE = {"save": 2, "copy": 4, "tidy": 1}  # most orders at the packer, by kind
LOCK_S = 60.0  # seconds to wait for the lock of all hosts' folders
JOB_S = 120.0  # seconds for an order, without the delay by `bytes_per_s`
DEATHS = 3  # most deaths of packers that the engine did not kill
COLLECT_S = 30.0  # seconds between two removals of unused data from the stores


@dataclass
class Counters:
    """Sums since the start. `raw_bytes`: sizes of captures; `packed_bytes`, `stored_bytes`: their
    sizes in the local and the shared store; `lag_s`: seconds from captures to their arrival in
    the shared store; `late`: captures not stored when the sandbox's next turn began."""

    stored: int = 0
    failed: int = 0
    late: int = 0
    raw_bytes: int = 0
    packed_bytes: int = 0
    stored_bytes: int = 0
    lag_s: float = 0.0


@dataclass(eq=False)
class Ticket:
    """A capture in the queue. `packed` and `stored` resolve, to "" once it is in the local and in
    the shared store, or to an error. `parent`, `keep_image`: as in `Store.save`."""

    name: str
    turn: int
    folder: Path
    parent: tuple[str, int] | None
    keep_image: bool
    raw: int  # bytes
    life: int
    taken: float = field(default_factory=time.monotonic)
    urgent: bool = False
    late: bool = False
    tries: int = 0
    packed_bytes: int = 0
    packed: asyncio.Future[str] = field(default_factory=asyncio.Future)
    stored: asyncio.Future[str] = field(default_factory=asyncio.Future)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


class Engine:
    """Stores captures. `bytes_per_s` bounds writes to the shared store (0: no bound). `memory_mib`
    bounds the raw captures that wait. The newest `keep` turns of each sandbox stay stored (0: all).
    After its end they stay only while `wanted(name)`. `count(name, value)` receives quantities."""

    def __init__(
        self,
        store: Path,
        local: Path | None = None,
        bytes_per_s: float = 0.0,
        memory_mib: int = 1024,
        keep: int = 8,
        wanted: Callable[[str], bool] = lambda name: False,
        count: Callable[[str, float], None] = lambda name, value: None,
        say: Callable[[str], None] = _say,
    ) -> None:
        self.counters, self.stopped = Counters(), ""
        self._shared, self._keep, self._count = Path(store).absolute(), keep, count
        self._wanted, self.say = wanted, say
        self._bytes_per_s, self._most = bytes_per_s, memory_mib * MIB
        self._named = local is not None
        self._home = local or Path(tempfile.gettempdir()) / f"rose-sandboxes-{os.getuid()}"
        self._waiting: dict[str, list[Ticket]] = {"save": [], "copy": []}
        self._at_work: dict[str, list[Ticket]] = {"save": [], "copy": []}
        self._raw = 0  # bytes of captures that wait
        self._tidy: list[dict[str, Any]] = []
        self._tidying: asyncio.Task | None = None
        self._tasks: set[asyncio.Task] = set()
        self._packer: PackerProcess | None = None
        self._starting = asyncio.Lock()
        self._deaths, self._collected = 0, time.monotonic()
        self._captures = itertools.count()
        self._ended: set[str] = set()  # ended sandboxes whose turns are still stored

    async def open(self) -> Engine:
        """Start the packer. Raises `SandboxError` if the local or shared folder can't be used."""
        try:
            await asyncio.to_thread(self._make_folders)
            await self._running_packer()
        except OSError as error:
            raise SandboxError(f"checkpoints can't be kept: {error}") from None
        return self

    def _make_folders(self) -> None:
        own_folder(self._home, follow=self._named)
        try:
            self._take_over()
        except OSError as error:  # such as a full disk
            self.say(f"captures of dead hosts can't be taken over: {error}")
        # This lock keeps other hosts from taking the new folder for a dead host's.
        with held(self._home / "lock", LOCK_S):
            self.local, self._lock = left.new_folder(self._home)
        (self.local / "raw").mkdir()
        (self.local / left.SHARED).write_text(str(self._shared), encoding="utf-8")
        self.store = Store(self.local / "store", behind=Store(self._shared))

    def _take_over(self) -> None:
        """Store what dead hosts of this run have packed, and remove their folders (left.py)."""
        with held(self._home / "lock", LOCK_S):
            left.take_over(self._home, self._shared, self.say)

    async def _running_packer(self) -> PackerProcess:
        """Return a running packer. Raises OSError if it can't start, or if too many have died."""
        async with self._starting:
            if self._packer is None or self._packer.killed or self._packer.ended:
                self._deaths += self._packer is not None and not self._packer.killed
                if self._deaths > DEATHS:
                    words = f"their packer died {self._deaths} times: {self._packer.ended}"
                    raise OSError(errno.ECHILD, words)
                self._packer = await PackerProcess.start(
                    self.local / "store", self._shared, self._bytes_per_s, sum(AT_ONCE.values())
                )
            return self._packer

    # ---------------------------------------------------------------------- for checkpointers

    def place(self) -> Path:
        """Return a new path on the node's disk, for a capture or a restore."""
        return self.local / "raw" / str(next(self._captures))

    def room(self, raw: int) -> bool:
        """Return whether a capture of `raw` bytes would be accepted now."""
        return not self.stopped and (not self._raw or self._raw + raw <= self._most)

    def submit(
        self,
        name: str,
        turn: int,
        folder: Path,
        raw: int,
        parent: tuple[str, int] | None = None,
        keep_image: bool = False,
        life: int = 0,
    ) -> Ticket | None:
        """Enqueue a capture of `raw` bytes. If there is no room, remove it and return None."""
        if not self.room(raw):
            self._remove(folder)
            return None
        ticket = Ticket(name, turn, folder, parent, keep_image, raw, life)
        self._raw += raw
        self._waiting["save"].append(ticket)
        self._dispatch()
        return ticket

    def urge(self, name: str, late: bool = False) -> None:
        """Give queued captures of `name` priority. `late`: count them as late."""
        for stage in ("save", "copy"):
            for ticket in self._waiting[stage] + self._at_work[stage]:
                if ticket.name == name:
                    ticket.urgent = True
                    self.counters.late += late and not ticket.late
                    ticket.late |= late

    async def packed(self, name: str, turn: int, life: int) -> None:
        """Wait until each capture of `name` up to `turn` is in the local store or has failed. If no
        store has the turn then, look for it in the folders of dead hosts on this machine."""
        self.urge(name)
        on_their_way = self._waiting["save"] + self._at_work["save"]
        for ticket in on_their_way:
            if ticket.name == name and ticket.turn <= turn:
                await asyncio.wait({ticket.packed}, timeout=JOB_S)
        if not await asyncio.to_thread(self.store.has, name, turn, life):
            try:
                await asyncio.to_thread(self._take_over)
            except OSError as error:
                self.say(f"captures of dead hosts can't be taken over: {error}")

    def ended(self, name: str) -> None:
        """Note that the sandbox `name` has ended. Remove its turns once `wanted(name)` is False."""
        self._ended.add(name)
        self._forget_unwanted()

    async def sweep(self) -> None:
        """Remove all stored turns of names that aren't `wanted`, including names from killed hosts
        and from earlier attempts of the run. Return when they are removed."""

        def unwanted() -> list[str]:
            return [name for name in self.store.behind.names() if not self._wanted(name)]

        self._forget_unwanted()
        try:
            for name in await asyncio.to_thread(unwanted):
                order = {"do": "forget", "name": name, "keep": 0, "upto": None}
                # `wanted` is checked again when the order is carried out.
                self._order_removal(order | {"unless_wanted": True})
        except OSError as error:
            self.say(f"old checkpoints of sandboxes stay: {error}")
        if self._tidying is not None:
            await asyncio.wait({self._tidying})

    def _forget_unwanted(self) -> None:
        """Remove all turns of ended sandboxes that are no longer wanted."""
        for name in [name for name in self._ended if not self._wanted(name)]:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Remove all turns of `name`, queued ones included."""
        self._ended.discard(name)
        for stage in ("save", "copy"):
            for ticket in [t for t in self._waiting[stage] if t.name == name]:
                self._waiting[stage].remove(ticket)
                self._drop(ticket, stage, "forgotten")
        self._order_removal({"do": "forget", "name": name, "keep": 0, "upto": None})

    def stop(self, words: str) -> None:
        """Stop checkpointing for good, and log the reason `words` once."""
        if self.stopped:
            return
        self.stopped = f"checkpoints of sandboxes stop here: {words}"
        self.say(self.stopped)
        for stage in ("save", "copy"):
            waiting, self._waiting[stage] = self._waiting[stage], []
            for ticket in waiting:
                self._drop(ticket, stage, self.stopped)

    def refused(self, words: str, shared: bool = False) -> bool:
        """If the error `words` means that the folder accepts no more writes (`REMEDIES`), stop
        checkpointing and return True. `shared`: the error is about the shared folder."""
        number = next((n for n in REMEDIES if os.strerror(n) in words), None)
        if number is not None:
            where = self._shared if shared else self._home
            self.stop(f"{where}: {words}; {REMEDIES[number]}; the run goes on without")
        return number is not None

    async def close(self, wait_s: float = 60.0) -> None:
        """Store the queued captures, for `wait_s` seconds at most, and remove the local folder."""
        until = time.monotonic() + wait_s
        with suppress(TimeoutError):
            await asyncio.wait_for(self.sweep(), wait_s)
        self._order_removal({"do": "collect", "name": "", "upto": 0})
        while self._tasks and (rest_s := until - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
        lost = sum(map(len, (*self._waiting.values(), *self._at_work.values())))
        if lost:
            self.say(f"{lost} checkpoints of sandboxes were not stored within {wait_s:g} s")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._packer is not None:
            await self._packer.close()
        await asyncio.to_thread(shutil.rmtree, self.local, ignore_errors=True)
        self._lock.close()

    # ---------------------------------------------------------------------- the queue

    def _dispatch(self) -> None:
        """Start the next waiting captures, as far as `AT_ONCE` permits."""
        for stage in ("save", "copy"):
            waiting, at_work = self._waiting[stage], self._at_work[stage]
            while waiting and len(at_work) < AT_ONCE[stage]:
                busy = {ticket.name for ticket in at_work}
                firsts: dict[str, Ticket] = {}
                for ticket in waiting:
                    firsts.setdefault(ticket.name, ticket)
                free = [t for name, t in firsts.items() if name not in busy]
                if not free:
                    break
                # If a turn is urgent, so are earlier turns of its sandbox.
                urgent = {t.name for t in waiting if t.urgent}
                chosen = min(free, key=lambda t: (t.name not in urgent, t.taken))
                waiting.remove(chosen)
                at_work.append(chosen)
                self._spawn(self._work(stage, chosen))

    def _spawn(self, work: Any) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self, stage: str, ticket: Ticket) -> None:
        """Have the packer do one stage of a capture, and handle its answer."""
        order = {"do": stage, "name": ticket.name, "turn": ticket.turn}
        order |= {"folder": str(ticket.folder), "parent": ticket.parent}
        order |= {"keep_image": ticket.keep_image, "life": ticket.life}
        slow = sum(t.packed_bytes for t in self._at_work["copy"]) if stage == "copy" else 0
        wait_s = JOB_S + (2 * slow / self._bytes_per_s if self._bytes_per_s else 0.0)
        ticket.tries += 1
        answer = await self._ask(order, wait_s)
        self._at_work[stage].remove(ticket)
        if answer is None and ticket.tries < DEATHS and not self.stopped:
            self._waiting[stage].insert(0, ticket)
        elif answer is None or "error" in answer:
            self._on_failure(ticket, stage, answer or {"error": "the packer died each time"})
        elif stage == "save":
            self._on_saved(ticket, answer)
        else:
            self._on_copied(ticket, answer)
        self._dispatch()

    async def _ask(self, order: dict[str, Any], wait_s: float) -> dict[str, Any] | None:
        """Return the packer's answer; None if the packer died. Kill a packer that doesn't answer in
        time; its other orders are sent to the next packer."""
        while True:
            try:
                packer = await self._running_packer()
                return await asyncio.wait_for(packer.ask(order), wait_s)
            except TimeoutError:
                packer.kill()
                return {"error": f"not done within {wait_s:g} s"}
            except ConnectionError:
                if not packer.killed:
                    return None
            except OSError as error:
                self.stop(str(error))
                return {"error": self.stopped}

    def _on_saved(self, ticket: Ticket, answer: dict[str, Any]) -> None:
        """Queue a capture for the shared store, because it is in the local store now."""
        self._raw -= ticket.raw
        self._remove(ticket.folder)
        ticket.packed_bytes, ticket.tries = answer["written"], 0
        self.counters.raw_bytes += answer["raw"]
        self.counters.packed_bytes += answer["written"]
        _resolve_once(ticket.packed, "")
        if self.stopped:
            _resolve_once(ticket.stored, self.stopped)
        else:
            self._waiting["copy"].append(ticket)

    def _on_copied(self, ticket: Ticket, answer: dict[str, Any]) -> None:
        """Count a capture that is in the shared store now, and order the removal of older turns."""
        self.counters.stored += 1
        self.counters.stored_bytes += answer["written"]
        self.counters.lag_s += time.monotonic() - ticket.taken
        self._count("checkpoint bytes stored", self.counters.stored_bytes)
        self._count("checkpoint bytes waiting", self._raw)
        _resolve_once(ticket.stored, "")
        if self._keep:
            order = {"do": "forget", "name": ticket.name, "keep": self._keep, "upto": ticket.turn}
            self._order_removal(order)

    def _on_failure(self, ticket: Ticket, stage: str, answer: dict[str, Any]) -> None:
        """Log that a capture could not be stored, or stop checkpointing if the folder accepts no
        more writes (`refused`)."""
        words = answer["error"]
        self.counters.failed += 1
        if not self.refused(words, shared=stage == "copy"):
            self.say(f"turn {ticket.turn} of sandbox {ticket.name} is not stored: {words}")
        self._drop(ticket, stage, self.stopped or words)

    def _drop(self, ticket: Ticket, stage: str, words: str) -> None:
        """Resolve the futures of a capture with the error `words`."""
        if stage == "save":
            self._raw -= ticket.raw
            self._remove(ticket.folder)
        _resolve_once(ticket.packed, words)
        _resolve_once(ticket.stored, words)

    def _remove(self, folder: Path) -> None:
        self._spawn(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    # ---------------------------------------------------------------------- tidying up

    def _order_removal(self, order: dict[str, Any]) -> None:
        self._tidy.append(order)
        if self._tidying is None or self._tidying.done():
            self._tidying = self._spawn(self._remove_old())

    async def _remove_old(self) -> None:
        """Send the orders for removals to the packer, each when no queued capture blocks it, or
        after `JOB_S`."""
        while self._tidy:
            order = self._tidy.pop(0)
            if order.get("unless_wanted") and await asyncio.to_thread(self._wanted, order["name"]):
                continue
            if blocking := self._blocking_tickets(order):
                await asyncio.wait([t.stored for t in blocking], timeout=JOB_S)
            self._log_error(await self._ask(order, JOB_S))
            if time.monotonic() > self._collected + COLLECT_S:
                self._collected = time.monotonic()
                self._log_error(await self._ask({"do": "collect", "name": ""}, JOB_S))

    def _blocking_tickets(self, order: dict[str, Any]) -> list[Ticket]:
        """Return the queued captures that must be stored before `order` removes turns of a name.
        These are the captures that refer to turns of that name and, if all its turns are to be
        removed, the captures of the name itself."""
        name, whole = order["name"], order["upto"] is None
        return [
            ticket
            for tickets in (*self._waiting.values(), *self._at_work.values())
            for ticket in tickets
            if (whole if ticket.name == name else name in (ticket.parent or ())[:1])
        ]

    def _log_error(self, answer: dict[str, Any] | None) -> None:
        if answer is not None and "error" in answer:
            self.say(f"old checkpoints of sandboxes stay: {answer['error']}")


def _resolve_once(future: asyncio.Future[str], words: str) -> None:
    if not future.done():
        future.set_result(words)
