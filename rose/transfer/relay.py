"""Serve a store's files over HTTP and cache them. They never change while their version lives.

`relay_client.py` describes the requests, `relay_cache.py` the cache. All clients that need a file
share one *flight*, which fetches the whole of it into the cache. Threads call the upstream, because
it may block. Requests without the token are refused. Nothing outside the store is named or read,
and nothing is unpickled. No error of a client or of the upstream ends the relay: the answer 503
names the error, and clients retry.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from rose.transfer.errors import TransferError
from rose.transfer.relay_cache import Cache
from rose.transfer.source import Changed, Folder, Missing, Refused, Source, Stat, checked

# Bytes of a request to the upstream, and such requests in flight of one file. Together they keep a
# link with 100 MB/s and 80 ms of latency busy for 90 % of the time.
PIECE = 8 << 20
AHEAD = 8
FILES = 4  # files in flight
THREADS = 32  # threads for all other calls
# Bounds the wait for the upstream before a client gets 503; less than the client's ATTEMPT_S.
WAIT_S = 8.0
# Least seconds between two fetches of a file: a reader with bad memory must not load the link.
FRESH_S = 5.0
_STOP_S = 0.5  # seconds in which answers in flight may end when the relay is stopped
# upstream_bytes counts bytes of files; hits: requests answered from the disk at once; refused:
# requests answered with 4xx; failed: with 5xx.
_COUNTERS = ["upstream_bytes", "served_bytes", "hits", "upstream_errors", "refused", "failed"]

T = TypeVar("T")


class BadRequest(TransferError):
    """The request is malformed; the message says what is expected."""


# 424 is "failed dependency": the upstream's refusal is final.
_STATUS = {BadRequest: 400, Missing: 404, Changed: 412, Refused: 424}


class Fetching(TransferError):
    """A file is being fetched, of which `fetched` bytes have arrived."""

    def __init__(self, fetched: int, size: int):
        super().__init__(f"waited {WAIT_S:g} s; {fetched} of {size} bytes are fetched")
        self.fetched = fetched


class Relay:
    """Request handlers and the state they share. Construct it inside a running event loop."""

    def __init__(self, upstream: Source, cache: Cache, token: str):
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._upstream, self._cache, self._token = upstream, cache, f"Bearer {token}".encode()
        self._flights: dict[Path, asyncio.Future[None]] = {}  # file in the cache -> its download
        self._fetched: dict[Path, int] = {}  # bytes of each flight that have arrived
        self._threads = ThreadPoolExecutor(THREADS)
        self._fetches = ThreadPoolExecutor(FILES)

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
        """Wait for no thread, because a read of a dead mount may never return."""
        for pool in (self._threads, self._fetches):
            pool.shutdown(wait=False, cancel_futures=True)

    async def names(self, path: str) -> list[str]:
        return await self._run(self._upstream.names, path)

    # ----------------------------------------------------------------- answers

    async def _sign(self, _, response: web.StreamResponse) -> None:
        response.headers["X-Rose-Relay"] = "1"
        if response.status == 404 and "X-Rose-Tag" in response.headers:
            response.set_status(503)  # The cache has evicted the file before it was opened.

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
        except (BadRequest, Missing, Refused) as error:
            return self._refuse(_STATUS[type(error)], str(error))
        except TransferError as error:
            answer = self._refuse(503, str(error))
            answer.headers["X-Rose-Fetched"] = str(getattr(error, "fetched", 0))
            return answer
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
        return _json(await self._run(self._upstream.stat, _path(request)))

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
        stat = await self._run(self._upstream.stat, path)
        if stat is None:
            raise Missing(f"{path}: no such file upstream")
        if request.headers.get("X-Rose-Tag") not in (None, stat.tag):
            raise Changed(f"{path}: rewritten since its size was read (tag {stat.tag})")
        served = _bytes_in(request, path, stat.size)
        file = await self._file(path, stat, fresh)
        self.counters["served_bytes"] += served
        headers = {"X-Rose-Tag": stat.tag}
        return web.FileResponse(file, headers=headers) if served else web.Response(headers=headers)

    # ----------------------------------------------------------------- the upstream

    async def _file(self, path: str, stat: Stat, fresh: bool) -> Path:
        """Return the file to send. All clients share one flight that fetches it, and that outlives
        them. Raises `Fetching` after `WAIT_S` seconds."""
        if not self._cache.limit and isinstance(self._upstream, Folder):
            return self._upstream.place(path, fresh)
        file = self._cache.path(path, stat)
        flight = self._flights.get(file)
        if flight is None:
            if _whole(file, stat.size, fresh):
                self.counters["hits"] += 1
                return file
            self._fetched[file] = 0
            loop = asyncio.get_running_loop()
            flight = loop.run_in_executor(self._fetches, self._fetch, path, stat, file, fresh)
            self._flights[file] = flight
            flight.add_done_callback(lambda done: self._end(file, done))
        await asyncio.wait([flight], timeout=WAIT_S)
        if not flight.done():
            raise Fetching(self._fetched[file], stat.size)
        flight.result()
        return file

    def _fetch(self, path: str, stat: Stat, file: Path, fresh: bool) -> None:
        """Fetch a file into the cache, behind those of its bytes that are there already."""
        if stat.size > self._cache.limit:
            raise Refused(f"{path}: its {stat.size} bytes don't fit into the relay's --cache-gib")
        self._cache.make_room(file, stat.size)
        part = Path(f"{file}.part")

        def piece(at: int) -> bytes:
            length = min(PIECE, stat.size - at)
            return self._upstream.read(path, at, length, fresh and at == 0, stat.tag)

        try:
            with part.open("ab") as written, ThreadPoolExecutor(AHEAD) as pool:
                begin = written.tell()
                if shutil.disk_usage(part).free < stat.size - begin:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                for at in range(begin, stat.size, AHEAD * PIECE):
                    ahead = range(at, min(at + AHEAD * PIECE, stat.size), PIECE)
                    for data in pool.map(piece, ahead):
                        self._fetched[file] += written.write(data)
            part.rename(file)
        except OSError as error:
            raise TransferError(
                f"the relay's cache {self._cache.folder}: {error.strerror}"
            ) from error

    def _end(self, file: Path, done: asyncio.Future) -> None:
        del self._flights[file]
        self.counters["upstream_bytes"] += self._fetched.pop(file)
        self._note(done)

    def _note(self, done: asyncio.Future) -> None:
        if not done.cancelled() and isinstance(done.exception(), TransferError):
            self.counters["upstream_errors"] += 1

    async def _run(self, call: Callable[..., T], *args) -> T:
        """Return what a call in a thread returns. Raises its error, or `TransferError` after
        `WAIT_S` seconds."""
        flight = asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        flight.add_done_callback(self._note)
        await asyncio.wait([flight], timeout=WAIT_S)
        if not flight.done():
            raise TransferError(f"waited {WAIT_S:g} s for the upstream {self._upstream}")
        return flight.result()


def _whole(file: Path, size: int, fresh: bool) -> bool:
    """True if the cache has all of a file. `fresh`: and if that is no older than `FRESH_S`."""
    try:
        status = file.stat()
    except OSError:
        return False
    return status.st_size == size and not (fresh and time.time() - status.st_mtime > FRESH_S)


def _json(value) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _path(request: web.Request, root_too: bool = False) -> str:
    try:
        return checked(request.match_info["path"], root_too)
    except Refused as error:
        raise BadRequest(str(error)) from None


def _bytes_in(request: web.Request, path: str, size: int) -> int:
    """Return how many bytes a request's range has. Raises `BadRequest` if the file lacks them."""
    try:
        asked = request.http_range
    except ValueError:
        raise BadRequest(
            f"Range {request.headers['Range'][:100]!r}: expected bytes=FIRST-LAST"
        ) from None
    begin, end = asked.start or 0, size if asked.stop is None else asked.stop
    if not 0 <= begin <= end <= size:
        raise BadRequest(f"{path}: bytes {begin} to {end} were asked for, it has {size}")
    return end - begin


async def serve(
    upstream: Source, cache: Cache, token: str, host: str, port: int, listens: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `listens` is called with the port once the relay listens; port
    0 chooses a free one. Raises `OSError` if it can't listen. When this returns, threads may still
    be blocked in a dead mount."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    relay = Relay(upstream, cache, token)
    runner = web.AppRunner(relay.app(), access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        listens(runner.addresses[0][1])
        check = asyncio.create_task(_check_upstream(relay))
        await stop.wait()
        check.cancel()
    finally:
        await runner.cleanup()
        relay.close()
        upstream.close()
        cache.close()


async def _check_upstream(relay: Relay) -> None:
    """Print at the start if the upstream can't be reached, before any client asks. It may become
    reachable later."""
    try:
        await relay.names("")
    except TransferError as error:
        print(f"rose.relay: upstream: {error}", file=sys.stderr, flush=True)
