"""Serve a store's files over HTTP and cache them. A file doesn't change while its version exists.

`relay_client.py` describes the requests, `cache.py` the cache. Files are cut into chunks. Clients
that need the same chunk, listing or size at the same time share one *flight*, a request to the
upstream. Threads call the upstream, because it may block. Requests without the token are refused.
Nothing outside the store is named or read, and nothing is unpickled. No error of a client or of the
upstream ends the relay: the answer names the error, and clients retry after 503.
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

from rose.parts.relay.cache import CHUNK, Cache, Chunk
from rose.transfer.errors import Corrupted, TransferError
from rose.transfer.source import Changed, Missing, Refused, Source, Stat, checked

AHEAD = 8  # chunks of one request in flight, which covers 80 ms of latency at 100 MB/s
PULLS = 3 * AHEAD  # threads that read from the upstream
# Bounds the wait for the upstream before a client gets 503; less than the client's ATTEMPT_S.
WAIT_S = 8.0
# Seconds for which the size of a rank's file is remembered. A size changes only together with the
# manifest in its folder, after a run was resumed. Other files and listings are never remembered.
STAT_S = 5.0
# Least seconds between two refreshes of a chunk. They bound what a reader with bad memory costs.
FRESH_S = 5.0
STALLED_S = 60.0  # seconds without progress after which a client is disconnected
_REMEMBERED = 10_000  # most remembered sizes, and most remembered refreshes
_STOP_S = 0.5  # seconds in which answers in flight may end when the relay is stopped
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
# Final answers, which clients don't retry. 422: the upstream's disk can't read these bytes. 424 is
# "failed dependency": the upstream has refused.
_STATUS = {Missing: 404, Changed: 412, Corrupted: 422, Refused: 424}
# upstream_bytes counts bytes of files; hits: chunks read from the disk; cache_errors: chunks not
# written to the disk; refused: requests answered with 4xx; failed: answered with 5xx, or aborted.
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


class BadRequest(TransferError):
    """The request is malformed; the message says what is expected."""


class Relay:
    """Request handlers and the state they share. Construct it inside a running event loop."""

    def __init__(self, upstream: Source, cache: Cache, token: str):
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._upstream, self._cache, self._token = upstream, cache, f"Bearer {token}".encode()
        self._flights: dict[Hashable, asyncio.Task] = {}
        self._stats: dict[str, tuple[float, Stat | None]] = {}  # (monotonic time, answer) by path
        self._refreshed: dict[Chunk, float] = {}
        # A pool of its own, so that listings and sizes don't queue behind bytes of files.
        self._meta = ThreadPoolExecutor(4, "meta")
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
        app.on_response_prepare.append(self._mark_as_relay)
        return app

    def close(self) -> None:
        """Stop without waiting for threads, because a read of a dead mount may never return."""
        for pool in (self._meta, self._pulls, self._disk):
            pool.shutdown(wait=False, cancel_futures=True)

    async def names(self, path: str) -> list[str]:
        return await self._wait(
            self._share(("names", path), lambda: self._run(self._meta, self._upstream.names, path))
        )

    # ----------------------------------------------------------------- answers

    async def _mark_as_relay(self, _, response: web.StreamResponse) -> None:
        response.headers["X-Rose-Relay"] = "1"

    @web.middleware
    async def _answer(self, request: web.Request, handler) -> web.StreamResponse:
        """Check the token, call the handler, and turn errors into answers that name the cause."""
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
        except BadRequest as error:
            return self._refuse(400, str(error))
        except tuple(_STATUS) as error:
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
        return _json(await self._stat(_path(request), current=False))

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
        for current in (fresh, True):  # A second attempt, because a remembered size may be old.
            stat = await self._stat(path, current)
            if stat is None:
                raise Missing(f"{path}: no such file upstream")
            if wanted and wanted != stat.tag:
                changed = Changed(
                    f"{path}: rewritten since its size was read (tag {stat.tag}, not "
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
        """Send a file's bytes. Raises an error of the first piece. If a later piece fails, the
        header has been sent already, so the client's connection is aborted. The client then
        requests the remaining bytes, and gets the error as the answer."""
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
        waiting = deque(islice(flights, AHEAD))
        try:
            while waiting:
                data = await self._wait(waiting.popleft())
                waiting.extend(islice(flights, 1))
                if not response.prepared:
                    await response.prepare(request)
                first = at % CHUNK
                piece = data[first : first + end - at]
                async with asyncio.timeout(STALLED_S):
                    await response.write(piece)
                at += len(piece)
                self.counters["served_bytes"] += len(piece)
        except Exception as error:
            if not response.prepared:
                raise
            if not isinstance(error, (TransferError, ConnectionError, TimeoutError)):
                traceback.print_exc()
            self.counters["failed"] += 1
            if request.transport is not None:
                request.transport.abort()
        return response

    # ----------------------------------------------------------------- the upstream

    async def _stat(self, path: str, current: bool) -> Stat | None:
        """Return the size and tag of a file. Unless `current`, a remembered answer may be used for
        a rank's file."""
        asked, before = self._stats.get(path, (0.0, None))
        if not current and before and path.endswith(".h5") and time.monotonic() - asked < STAT_S:
            return before
        asked = time.monotonic()
        found = await self._wait(
            self._share(("stat", path), lambda: self._run(self._meta, self._upstream.stat, path))
        )
        # If a manifest has changed, remembered sizes in its folder may be those of older files.
        rewritten = path.endswith("manifest.json") and found != before
        if rewritten or len(self._stats) > _REMEMBERED:
            self._stats.clear()
        self._stats[path] = asked, found
        return found

    def _fetch(self, chunk: Chunk, fresh: bool) -> asyncio.Task:
        """Return the flight for a chunk: a refresh if `fresh` and one is due, else a read."""
        refresh = (chunk, "fresh")
        due = time.monotonic() - self._refreshed.get(chunk, -FRESH_S) >= FRESH_S
        # All clients share a refresh in flight: until it ends, the cached chunk may be damaged.
        if refresh in self._flights or (fresh and due):
            return self._share(refresh, lambda: self._refresh(chunk))
        return self._share(chunk, lambda: self._read(chunk))

    async def _refresh(self, chunk: Chunk) -> bytes:
        """Read a chunk from the upstream again, and cache it."""
        if (plain := self._flights.get(chunk)) is not None:
            await asyncio.wait([plain])  # Both would write the chunk's temporary file.
        data = await self._pull(chunk, True)
        if len(self._refreshed) > _REMEMBERED:
            self._refreshed.clear()
        self._refreshed[chunk] = time.monotonic()
        return data

    async def _read(self, chunk: Chunk) -> bytes:
        """Read a chunk from the cache or, if it isn't there, from the upstream."""
        data = await self._run(self._disk, self._cache.read, chunk)
        if data is None:
            return await self._pull(chunk, False)
        self.counters["hits"] += 1
        return data

    async def _pull(self, chunk: Chunk, fresh: bool) -> bytes:
        """Read a chunk from the upstream, and cache it."""
        self.counters["pulls"] += 1
        begin, tag = chunk.index * CHUNK, chunk.stat.tag
        data = await self._run(
            self._pulls, self._upstream.read, chunk.path, begin, chunk.length, fresh, tag
        )
        self.counters["upstream_bytes"] += len(data)
        try:
            await self._run(self._disk, self._cache.write, chunk, data)
        except OSError:  # With a full disk the relay still works, only slower.
            self.counters["cache_errors"] += 1
        return data

    def _share(self, key: Hashable, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Return the flight `key`; `call` begins it if needed. It goes on if its clients leave."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.ensure_future(call())
            flight.add_done_callback(lambda done: self._end_flight(key, done))
        return flight

    def _end_flight(self, key: Hashable, done: asyncio.Task) -> None:
        del self._flights[key]
        if not done.cancelled() and isinstance(done.exception(), TransferError):
            self.counters["upstream_errors"] += 1

    async def _wait(self, flight: asyncio.Task[T]) -> T:
        """Return a flight's result. Raises its error, or `TransferError` after `WAIT_S` seconds."""
        done, _ = await asyncio.wait([flight], timeout=WAIT_S)
        if not done:
            raise TransferError(f"waited {WAIT_S:g} s for the upstream {self._upstream}")
        return flight.result()

    @staticmethod
    async def _run(pool: ThreadPoolExecutor, call: Callable[..., T], *args) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)


