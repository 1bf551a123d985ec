"""How a relay gets bytes over the slow link: each once, whoever asks, and several at a time.

Requests for the same chunk, listing or size share one *flight* to the upstream. A flight that fails
is tried again while somebody waits for it; who waits has a deadline of its own. A request's chunks
are fetched `AHEAD` at a time, and a file that is read from front to back is read ahead by a window
that doubles up to as many: the link's latency then costs no throughput, and a reader of a slice
pulls little that it did not ask for. The event loop's thread owns all of it; the upstream and the
disk are used in others, as both may block.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from rose.transfer.errors import TransferError
from rose.transfer.relay_cache import CHUNK, Cache, Chunk
from rose.transfer.source import Missing, Refused, Source, Stat

AHEAD = 8  # chunks: covers 80 ms of latency at 100 MB/s
# for listings, absent files and manifests: a new version is seen after this and the link's latency
TTL_S = 0.05
# for files that exist: they change only with their folder's manifest, after a run was resumed
STAT_S = 5.0
# a chunk is pulled anew at most this often: a reader's broken memory must not load the link
FRESH_S = 5.0
PULLS = 3 * AHEAD  # threads; at most one `AHEAD` of them reads ahead, so that who waits finds one
_STREAMS = 32  # readers that are followed in one file
_REMEMBERED = 10_000  # paths and refreshed chunks, each
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

T = TypeVar("T")


class Late(TransferError):
    """The client's deadline passed; the text says what for, and the upstream's last error."""


@dataclass
class Counters:
    upstream_bytes: int = 0  # of files
    served_bytes: int = 0
    hits: int = (
        0  # chunks that needed no pull of their own: on disk, or in flight for somebody else
    )
    pulls: int = 0
    upstream_errors: int = 0  # failed attempts
    cache_errors: int = 0  # chunks that the disk did not take
    refused: int = 0  # requests answered with 4xx
    failed: int = 0  # requests answered with 5xx, or broken off


@dataclass
class _Flight:
    waiting: int = 0
    why: str = "no answer yet"
    task: asyncio.Task = field(init=False)


class Puller:
    """Made and used inside a running event loop. Every `until` is of `time.monotonic`."""

    def __init__(self, upstream: Source, cache: Cache, counters: Counters):
        self.upstream, self.cache, self.counters = upstream, cache, counters
        self._flights: dict[Hashable, _Flight] = {}
        self._names: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._stats: OrderedDict[str, tuple[float, Stat | None]] = OrderedDict()
        self._refreshed: OrderedDict[Chunk, float] = OrderedDict()
        # path -> (end, window) of reads
        self._streams: OrderedDict[str, list[tuple[int, int]]] = OrderedDict()
        self._ahead = 0  # flights that nobody asked for
        self._keeping = cache.limit > 0  # the cache took the last chunk; a full disk takes none
        self._words = ThreadPoolExecutor(4, "words")  # listings and sizes don't queue behind bytes
        self._pulls = ThreadPoolExecutor(PULLS, "pull")
        self._disk = ThreadPoolExecutor(4, "disk")

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    async def names(self, path: str, until: float) -> list[str]:
        return await self._known(self._names, path, self.upstream.names, lambda found: TTL_S, until)

    async def stat(self, path: str, until: float, oldest_s: float = STAT_S) -> Stat | None:
        """`oldest_s`: seconds for which what is remembered is good enough."""
        manifest = path.rpartition("/")[2] == "manifest.json"
        _, before = self._stats.get(path, (0.0, None))
        found = await self._known(
            self._stats,
            path,
            self.upstream.stat,
            lambda found: min(oldest_s, TTL_S if manifest or found is None else STAT_S),
            until,
        )
        if manifest and found != before:  # then nothing that is remembered of its folder is sure
            folder = path.removesuffix("manifest.json")
            for other in [
                other for other in self._stats if other.startswith(folder) and other != path
            ]:
                del self._stats[other]
        return found

    async def hold(self, holder: str, edges: list[str], seconds: float, until: float) -> None:
        await self._share(
            ("hold", holder, tuple(edges), seconds),
            lambda: self._in(self._words, lambda: self.upstream.hold(holder, edges, seconds)),
            until,
        )

    async def read(
        self, path: str, stat: Stat, begin: int, end: int, fresh: bool, until: float
    ) -> AsyncGenerator[bytes, None]:
        """Bytes `begin` to `end` in order, at most a chunk at a time. `until` goes for each of
        them.

        Raises `Changed` if the upstream's file is not the one of `stat`, `Missing`, `Refused` or
        `Late`."""
        first, last = begin // CHUNK, (end - 1) // CHUNK
        # what comes before its turn would else be lost, and pulled again
        window = AHEAD if self._keeping else 1
        wanted = [Chunk(path, stat, index) for index in range(first, last + 1)]
        beyond = [
            Chunk(path, stat, last + 1 + step) for step in range(self._window(path, begin, end))
        ]
        wait_s = until - time.monotonic()
        for chunk in wanted[:window]:
            self.cache.pin(chunk)
        pinned = 0  # the first of `wanted` that is
        try:
            for at, chunk in enumerate(wanted):
                if not fresh:
                    for coming in wanted[at + 1 : at + window]:
                        self._start_pull(coming)
                if at == 0 and self._keeping:
                    self._read_ahead(beyond)
                start = chunk.index * CHUNK
                piece = max(begin - start, 0), min(end - start, chunk.length)
                yield await self._piece(chunk, *piece, fresh, time.monotonic() + wait_s)
                self.cache.unpin(chunk)
                pinned += 1
                if at + window < len(wanted):
                    self.cache.pin(wanted[at + window])
        finally:
            for chunk in wanted[pinned : pinned + window]:
                self.cache.unpin(chunk)

    def close(self) -> None:
        """No thread is waited for: a read of a dead mount may never return."""
        for flight in self._flights.values():
            flight.task.cancel()
        for pool in (self._words, self._pulls, self._disk):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _piece(self, chunk: Chunk, begin: int, end: int, fresh: bool, until: float) -> bytes:
        if chunk in self._flights:
            self.counters.hits += 1
        elif fresh and self._may_refresh(chunk):
            self.cache.drop(chunk)
            self._start(chunk, lambda: self._pull(chunk, fresh=True))
        elif chunk in self.cache:
            self.cache.used(chunk)
            data = await self._in(self._disk, lambda: self.cache.read(chunk, begin, end))
            if data is not None:
                self.counters.hits += 1
                return data
            self.cache.drop(chunk)
        return (await self._share(chunk, lambda: self._pull(chunk), until))[begin:end]

    def _may_refresh(self, chunk: Chunk) -> bool:
        now = time.monotonic()
        if now - self._refreshed.get(chunk, -FRESH_S) < FRESH_S:
            return False
        self._refreshed[chunk] = now
        _shorten(self._refreshed)
        return True

    def _start_pull(self, chunk: Chunk) -> bool:
        """False if it is here, or on its way."""
        if chunk in self.cache or chunk in self._flights:
            return False
        self._start(chunk, lambda: self._pull(chunk))
        return True

    def _window(self, path: str, begin: int, end: int) -> int:
        """Chunks to read ahead of a read of these bytes: none unless it goes on where another one
        ended."""
        streams = self._streams.setdefault(path, [])
        self._streams.move_to_end(path)
        _shorten(self._streams)
        follows = next(
            (stream for stream in streams if stream[0] <= begin <= stream[0] + CHUNK), None
        )
        window = 0
        if follows is not None:
            streams.remove(follows)
            window = min(max(2 * follows[1], 1), AHEAD)
        streams.append((end, window))
        del streams[:-_STREAMS]
        return window

    def _read_ahead(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk.length > 0 and self._ahead < AHEAD and self._start_pull(chunk):
                self._ahead += 1
                self._flights[chunk].task.add_done_callback(self._one_less_ahead)

    def _one_less_ahead(self, _) -> None:
        self._ahead -= 1

    async def _pull(self, chunk: Chunk, fresh: bool = False) -> bytes:
        """One attempt: from the upstream, and onto the disk if there is a cache."""
        self.counters.pulls += 1
        data, kept = await self._in(self._pulls, lambda: self._fetch(chunk, fresh))
        self.counters.upstream_bytes += len(data)
        self.counters.cache_errors += self.cache.limit > 0 and not kept
        self._keeping = kept
        if kept and (dropped := self.cache.add(chunk)):
            await self._in(self._disk, lambda: self.cache.erase(dropped))
        return data

    def _fetch(self, chunk: Chunk, fresh: bool) -> tuple[bytes, bool]:
        """In a thread: the bytes, and whether they are on the disk now."""
        data = self.upstream.read(
            chunk.path, chunk.index * CHUNK, chunk.length, fresh, chunk.stat.tag
        )
        if not self.cache.limit:
            return data, False
        try:
            self.cache.write(chunk, data)
        except OSError:  # a full disk makes a relay slow, not useless
            return data, False
        return data, True

    async def _known(
        self,
        table: OrderedDict[str, tuple[float, T]],
        path: str,
        ask: Callable[[str], T],
        ttl: Callable[[T], float],
        until: float,
    ) -> T:
        """What `table` remembers of `path`, or else the upstream's word, which it then remembers
        for `ttl` seconds."""
        if path in table:
            asked, found = table[path]
            if time.monotonic() - asked < ttl(found):
                return found

        async def attempt() -> T:
            asked = time.monotonic()
            found = await self._in(self._words, lambda: ask(path))
            table[path] = asked, found
            table.move_to_end(path)
            _shorten(table)
            return found

        return await self._share((ask.__name__, path), attempt, until)

    async def _share(self, key: Hashable, attempt: Callable[[], Awaitable[T]], until: float) -> T:
        """The result of the flight `key`, which `attempt` begins if there is none. Raises
        `Late`."""
        flight = self._flights.get(key) or self._start(key, attempt)
        began = time.monotonic()
        flight.waiting += 1
        try:
            done, _ = await asyncio.wait([flight.task], timeout=max(0.0, until - began))
        finally:
            flight.waiting -= 1
        if not done:
            raise Late(f"waited {until - began:.1f} s for the upstream: {flight.why}")
        return flight.task.result()

    def _start(self, key: Hashable, attempt: Callable[[], Awaitable[T]]) -> _Flight:
        flight = self._flights[key] = _Flight()
        flight.task = asyncio.create_task(self._fly(flight, attempt))
        flight.task.add_done_callback(lambda task: self._land(key, task))
        return flight

    async def _fly(self, flight: _Flight, attempt: Callable[[], Awaitable[T]]) -> T:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except (Missing, Refused):
                raise
            except TransferError as error:
                flight.why = str(error)
                self.counters.upstream_errors += 1
                if not flight.waiting:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _land(self, key: Hashable, task: asyncio.Task) -> None:
        del self._flights[key]
        if not task.cancelled():
            task.exception()  # seen: a flight that read ahead has nobody else to hear of it

    @staticmethod
    async def _in(pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call)


def _shorten(table: OrderedDict) -> None:
    while len(table) > _REMEMBERED:
        table.popitem(last=False)
