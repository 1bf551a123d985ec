"""The relay: a small HTTP server that pulls each byte of a store once and serves it to its peers.

What it answers is in `relay_client.py`, how it pulls in `relay_pull.py`, what it keeps in
`relay_cache.py`. Nothing is answered without the token, nothing outside of the store is named or
read, nothing is unpickled, and no error of a client or of the upstream ends it.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict

import msgspec
from aiohttp import web

from rose.transfer.errors import TransferError
from rose.transfer.relay_cache import Cache
from rose.transfer.relay_pull import STAT_S, TTL_S, Counters, Late, Puller
from rose.transfer.source import (
    Changed,
    Folder,
    Missing,
    Refused,
    Source,
    Stat,
    checked,
    held_until,
)

WAIT_S = 30.0  # of a client that doesn't say how long it waits
LONGEST_WAIT_S = 60.0
STALLED_S = 60.0  # a client that takes no byte for so long is cut off
MAX_BODY = 1 << 20  # bytes of a request: leases of some thousand folders
_STOP_S = 0.5  # for answers under way when the relay is told to stop
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
# 424, failed dependency: the upstream's refusal is final
_STATUS = {Missing: 404, Changed: 412, Refused: 424}


class _Lease(msgspec.Struct):
    edges: list[str]
    seconds: float


class Bad(TransferError):
    """The request makes no sense; the text says what would."""


class Relay:
    """Handlers, and the state they share; made inside a running event loop. `holder`: name of its
    leases upstream."""

    def __init__(self, upstream: Source, cache: Cache, token: str, holder: str):
        self.counters = Counters()
        self.puller = Puller(upstream, cache, self.counters)
        self._cache, self._token, self._holder = cache, f"Bearer {token}".encode(), holder
        # its clients', so that a restarted relay still knows them
        self._leases = Folder(cache.folder)
        self._leasing = asyncio.Lock()
        # what the upstream was told last, unix seconds
        self._held: tuple[set[str], float] = (set(), 0.0)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._answer], client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.get("/files/{path:.*}", self._files),
                web.get("/stat/{path:.*}", self._stat),
                web.get("/names/{path:.*}", self._names),
                web.put("/leases/{holder}", self._lease),
                web.get("/metrics", self._metrics),
            ]
        )
        app.on_response_prepare.append(self._sign)
        return app

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
        if status < 500:
            self.counters.refused += 1
        else:
            self.counters.failed += 1
        return web.Response(status=status, text=text)

    async def _names(self, request: web.Request) -> web.Response:
        return _json(await self.puller.names(_path(request, root_too=True), _until(request)))

    async def _stat(self, request: web.Request) -> web.Response:
        return _json(await self.puller.stat(_path(request), _until(request)))

    async def _files(self, request: web.Request) -> web.StreamResponse:
        path, until = _path(request), _until(request)
        fresh = "X-Rose-Fresh" in request.headers
        wanted = request.headers.get("If-Match", "").strip('"')
        stat = await self._found(path, until, TTL_S if fresh else STAT_S)
        if wanted and wanted != stat.tag:
            stat = await self._found(path, until, 0.0)
            if wanted != stat.tag:
                raise Changed(
                    f"{path}: written anew since it was looked at (tag {stat.tag}, not {wanted[:100]})"
                )
        try:
            return await self._send(request, path, stat, fresh, until)
        except (
            Changed
        ):  # what was remembered of it is wrong; once, as the upstream's own memory is short
            if wanted:
                raise
            return await self._send(
                request, path, await self._found(path, until, 0.0), fresh, until
            )

    async def _send(
        self, request: web.Request, path: str, stat: Stat, fresh: bool, until: float
    ) -> web.StreamResponse:
        """Raises what keeps the first piece from coming; after that the header is out, and the
        client only sees a broken connection: it asks for the rest, and hears why not."""
        begin, end = _range(request, path, stat.size)
        headers = {"ETag": f'"{stat.tag}"'}
        if begin == end:
            return web.Response(body=b"", headers=headers)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{stat.size}"
        async with aclosing(self.puller.read(path, stat, begin, end, fresh, until)) as pieces:
            piece = await anext(pieces)
            response = web.StreamResponse(status=206, headers=headers)
            response.content_type, response.content_length = "application/octet-stream", end - begin
            try:
                await response.prepare(request)
                while piece:
                    async with asyncio.timeout(STALLED_S):
                        await response.write(piece)
                    self.counters.served_bytes += len(piece)
                    piece = await anext(pieces, b"")
            except (TransferError, ConnectionError, TimeoutError):
                self.counters.failed += 1
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _found(self, path: str, until: float, oldest_s: float) -> Stat:
        stat = await self.puller.stat(path, until, oldest_s)
        if stat is None:
            raise Missing(f"{path}: no such file upstream")
        return stat

    async def _lease(self, request: web.Request) -> web.Response:
        try:
            lease = msgspec.json.decode(await request.read(), type=_Lease)
        except msgspec.DecodeError as error:
            raise Bad(f'lease: expected {{"edges": [...], "seconds": s}}: {error}') from None
        try:
            self._leases.hold(request.match_info["holder"], lease.edges, lease.seconds)
        except Refused as error:
            raise Bad(str(error)) from None
        until = _until(request)
        try:
            async with asyncio.timeout(until - time.monotonic()), self._leasing:
                await self._pass_on(until)
        except TimeoutError:
            raise Late("waited for the leases of other clients to reach the upstream") from None
        return _json({})

    async def _pass_on(self, until: float) -> None:
        """All clients' leases as one of the relay's own, unless the upstream knows them already."""
        now = time.time()
        held = held_until(self._cache.folder, now)
        edges, last = set(held), max(held.values(), default=now)
        if edges != self._held[0] or last > self._held[1]:
            await self.puller.hold(self._holder, sorted(edges), last - now, until)
            self._held = edges, last

    async def _metrics(self, request: web.Request) -> web.Response:
        values = {f"{name}_total": value for name, value in asdict(self.counters).items()}
        values |= {"in_flight": self.puller.in_flight, "cache_bytes": self._cache.bytes}
        text = "".join(
            f"# TYPE rose_relay_{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
            f"rose_relay_{name} {value}\n"
            for name, value in values.items()
        )
        return web.Response(
            text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


def _json(value) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _path(request: web.Request, root_too: bool = False) -> str:
    try:
        return checked(request.match_info["path"], root_too)
    except Refused as error:
        raise Bad(str(error)) from None


def _until(request: web.Request) -> float:
    try:
        wait_s = float(request.headers.get("X-Rose-Wait", WAIT_S))
    except ValueError:
        raise Bad("X-Rose-Wait: expected seconds") from None
    return time.monotonic() + (
        min(max(wait_s, 0.05), LONGEST_WAIT_S) if wait_s == wait_s else WAIT_S
    )


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
    upstream: Source,
    cache: Cache,
    token: str,
    holder: str,
    host: str,
    port: int,
    said: Callable[[int], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `said` is called with the port when the relay listens (0 finds
    one).

    Raises OSError if it can't listen there. Threads may still be blocked in a dead mount when this
    returns."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    relay = Relay(upstream, cache, token, holder)
    runner = web.AppRunner(relay.app(), access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        said(runner.addresses[0][1])
        looking = asyncio.create_task(_look(relay.puller))
        await stop.wait()
        looking.cancel()
    finally:
        await runner.cleanup()
        relay.puller.close()
        upstream.close()
        cache.close()


async def _look(puller: Puller) -> None:
    """Say at the start, not to the first client, that the upstream can't be reached; it may come
    later."""
    try:
        await puller.names("", time.monotonic() + WAIT_S)
    except TransferError as error:
        print(f"rose.relay: upstream: {error}", file=sys.stderr, flush=True)
