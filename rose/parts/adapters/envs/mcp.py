"""Prompts that the policy answers with the tools of an MCP server. A turn without a call is the
answer, and a function rewards it as in `prompts`.

Every trajectory has a server process of its own (`command`, over stdio), or a session of its own
with a running server (`url`, streamable HTTP). The policy gets a tool's answer or error as text; an
error counts as an invalid call. If the server ends or hangs, the trajectory fails. Resources,
prompts and images of the server are not supported. Package: mcp, the official SDK.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
from mcp import MCPError, StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, CallToolResult

from rose import inputs, processes
from rose.agent.envs.base import Action, Start, Step
from rose.config import ConfigError
from rose.config.common import Count
from rose.parts.adapters.envs import _source
from rose.parts.tasks.envs import _prompts
from rose.parts.tasks.envs.prompts import last_step

CLOSE_S = 5.0  # seconds for a server to end before its process is killed


class Mcp:
    """The server is started by `command` (a list; `env` adds to its variables), or reached at `url`
    (with a bearer token in `token_file`). `tools` names the server's tools that the policy gets;
    null: all. The policy sees at most `most_characters` of a tool's answer. The other arguments are
    those of `prompts`. Raises `ConfigError`."""

    requires_tool = False
    several_calls = True
    paths = ("data", "held_out", "reward", "token_file")

    def __init__(
        self,
        data: str,
        command: list[str] | None = None,
        url: str | None = None,
        env: dict[str, str] | None = None,
        token_file: str | None = None,
        tools: list[str] | None = None,
        most_characters: Count = 4000,
        held_out: str | float = 0.1,
        reward: str | None = "math",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        system: str | None = None,
        success_at: float = 1.0,
    ):
        _check_server(command, url, token_file)
        self.command, self.url, self.env, self.token_file = command, url, env, token_file
        self.tools, self.most, self.success_at = tools, most_characters, success_at
        self.source = _prompts.Prompts(data, held_out, prompt_field, answer_field, system, reward)
        self.doubt = self.source.doubt
        self._calls: asyncio.Queue = asyncio.Queue()
        self._session: asyncio.Task | None = None

    async def reset(self, seed: int) -> Start:
        self._seed, self._row = seed, self.source.row(seed)
        ready: asyncio.Future = asyncio.get_running_loop().create_future()
        # The SDK needs one task for a whole session; the agent loop has a task for each call.
        self._session = asyncio.create_task(self._run(ready))
        schemas = await self._wait_for(ready)
        self._names = [schema["function"]["name"] for schema in schemas]
        start = self.source.start(self._row, schemas)
        self._messages = list(start.messages)
        return start

    def task_name(self, seed: int) -> str:
        return self.source.task_name(seed)

    def starts(self) -> Iterator[tuple[str, Start]]:
        """Yield every task without its tools, which only a running server can list."""
        return self.source.starts()

    async def step(self, action: Action) -> Step:
        text = action.text.encode("utf-8", "replace").decode()
        self._messages.append({"role": "assistant", "content": text})
        if action.call is None:
            score = await self.source.score(self._row, self._seed, self._messages, action)
            return last_step(score, self.success_at)
        results = [await self._use(call.name, call.arguments) for call in action.calls]
        texts = tuple(text for text, _ in results)
        self._messages += [{"role": "tool", "content": text} for text in texts]
        return Step(
            observation="\n".join(texts),
            observations=texts,
            invalid=any(failed for _, failed in results),
        )

    async def close(self) -> None:
        if self._session is None:
            return
        self._calls.put_nowait(None)
        await asyncio.wait({self._session}, timeout=CLOSE_S)
        self._session.cancel()
        await asyncio.wait({self._session}, timeout=CLOSE_S)
        if self._session.done() and not self._session.cancelled():
            self._session.exception()  # read, so that asyncio doesn't log it; callers got it before

    async def _use(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Call a tool. Return its answer, and True if that is an error for the policy."""
        if name not in self._names:
            known = ", ".join(self._names)
            return f"There is no tool {name[:40]!r}; there are {known}.".encode(
                "utf-8", "replace"
            ).decode(), True
        # The policy's JSON may have lone surrogates, which can't be sent.
        clean = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((name, clean, answer))
        try:
            result = await self._wait_for(answer)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise
            return f"Error: {error}"[: self.most], True
        return _text_of(result)[: self.most] or "(no text)", bool(result.is_error)

    async def _wait_for(self, future: asyncio.Future) -> Any:
        """Wait for the session's answer. Raises its error, or `ConnectionError` if it ends."""
        await asyncio.wait({future, self._session}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            error = None if self._session.cancelled() else self._session.exception()
            raise ConnectionError(f"the MCP server {self._place} ended: {error!r}") from error
        return future.result()

    async def _run(self, ready: asyncio.Future) -> None:
        """Hold the session: set `ready` to the tools' schemas, then carry out queued calls."""
        async with AsyncExitStack() as stack:
            # "legacy" opens a session on the server, which the newest protocol doesn't have.
            client = await stack.enter_async_context(
                Client(await self._transport(stack), mode="legacy")
            )
            ready.set_result(await self._schemas(client))
            while (call := await self._calls.get()) is not None:
                name, arguments, answer = call
                try:
                    result = await client.call_tool(name, arguments)
                except Exception as error:  # passed on to the caller that waits
                    if not answer.done():
                        answer.set_exception(error)
                else:
                    if not answer.done():
                        answer.set_result(result)

    async def _transport(self, stack: AsyncExitStack) -> Any:
        if self.command is not None:
            inputs.verify(*self.command)
            program, *arguments = self.command
            env = {"PATH": processes.search_path()} | (self.env or {})
            return stdio_client(StdioServerParameters(command=program, args=arguments, env=env))
        headers = {}
        if self.token_file is not None:
            headers["Authorization"] = (
                f"Bearer {Path(self.token_file).read_text(encoding='utf-8').strip()}"
            )
        # The agent loop sets deadlines. A server on this machine needs no proxy.
        here = httpx2.URL(self.url).host in ("localhost", "127.0.0.1", "::1")
        http = httpx2.AsyncClient(headers=headers, timeout=None, trust_env=not here)
        return streamable_http_client(self.url, http_client=await stack.enter_async_context(http))

    async def _schemas(self, client: Client) -> list[dict[str, Any]]:
        """Return OpenAI schemas of the policy's tools. Raises `ConfigError` if one is missing."""
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        names = [tool.name for tool in found]
        if lacks := set(self.tools or ()) - set(names):
            raise ConfigError(
                f"env.args.tools={self.tools!r}: {self._place} has no {', '.join(sorted(lacks))}; "
                f"it has {', '.join(names)}"
            )
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or tool.name,
                    "parameters": tool.input_schema,
                },
            }
            for tool in found
            if self.tools is None or tool.name in self.tools
        ]

    @property
    def _place(self) -> str:
        return self.url or " ".join(self.command)


def _text_of(result: CallToolResult) -> str:
    return "\n".join(part.text for part in result.content if part.type == "text")


def _check_server(command: list[str] | None, url: str | None, token_file: str | None) -> None:
    if (command is None) == (url is None):
        raise ConfigError(
            f"env.args.command={command!r}: either it, a list as [python, server.py], or "
            "env.args.url, http://host:port/mcp, of a server that runs"
        )
    if command is not None:
        if not command or not all(command):
            raise ConfigError(f"env.args.command={command!r}: a list of words: program, arguments")
        if shutil.which(command[0], path=processes.search_path()) is None:
            raise ConfigError(f"env.args.command={command!r}: no program {command[0]!r} on PATH")
        _source.check_script(command, f"env.args.command={command!r}")
    elif not url.startswith(("http://", "https://")):
        raise ConfigError(f"env.args.url={url!r}: http://host:port/mcp")
    if token_file is not None and not Path(token_file).is_file():
        raise ConfigError(f"env.args.token_file={token_file!r}: no such file")
