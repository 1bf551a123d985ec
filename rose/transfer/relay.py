"""The relay: an HTTP cache of a store's files, which never change while their version lives.

What it answers is in `relay_client.py`, what it keeps in `relay_cache.py`. Files are cut into
chunks. Whoever asks for the same chunk, listing or size at the same time shares one *flight* to the
upstream, which is used in threads, as it may block. Nothing is answered without the token, nothing
outside of the store is named or read, nothing is unpickled, and no error of a client or of the
upstream ends the relay: 503 names the error, and clients ask again.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec
from aiohttp import web

from rose.transfer.errors import TransferError
from rose.transfer.relay_cache import CHUNK, Cache, Chunk
from rose.transfer.source import Changed, Missing, Refused, Source, Stat, checked

AHEAD = 8  # chunks of one request in flight: covers 80 ms of latency at 100 MB/s
PULLS = 3 * AHEAD  # threads that read from the upstream
WAIT_S = 8.0  # for the upstream, before a client gets 503; less than its ATTEMPT_S
# A rank's file changes only with its folder's manifest, after a run was resumed. Listings,
# manifests and absent files are always asked for.
STAT_S = 5.0
# a chunk is pulled anew at most this often: a reader's broken memory must not load the link
FRESH_S = 5.0
STALLED_S = 60.0  # a client that takes no byte for so long is cut off
_REMEMBERED = 10_000  # files, and chunks that were pulled anew
_STOP_S = 0.5  # for answers under way when the relay is stopped
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
# 424, failed dependency: the upstream's refusal is final
_STATUS = {Missing: 404, Changed: 412, Refused: 424}
# upstream_bytes: of files; hits: chunks that were on the disk; cache_errors: chunks that the disk
# did not take; refused: requests answered with 4xx; failed: with 5xx, or broken off
_COUNTERS = [
    "upstream_bytes",
    "served_bytes",
    "hits",
    "pulls",
    "upstream_errors",
    "cache_errors",
    "refused",
    "failed",
]

T = TypeVar("T")


class Bad(TransferError):
    """The request makes no sense; the text says what would."""


class Relay:
    """Handlers, and the state they share; made inside a running event loop."""

    def __init__(self, upstream: Source, cache: Cache, token: str):
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._upstream, self._cache, self._token = upstream, cache, f"Bearer {token}".encode()
        self._flights: dict[Hashable, asyncio.Task] = {}
        self._stats: dict[str, tuple[float, Stat | None]] = {}  # time.monotonic(), what was found
        self._refreshed: dict[Chunk, float] = {}
        self._words = ThreadPoolExecutor(4, "words")  # listings and sizes don't queue behind bytes
        self._pulls = ThreadPoolExecutor(PULLS, "pull")
        self._disk = ThreadPoolExecutor(4, "disk")

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._answer])
        app.add_routes(
            [
                web.get("/files/{path:.*}", self._answer_file),
                web.get("/stat/{path:.*}", self._answer_stat),
                web.get("/names/{path:.*}", self._answer_names),
                web.get("/metrics", self._answer_metrics),
            ]
        )
        app.on_response_prepare.append(self._sign)
        return app

    def close(self) -> None:
        """No thread is waited for: a read of a dead mount may never return."""
        for pool in (self._words, self._pulls, self._disk):
            pool.shutdown(wait=False, cancel_futures=True)

    async def names(self, path: str) -> list[str]:
        return await self._landed(
            self._fly(("names", path), lambda: self._in(self._words, self._upstream.names, path))
        )

    # ----------------------------------------------------------------- answers

    async def _sign(self, _, response: web.StreamResponse) -> None:
        response.headers["X-Rose-Relay"] = "1"

    @web.middleware
    async def _answer(self, request: web.Request, handler) -> web.StreamResponse:
        """Token first; errors become an answer whose text is the cause."""
        shown = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(shown, self._token):
            return self._refuse(
                401,
                "wrong token: it must be the content of this relay's token file"
                if shown
                else "no token: it belongs into the header `Authorization: Bearer TOKEN`",
            )
        try:
            return await handler(request)
        except Bad as error:
            return self._refuse(400, str(error))
        except (Missing, Refused) as error:
            return self._refuse(_STATUS[type(error)], str(error))
        except TransferError as error:
            return self._refuse(503, str(error))
        except web.HTTPException as error:
            return self._refuse(error.status, error.reason)
        except Exception as error:
            traceback.print_exc()
            return self._refuse(500, f"{type(error).__name__}: {error}")

    def _refuse(self, status: int, text: str) -> web.Response:
        self.counters["refused" if status < 500 else "failed"] += 1
        return web.Response(status=status, text=text)

    async def _answer_names(self, request: web.Request) -> web.Response:
        return _json(await self.names(_path(request, root_too=True)))

    async def _answer_stat(self, request: web.Request) -> web.Response:
        return _json(await self._stat(_path(request), now=False))

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        values = {f"{name}_total": value for name, value in self.counters.items()}
        values |= {"in_flight": len(self._flights), "cache_bytes": self._cache.bytes}
        text = "".join(
            f"# TYPE rose_relay_{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
            f"rose_relay_{name} {value}\n"
            for name, value in values.items()
        )
        return web.Response(
            text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _answer_file(self, request: web.Request) -> web.StreamResponse:
        path = _path(request)
        fresh = request.headers.get("Cache-Control") == "no-cache"
        wanted = request.headers.get("If-Match", "").strip('"')
        for now in (fresh, True):  # what is remembered of it may be old
            stat = await self._stat(path, now)
            if stat is None:
                raise Missing(f"{path}: no such file upstream")
            if wanted and wanted != stat.tag:
                changed = Changed(
                    f"{path}: written anew since it was looked at (tag {stat.tag}, not "
                    f"{wanted[:100]})"
                )
                continue
            try:
                return await self._send(request, path, stat, fresh)
            except Changed as error:
                changed = error
        raise changed

    async def _send(
        self, request: web.Request, path: str, stat: Stat, fresh: bool
    ) -> web.StreamResponse:
        """Raises what keeps the first piece from coming; after that the header is out, and the
        client only sees a broken connection: it asks for the rest, and the answer to that names the
        error."""
        at, end = _range(request, path, stat.size)
        headers = {"ETag": f'"{stat.tag}"'}
        if at == end:
            return web.Response(body=b"", headers=headers)
        headers["Content-Range"] = f"bytes {at}-{end - 1}/{stat.size}"
        response = web.StreamResponse(status=206, headers=headers)
        response.content_type, response.content_length = "application/octet-stream", end - at
        flights = (
            self._fetch(Chunk(path, stat, index), fresh)
            for index in range(at // CHUNK, (end - 1) // CHUNK + 1)
        )
        coming = deque(islice(flights, AHEAD))
        try:
            while coming:
                data = await self._landed(coming.popleft())
                coming.extend(islice(flights, 1))
                if not response.prepared:
                    await response.prepare(request)
                first = at % CHUNK
                piece = data[first : first + end - at]
                async with asyncio.timeout(STALLED_S):
                    await response.write(piece)
                at += len(piece)
                self.counters["served_bytes"] += len(piece)
        except (TransferError, ConnectionError, TimeoutError):
            if not response.prepared:
                raise
            self.counters["failed"] += 1
            if request.transport is not None:
                request.transport.abort()
        return response

    # ----------------------------------------------------------------- the upstream

    async def _stat(self, path: str, now: bool) -> Stat | None:
        """What is remembered is good enough for a rank's file, unless it is wanted as it is
        `now`."""
        asked, before = self._stats.get(path, (0.0, None))
        if not now and before and path.endswith(".h5") and time.monotonic() - asked < STAT_S:
            return before
        asked = time.monotonic()
        found = await self._landed(
            self._fly(("stat", path), lambda: self._in(self._words, self._upstream.stat, path))
        )
        # then what is remembered of the manifest's folder may be another version's
        rewritten = path.endswith("manifest.json") and found != before
        if rewritten or len(self._stats) > _REMEMBERED:
            self._stats.clear()
        self._stats[path] = asked, found
        return found

    def _fetch(self, chunk: Chunk, fresh: bool) -> asyncio.Task:
        anew = (chunk, "fresh")
        due = time.monotonic() - self._refreshed.get(chunk, -FRESH_S) >= FRESH_S
        # one under way is for all: what is on the disk is taken for damaged until it has ended
        if anew in self._flights or (fresh and due):
            return self._fly(anew, lambda: self._pull_anew(chunk))
        return self._fly(chunk, lambda: self._read(chunk))

    async def _pull_anew(self, chunk: Chunk) -> bytes:
        if (plain := self._flights.get(chunk)) is not None:
            await asyncio.wait([plain])  # both would write the chunk's temporary file
        data = await self._pull(chunk, True)
        if len(self._refreshed) > _REMEMBERED:
            self._refreshed.clear()
        self._refreshed[chunk] = time.monotonic()
        return data

    async def _read(self, chunk: Chunk) -> bytes:
        data = await self._in(self._disk, self._cache.read, chunk)
        if data is None:
            return await self._pull(chunk, False)
        self.counters["hits"] += 1
        return data

    async def _pull(self, chunk: Chunk, fresh: bool) -> bytes:
        self.counters["pulls"] += 1
        begin, tag = chunk.index * CHUNK, chunk.stat.tag
        data = await self._in(
            self._pulls, self._upstream.read, chunk.path, begin, chunk.length, fresh, tag
        )
        self.counters["upstream_bytes"] += len(data)
        try:
            await self._in(self._disk, self._cache.write, chunk, data)
        except OSError:  # a full disk makes a relay slow, not useless
            self.counters["cache_errors"] += 1
        return data

    def _fly(self, key: Hashable, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """The flight `key`, which `call` begins if there is none. It outlives its clients."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.ensure_future(call())
            flight.add_done_callback(lambda done: self._end(key, done))
        return flight

    def _end(self, key: Hashable, done: asyncio.Task) -> None:
        del self._flights[key]
        if not done.cancelled() and isinstance(done.exception(), TransferError):
            self.counters["upstream_errors"] += 1

    async def _landed(self, flight: asyncio.Task[T]) -> T:
        """Raises what the upstream raised, and `TransferError` after `WAIT_S`."""
        done, _ = await asyncio.wait([flight], timeout=WAIT_S)
        if not done:
            raise TransferError(f"waited {WAIT_S:g} s for the upstream {self._upstream}")
        return flight.result()

    @staticmethod
    async def _in(pool: ThreadPoolExecutor, call: Callable[..., T], *args) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)


