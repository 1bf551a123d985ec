"""Relays in threads, and links to them that count, fail and break."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from contextlib import suppress

import urllib3
from aiohttp import web

from rose.parts.relay.cache import CHUNK, Cache
from rose.parts.relay.server import Relay
from rose.transfer import TransferError
from rose.transfer.source import Folder, open_source

TOKEN = "0123456789abcdef" * 4


def metrics(url: str, token: str = TOKEN) -> dict[str, int]:
    """The counters of the relay at this address."""
    allowed = {"Authorization": f"Bearer {token}"}
    text = urllib3.request("GET", f"{url}/metrics", headers=allowed).data.decode()
    found = re.findall(r"^rose_relay_(\w+) (\d+)$", text, re.M)
    return {name: int(value) for name, value in found}


class Upstream(Folder):
    """A folder behind a link that counts, and that can be down. `during`: called in each read."""

    def __init__(self, root, during=lambda offset: None):
        super().__init__(root)
        self.reads: list[tuple[str, int]] = []  # (path, chunk)
        self.down, self.during = "", during

    def read(self, path, offset=0, *more):
        self.reads.append((path, offset // CHUNK))
        if self.down:
            raise TransferError(self.down)
        self.during(offset)
        return super().read(path, offset, *more)


class Running:
    """A relay in a thread, on a port of its own."""

    def __init__(self, upstream, cache, limit=1 << 30):
        self.upstream, self._cache = upstream, Cache(cache, limit)
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(120)

    def _run(self, ready):
        self._loop.run_until_complete(self._start())
        ready.set()
        self._loop.run_forever()

    async def _start(self):
        self.relay = Relay(self.upstream, self._cache, TOKEN)
        self._runner = web.AppRunner(self.relay.app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(120)
            self._loop.call_soon_threadsafe(self.relay.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(120)
            self._cache.close()

    def client(self, timeout_s=120.0):
        return open_source(self.url, TOKEN, timeout_s)

    def metrics(self) -> dict[str, int]:
        return metrics(self.url)


class Cutting:
    """A link that breaks each of the first `times` connections after `after` bytes of answers."""

    def __init__(self, port: int, after: int, times: int):
        self._port, self._after, self._times = port, after, times
        self.passed = 0  # bytes of answers
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self._listening.accept()
            self._times -= 1
            server = socket.create_connection(("127.0.0.1", self._port))
            left = self._after if self._times >= 0 else float("inf")
            for pair in ((client, server, float("inf"), False), (server, client, left, True)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source, sink, left, answers):
        try:
            while left > 0 and (data := source.recv(int(min(left, 65536)))):
                sink.sendall(data)
                left -= len(data)
                self.passed += answers * len(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