def _json(value) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _path(request: web.Request, root_too: bool = False) -> str:
    try:
        return checked(request.match_info["path"], root_too)
    except Refused as error:
        raise BadRequest(str(error)) from None


def _range(request: web.Request, path: str, size: int) -> tuple[int, int]:
    """Return the first byte and the end of the requested range. Raises `BadRequest` if it is
    malformed or exceeds the file."""
    asked = request.headers.get("Range", "bytes=0-")
    match = _RANGE.fullmatch(asked)
    if match is None:
        raise BadRequest(f"Range {asked[:100]!r}: expected bytes=FIRST-LAST or bytes=FIRST-")
    begin, end = int(match[1]), int(match[2]) + 1 if match[2] else size
    if not begin <= end <= size:
        raise BadRequest(f"{path}: bytes {begin} to {end} were asked for, it has {size}")
    return begin, end


async def serve(
    upstream: Source, cache: Cache, token: str, host: str, port: int, report: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT. Calls `report` with the port once the relay listens; port 0
    chooses a free one. Raises `OSError` if it can't listen. When this returns, threads may still be
    blocked in a dead mount."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    relay = Relay(upstream, cache, token)
    runner = web.AppRunner(relay.app(), access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        report(runner.addresses[0][1])
        check = asyncio.create_task(_check_upstream(relay))
        await stop.wait()
        check.cancel()
    finally:
        await runner.cleanup()
        relay.close()
        upstream.close()
        cache.close()


async def _check_upstream(relay: Relay) -> None:
    """Print a warning at the start if the upstream can't be reached, without waiting for a client.
    It may become reachable later."""
    try:
        await relay.names("")
    except TransferError as error:
        print(f"rose relay: upstream: {error}", file=sys.stderr, flush=True)
