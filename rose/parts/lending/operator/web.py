"""The operator's HTTP server, at serving.online.host and serving.lending.control_port.

    GET  /metrics         Prometheus text of the boards
    GET  /report          the page: what serving attained, what was lent
    GET  /lending         JSON: whether anything is lent now, and why not
    POST /lending/stop    stop at once; POST /lending/start revokes the stop

POST requests need the header `Authorization: Bearer TOKEN`. The token is in the file `token` beside
the report (mode 0600), where an operator on another machine can read it. The node's shared memory,
which has the boards, can't be seen from there. GET requests need no token: the online server's own
/metrics shows the same numbers to anybody.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rose import processes
from rose.config import ConfigError
from rose.files import write_whole
from rose.parts.lending.config import Serving
from rose.parts.lending.operator.control import ControlBoard
from rose.parts.lending.operator.metrics import BoardCollector

TOKEN = "token"
STOP_S = 0.5  # seconds for responses in progress when the server closes
MAX_BODY = 4096  # most bytes of a request's body


def make_token(path: Path) -> str:
    """Create a token, and write it to the file `path`, which only this user can read."""
    token = secrets.token_hex(32)
    write_whole(path, f"{token}\n".encode(), private=True)
    return token


class Web:
    """The HTTP server. `folder` has the boards; `home` has the token while the server is open.
    `report` creates the page, `status` the response of GET /lending."""

    def __init__(
        self,
        folder: Path,
        home: Path,
        serving: Serving,
        control: ControlBoard,
        report: Callable[[], Awaitable[str]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._serving, self._control, self._report, self._status = serving, control, report, status
        self.token_file = home / TOKEN
        self._expected = f"Bearer {make_token(self.token_file)}".encode()
        self._registry = CollectorRegistry()
        self._registry.register(BoardCollector(folder, serving.online.slo))
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def open(self) -> None:
        """Start to serve. Raises `ConfigError` when the address can't be bound."""
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/report", self._page),
                web.get("/lending", self._lending),
                web.post("/lending/{action:stop|start}", self._change),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        host, port = self._serving.online.host, self._serving.lending.control_port
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"serving.lending.control_port={port}: {error.strerror or error} on "
                f"serving.online.host={host}; another one, or 0 for a free one"
            ) from None
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        remove = functools.partial(self.token_file.unlink, missing_ok=True)
        with suppress(OSError):  # The mount may be read-only, or not answer (TimeoutError).
            async with asyncio.timeout(STOP_S):
                await processes.in_daemon(remove)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=await self._report(), content_type="text/html")

    async def _lending(self, _: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _change(self, request: web.Request) -> web.Response:
        """Stop or start lending, if the request has the token."""
        shown = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(shown, self._expected):
            return web.Response(
                status=401,
                text="wrong token: it must be the content of this server's token file\n"
                if shown
                else "no token: it belongs into the header `Authorization: Bearer TOKEN`\n",
            )
        source = f"HTTP from {request.remote}"
        (self._control.stop if request.match_info["action"] == "stop" else self._control.start)(
            source
        )
        return web.json_response(self._status())
