"""The gateway's HTTP server: one in each environment host that runs agents.

    POST /v1/chat/completions     OpenAI's chat completions
    POST /v1/responses            OpenAI's responses
    POST /v1/messages             Anthropic's messages
    POST /inference/v1/generate   vLLM's token route
    GET  /v1/models               and GET /v1/models/NAME
    POST /reward                  the trajectory's reward: {"reward": 1.0, "success": true}

Every call has its trajectory's key, as `Authorization: Bearer KEY` or `x-api-key: KEY`. If a client
disconnects, its call goes on; the client can send the call again and gets the same answer.
"""

from __future__ import annotations

import asyncio
import codecs
import hmac
import json
import zlib
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from rose import processes
from rose.agent.chat import LOOP_CHARACTERS
from rose.parts.adapters.gateway import (
    anthropic_messages,
    fields,
    openai_chat,
    openai_responses,
    token_route,
)
from rose.parts.adapters.gateway.forks import Forks
from rose.parts.adapters.gateway.players import Players
from rose.parts.adapters.gateway.session import Answer, ApiError, Query, Session
from rose.reward.episode import ScoringFailed, score_of

BEGINNING_PER_CORE = 2  # commands that begin at once: one computes, another waits for the disk
MEMBERS = 16  # most gzip members of a body, as each copies the rest of the body
MAX_BODY = 32 * 2**20  # bytes; the text of a context of a million tokens has 5 MB
CHARSETS = ("utf-8", "ascii", "iso8859-1", "utf-16", "utf-32")  # all fast to decode in Python
EITHER = 32 + zlib.MAX_WBITS  # zlib's value for "detect gzip or zlib format by the header"
KEPT_KEYS = 4096  # keys of ended trajectories, whose late calls get status 410 instead of 401
PING_S = 10.0  # seconds between pings on a waiting stream; clients time out after 30 to 600
PING = b": the turn is under way\n\n"
ROUTES: dict[str, ModuleType] = {
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
    "/inference/v1/generate": token_route,
}
COUNT = "/v1/messages/count_tokens"


