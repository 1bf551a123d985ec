"""The online server's part of one engine for both sides: vLLM's endpoint plugin "rose", in its HTTP server's process.

Its routes (rose/serving/turns.py) let the lender of this device run turns on the server's own engine. They are there
only where ROSE_COSERVING names a device whose serving.lending.same_weights is true, and answer only to who shows the
token. Online requests are served by vLLM's own routes; what reaches them from here are the weights.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from rose.coserving import device
from rose.engine.shared_engine import SharedEngine
from rose.engine.vllm_engine import Chunk
from rose.serving import turns
from rose.serving.turns import Abort, Failure, Load, State, Turn

FLUSH_S = 0.05  # between two frames of a turn: each costs the process that serves online requests some work
MEDIA = "application/msgpack"
ANYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}

Body = TypeVar("Body", Turn, Abort, Load)


class SharedEndpoint:
    """As vLLM's `EndpointPlugin` wants it."""

    name = "rose"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        found = device.here()
        self._device = found if found is not None and found.serving.lending.same_weights else None

    def attach_router(self, app: FastAPI) -> None:
        if self._device is None:
            return
        for method, path, answer in (("POST", turns.TURNS, self._turn), ("POST", turns.ABORT, self._abort),
                                     ("POST", turns.LOAD, self._load), ("POST", turns.ANEW, self._begin_anew),
                                     ("GET", turns.STATE, self._state)):
            app.add_api_route(path, self._guarded(answer), methods=[method], include_in_schema=False)

    async def init_state(self, engine_client, state, args: Namespace) -> None:
        """Raises `ValueError` for a server whose engine can't be shared."""
        if self._device is None:
            return
        for option, works in (("api_server_count", (None, 1)), ("data_parallel_size", (1,)), ("ssl_keyfile", (None,))):
            if (value := getattr(args, option, None)) not in works:
                raise ValueError(f"serving.online.engine_args.{option}={value!r}: serving.lending.same_weights=true "
                                 f"takes {works[-1]!r}")
        self._engine = await SharedEngine.around(engine_client)
        host = ANYWHERE.get(args.host or "", args.host)
        self._address = turns.publish(self._device.folder, f"http://{f'[{host}]' if ':' in host else host}:{args.port}")

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]):
        async def guarded(request: Request) -> Response:
            if not self._address.shown(request.headers.get("authorization")):
                return _say(Failure("request", f"wrong token: it must be that of {turns.FILE} beside the boards"), 401)
            try:
                return await answer(request)
            except msgspec.MsgspecError as error:
                return _say(Failure("request", f"{request.url.path}: {error}; is the lender of another version?"), 400)
            except Exception as error:  # whatever vLLM raised: the lender decides what becomes of it
                return _say(turns.failure(error), 500)

        return guarded

    async def _turn(self, request: Request) -> Response:
        return StreamingResponse(self._frames(await _body(request, Turn)), media_type=MEDIA)

    async def _frames(self, turn: Turn) -> AsyncIterator[bytes]:
        """Ended by a client that hangs up: then the turn ends too."""
        kept, told = None, 0.0
        try:
            async with aclosing(self._engine.generate(turn.id, turn.tokens, turn.sampling)) as chunks:
                async for chunk in chunks:
                    if kept is not None and kept.version != chunk.version:
                        yield turns.frame(kept)
                        kept = None
                    kept = chunk if kept is None else together(kept, chunk)
                    now = time.monotonic()
                    if kept.finish is not None or now - told >= FLUSH_S:
                        yield turns.frame(kept)
                        kept, told = None, now
        except Exception as error:  # the status has long been sent
            if kept is not None:
                yield turns.frame(kept)
            yield turns.frame(turns.failure(error))

    async def _abort(self, request: Request) -> Response:
        await self._engine.abort((await _body(request, Abort)).id)
        return _say(None)

    async def _load(self, request: Request) -> Response:
        load = await _body(request, Load)
        self._engine.turn_timeout_s = load.turn_timeout_s
        return _say(await self._engine.load_version(load.version, load.store, load.transfer, load.mirror))

    async def _begin_anew(self, request: Request) -> Response:
        await self._engine.begin_anew()
        return await self._state(request)

    async def _state(self, _: Request) -> Response:
        engine, config = self._engine, self._engine.config
        return _say(State(os.getpid(), engine.pid, config.model_config.model,
                          str(config.model_config.dtype).removeprefix("torch."), config.model_config.max_model_len,
                          config.scheduler_config.max_num_seqs, engine.kv_tokens, engine.hardware, engine.version,
                          engine.open, engine.stats()))


def together(a: Chunk, b: Chunk) -> Chunk:
    """Both, of one version, as one."""
    return Chunk(a.tokens + b.tokens, a.logprobs + b.logprobs, b.version, b.finish,
                 max(a.cached_tokens, b.cached_tokens))


async def _body(request: Request, kind: type[Body]) -> Body:
    return msgspec.msgpack.decode(await request.body(), type=kind)


def _say(message: object, status: int = 200) -> Response:
    return Response(msgspec.msgpack.encode(message), status, media_type=MEDIA)