def _json(value) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _path(request: web.Request, root_too: bool = False) -> str:
    try:
        return checked(request.match_info["path"], root_too)
    except Refused as error:
        raise Bad(str(error)) from None


def _range(request: web.Request, path: str, size: int) -> tuple[int, int]:
    """First byte and the one after the last. Raises `Bad` if the file has not all of them."""
    asked = request.headers.get("Range", "bytes=0-")
    match = _RANGE.fullmatch(asked)
    if match is None:
        raise Bad(f"Range {asked[:100]!r}: expected bytes=FIRST-LAST or bytes=FIRST-")
    begin, end = int(match[1]), int(match[2]) + 1 if match[2] else size
    if not begin <= end <= size:
        raise Bad(f"{path}: bytes {begin} to {end} were asked for, it has {size}")
    return begin, end


async def serve(
    upstream: Source, cache: Cache, token: str, host: str, port: int, listens: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `listens` is called with the port when the relay listens (0
    finds one).

    Raises OSError if it can't listen there. Threads may still be blocked in a dead mount when this
    returns."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    relay = Relay(upstream, cache, token)
    runner = web.AppRunner(relay.app(), access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        listens(runner.addresses[0][1])
        looking = asyncio.create_task(_look(relay))
        await stop.wait()
        looking.cancel()
    finally:
        await runner.cleanup()
        relay.close()
        upstream.close()
        cache.close()


async def _look(relay: Relay) -> None:
    """Say at the start, not to the first client, that the upstream can't be reached; it may come
    later."""
    try:
        await relay.names("")
    except TransferError as error:
        print(f"rose.relay: upstream: {error}", file=sys.stderr, flush=True)