class Gateway:
    """The HTTP server and its sessions. `model`: the policy's name, if a call names no model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._sessions: dict[str, Session] = {}  # key -> session
        self._ended: deque[str] = deque(maxlen=KEPT_KEYS)
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.forks = Forks()
        # Permits for commands to begin; each is held until the command's first call.
        self.beginning = asyncio.Semaphore(BEGINNING_PER_CORE * processes.cores())
        self.players = Players()

    async def open(self, host: str, port: int = 0) -> None:
        """Listen at `host`, on a free port if `port` is 0. Raises OSError."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_refuse_unknown])
        for path in ROUTES:
            app.router.add_post(path, self._call, expect_handler=_answer_expect)
        app.router.add_post(COUNT, self._count_tokens, expect_handler=_answer_expect)
        app.router.add_get("/v1/models", self._models, expect_handler=_answer_expect)
        app.router.add_get("/v1/models/{name:.+}", self._models, expect_handler=_answer_expect)
        app.router.add_post("/reward", self._reward, expect_handler=_answer_expect)
        # aiohttp must not decompress, so that unknown encodings are refused in the API's form.
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, auto_decompress=False
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError:
            await self.close()
            raise
        address = self._runner.addresses[0]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"http://{shown}:{address[1]}"

    async def close(self) -> None:
        await self.forks.close()
        await self.players.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def admit(self, session: Session) -> None:
        """Accept calls of the session."""
        self._sessions[session.key] = session

    def dismiss(self, session: Session) -> None:
        """End the session. Its running calls and all later calls get status 410."""
        self._sessions.pop(session.key, None)
        self._ended.append(session.key)
        session.close()

    def _session(self, request: web.Request) -> Session:
        """Return the session of the request's key. Each key is compared in constant time. Raises
        `ApiError` for an unknown key or an ended trajectory."""
        shown = request.headers.get("x-api-key") or request.headers.get("Authorization", "")
        scheme, _, credential = shown.partition(" ")
        shown = credential.strip() if scheme.lower() == "bearer" else shown
        key = shown.encode(errors="replace")
        found = None
        for known, session in self._sessions.items():
            if hmac.compare_digest(key, known.encode()):
                found = session
        if found is not None:
            return found
        if any([hmac.compare_digest(key, known.encode()) for known in self._ended]):
            raise ApiError(410, "the trajectory has ended", "trajectory_ended")
        raise ApiError(401, "no or a wrong API key", "invalid_api_key")

    async def _call(self, request: web.Request) -> web.StreamResponse:
        """Answer a call of one of the `ROUTES`."""
        api = ROUTES[request.path]
        try:
            session = self._session(request)
            with session.counted():
                body = await _body(request, session.body_s)
                query = await _read_query(request, api.read, body)
                streamed = fields.take(body, "stream", bool, False)
                model = fields.take(body, "model", str, self._model)
        except ApiError as error:
            return _refusal(api, error)
        task = asyncio.ensure_future(session.answer(query))
        if streamed:
            return await self._stream(request, api, task, model, body)
        try:
            answer = await task
        except ApiError as error:
            return _refusal(api, error)
        _mark_delivered(request, answer)
        return web.json_response(api.write(answer, model, body))

    async def _stream(
        self,
        request: web.Request,
        api: ModuleType,
        task: asyncio.Future[Answer],
        model: str,
        body: dict[str, Any],
    ) -> web.StreamResponse:
        """Send the turn's events once it is complete, and pings until then. A refusal within
        `PING_S` has its own HTTP status, as without streaming; a later refusal is an event."""
        await asyncio.wait({task}, timeout=PING_S)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if task.done() and isinstance(task.exception(), ApiError):
            return _refusal(api, task.exception())
        try:
            await response.prepare(request)
            while not task.done():
                await response.write(PING)
                await asyncio.wait({task}, timeout=PING_S)
            if isinstance(error := task.exception(), ApiError):
                await response.write(
                    f"event: error\ndata: {json.dumps(api.refuse(error))}\n\n".encode()
                )
                return response
            answer = task.result()
            await response.write(b"".join(api.stream(answer, model, body)))
            _mark_delivered(request, answer)
            await response.write_eof()
        except ConnectionError:  # The client disconnected. It may send the call again.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request)
            with session.counted(is_call=False):
                body = await _body(request, session.body_s)
                query = await _read_query(request, anthropic_messages.read_prompt, body)
                count = await session.prompt_tokens(query)
        except ApiError as error:
            return _refusal(anthropic_messages, error)
        return web.json_response({"input_tokens": count})

    async def _models(self, request: web.Request) -> web.Response:
        try:
            with self._session(request).counted(is_call=False):
                pass
        except ApiError as error:
            return _refusal(openai_chat, error)
        asked = request.match_info.get("name")
        model = _model(asked or self._model)
        return web.json_response(model if asked else {"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request)
            with session.counted():
                body = await _body(request, session.body_s)
                try:
                    session.reward = reward_of(body, "the call")
                except ValueError as error:
                    raise fields.bad(str(error)) from None
        except ApiError as error:
            return _refusal(openai_chat, error)
        return web.json_response({"ok": True})


def _model(name: str) -> dict[str, Any]:
    """Return a model's description with the fields of both OpenAI and Anthropic."""
    of_openai = {"id": name, "object": "model", "created": 0, "owned_by": "rose"}
    began = "1970-01-01T00:00:00Z"
    return of_openai | {"type": "model", "display_name": name, "created_at": began}


def _api_of(request: web.Request) -> ModuleType:
    """Return the API whose form a refusal gets if no route answers the request."""
    return anthropic_messages if request.path.startswith("/v1/messages") else openai_chat


async def _answer_expect(request: web.Request) -> web.Response | None:
    """Answer the header Expect. Only 100-continue is supported."""
    expected = request.headers.get("Expect", "")
    if expected.lower() != "100-continue":
        words = f"Expect: {expected[:80]!r}; there is 100-continue"
        return _refusal(_api_of(request), ApiError(417, words))
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # counts the answer's bytes alone
    return None


@web.middleware
async def _refuse_unknown(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse unknown routes and methods in the form of the API to which the path belongs."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        api = _api_of(request)
        known = ", ".join(f"POST {path}" for path in (*ROUTES, COUNT, "/reward"))
        words = f"{request.method} {request.path[:200]}: there are {known} and GET /v1/models"
        refused = _refusal(api, ApiError(error.status, words, "not_found"))
        if allowed := error.headers.get("Allow"):
            refused.headers["Allow"] = allowed
        return refused


def reward_of(value: Any, whose: str) -> tuple[float, bool]:
    """Return (reward, success) of a reward's JSON value. If it has no `success`, a reward of at
    least 1 is a success. `whose`: the value's source, for errors. Raises `ValueError`."""
    try:
        score = score_of(value, whose)
    except ScoringFailed as error:
        raise ValueError(str(error)) from None
    return score.reward, score.reward >= 1 if score.success is None else score.success


async def _body(request: web.Request, limit_s: float) -> dict[str, Any]:
    """Return the JSON object in the request's body. Raises `ApiError`."""
    try:
        async with asyncio.timeout(limit_s):
            data = _decoded(request, await request.read())
            body = json.loads(data.decode(_charset(request)))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limit_s:g} s", "timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except (ValueError, RecursionError):
        raise fields.bad("the body is no JSON") from None
    if not isinstance(body, dict):
        raise fields.bad("the body must be a JSON object")
    return body


def _decoded(request: web.Request, data: bytes) -> bytes:
    """Return the body without its Content-Encoding. Raises `ApiError`."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower() or "identity"
    if encoding == "identity":
        return data
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(415, f"Content-Encoding: {encoding[:80]!r}; there are gzip and deflate")
    found = b""
    for _ in range(MEMBERS):  # A gzip body may have several members.
        squeezed = zlib.decompressobj(EITHER)
        try:
            found += squeezed.decompress(data, MAX_BODY - len(found) + 1)
        except zlib.error as error:
            raise fields.bad(f"the body is not {encoding}: {error}") from None
        if len(found) > MAX_BODY:
            raise _too_large()
        if not squeezed.eof:
            raise fields.bad(f"the body is not {encoding}: it ends too soon")
        data = squeezed.unused_data
        if not data:
            return found
    raise fields.bad(f"the body has more than {MEMBERS} parts of {encoding}")


def _charset(request: web.Request) -> str:
    """Return the body's character set. Raises `ApiError` unless it is in `CHARSETS`."""
    named = request.charset or "utf-8"
    try:
        known = codecs.lookup(named).name
    except LookupError:
        known = ""
    if known not in CHARSETS:
        raise ApiError(415, f"charset: {named[:80]!r}; there are {', '.join(CHARSETS)}")
    return known


def _too_large() -> ApiError:
    return ApiError(413, f"a body has {MAX_BODY} bytes at most", "too_large")


async def _read_query(request: web.Request, read: Callable[[Any], Query], body: Any) -> Query:
    """Return `read(body)`. A long body is read in a thread. Raises `ApiError`."""
    if (request.content_length or MAX_BODY) <= LOOP_CHARACTERS:
        return read(body)
    return await asyncio.to_thread(read, body)


def _refusal(api: ModuleType, error: ApiError) -> web.Response:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return web.json_response(api.refuse(error), status=error.status, headers=headers)


def _mark_delivered(request: web.Request, answer: Answer) -> None:
    """Mark the answer as delivered, unless the client has disconnected."""
    if request.transport is not None and not request.transport.is_closing():
        answer.node.delivered = True
