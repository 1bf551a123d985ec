"""Any environment that an OpenEnv server offers, over its WebSocket: a session per trajectory.

An action is a call of the tool `act`, whose parameters are the environment's action schema (from
its /schema). If the environment's actions are tool calls (MCP), an action is a call of one of its
tools. An observation is shown as JSON, or as its text if that is its only field. The reset sends
the seed. The user starts the server, with its own packages. Images are not supported. Protocol:
openenv-core 0.3 (Meta and Hugging Face), implemented here without the package.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

from rose.agent.envs.base import Action, Start, Step
from rose.config import ConfigError
from rose.reward import values

SEEDS = 2**31 - 1
ASK_S = 20.0  # seconds for the server's schema, at the launch
MOST_BYTES = 64 * 2**20  # most bytes of a message
HIDDEN = ("metadata",)  # fields of actions that serve the environment's authors, not the policy


class Openenv:
    """An environment of the server at `url` (http://host:port). `prompt` precedes the first
    observation. `token_file` has a bearer token. An episode whose reward reaches `success_at` is a
    success. Raises `ConfigError`."""

    requires_tool = True
    rewards_turns = True  # an assumption, as only the server knows
    paths = ("token_file",)

    def __init__(
        self,
        url: str,
        prompt: str | None = "",
        reset: dict[str, Any] | None = None,
        success_at: float = 1.0,
        token_file: str | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"env.args.url={url!r}: http://host:port of an OpenEnv server")
        self.url, self.prompt, self.options = url.rstrip("/"), prompt, reset or {}
        self.success_at = success_at
        self.headers = {}
        if token_file is not None:
            if not Path(token_file).is_file():
                raise ConfigError(f"env.args.token_file={token_file!r}: no such file")
            token = Path(token_file).read_text(encoding="utf-8").strip()
            self.headers["Authorization"] = f"Bearer {token}"
        self.schema = _schema(self.url, tuple(self.headers.items()))
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._total = 0.0

    async def reset(self, seed: int) -> Start:
        timeout = aiohttp.ClientTimeout(total=None)  # no timeout, as the agent loop has deadlines
        self._http = aiohttp.ClientSession(headers=self.headers, timeout=timeout)
        self._socket = await self._http.ws_connect(
            f"ws{self.url.removeprefix('http')}/ws", max_msg_size=MOST_BYTES
        )
        self._total = 0.0
        # The mask keeps the seed's parity, which distinguishes training from held-out episodes.
        first = await self._ask("reset", {**self.options, "seed": seed & SEEDS})
        tools = await self._tools()
        self._names = [tool["function"]["name"] for tool in tools]
        shown = "\n\n".join(filter(None, [self.prompt, _text(first.get("observation"))]))
        return Start(messages=[{"role": "user", "content": shown or "Begin."}], tools=tools)

    async def step(self, action: Action) -> Step:
        call = action.call
        if call is None or call.name not in self._names:
            return Step(observation=f"Call one of {', '.join(self._names)}.", invalid=True)
        # The policy's JSON may have lone surrogates, which can't be sent.
        text = json.dumps(call.arguments, ensure_ascii=False).encode("utf-8", "replace")
        data = json.loads(text)
        if self._by_tools:
            data = {"type": "call_tool", "tool_name": call.name, "arguments": data}
        try:
            answer = await self._ask("step", data)
        except Refused as error:
            return Step(observation=f"Error: {error}"[:1000], invalid=True)
        try:
            reward = values.reward(answer.get("reward") or 0.0)
        except ValueError as error:
            raise ValueError(f"{self.url} gave {error}") from None
        self._total += reward
        done = bool(answer.get("done"))
        return Step(
            observation=_text(answer.get("observation")) or "(nothing)",
            reward=reward,
            done=done,
            success=done and self._total >= self.success_at,
        )

    async def close(self) -> None:
        socket, http = self._socket, self._http
        self._socket = self._http = None
        if socket is not None and not socket.closed:
            with contextlib.suppress(ConnectionError):  # raised if the server disconnected first
                await socket.send_str(json.dumps({"type": "close"}))
            await socket.close()
        if http is not None:
            await http.close()

    @property
    def _by_tools(self) -> bool:
        """True if the environment's actions are tool calls (MCP)."""
        return "tool_name" in self.schema.get("properties", {})

    async def _tools(self) -> list[dict[str, Any]]:
        if not self._by_tools:
            hidden = dict(self.schema.get("properties", {}))
            for name in HIDDEN:
                hidden.pop(name, None)
            return [_tool("act", self.schema.get("description") or "Act.", self.schema, hidden)]
        listed = await self._ask("step", {"type": "list_tools"})
        return [
            _tool(
                t["name"], t.get("description") or t["name"], schema, schema.get("properties", {})
            )
            for t in listed["observation"]["tools"]
            if (schema := t.get("input_schema") or t.get("inputSchema") or {}) is not None
        ]

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer. Raises `Refused` for a malformed
        action, `ConnectionError` if the session ended, and `RuntimeError` for other errors."""
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"{self.url} ended the session during {kind} ({message.type!r})")
        answer = json.loads(message.data)
        data = answer.get("data") or {}
        if answer.get("type") != "error":
            return data
        message = f"{data.get('message')} {data.get('errors') or ''}".strip()
        if data.get("code") == "VALIDATION_ERROR":
            raise Refused(message)
        raise RuntimeError(f"{self.url}: {kind} failed: {message} ({data.get('code')})")


class Refused(Exception):
    """The server rejects the action as malformed. The policy may read the text."""


def _tool(name: str, description: str, schema: dict, properties: dict) -> dict[str, Any]:
    required = [key for key in schema.get("required", []) if key in properties]
    parameters = {"type": "object", "properties": properties, "required": required}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _text(observation: Any) -> str:
    """Return an observation's text if that is its only field that isn't empty, else its JSON."""
    if isinstance(observation, dict):
        kept = {k: v for k, v in observation.items() if v not in (None, "", [], {})}
        if len(kept) == 1 and isinstance(value := next(iter(kept.values())), str):
            return value
        return json.dumps(kept, ensure_ascii=False) if kept else ""
    return "" if observation is None else str(observation)


@functools.cache
def _schema(url: str, headers: tuple) -> dict[str, Any]:
    """Return the JSON schema of the actions. Raises `ConfigError` if no server answers."""
    request = urllib.request.Request(f"{url}/schema", headers=dict(headers))
    # Proxies of the process's variables are not used, as in the episodes' connections (aiohttp).
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ASK_S) as answer:
            return json.loads(answer.read(MOST_BYTES))["action"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"env.args.url={url!r}: no OpenEnv server answers GET {url}/schema ({error}); start "
            "it, on a host that all environment hosts reach"
        ) from error
