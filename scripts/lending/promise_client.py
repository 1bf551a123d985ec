"""The OpenAI client of promise_agent.py, used once when this is imported. Its first call builds
objects, which costs 0.15 s of a core. The episodes' processes are forked after the import, so they
have these objects. Not a command."""

import asyncio
import contextlib

import httpx
from openai import APIConnectionError, AsyncOpenAI

MESSAGE = {"role": "assistant", "content": ""}
CHOICES = [{"index": 0, "finish_reason": "stop", "message": MESSAGE}]
ANSWER = {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": CHOICES}


def client(transport: httpx.AsyncBaseTransport | None = None, **told: str | int) -> AsyncOpenAI:
    """Return a client for plain HTTP, without certificates, which take 0.1 s to load."""
    http = httpx.AsyncClient(verify=False, trust_env=False, transport=transport, timeout=300.0)
    return AsyncOpenAI(http_client=http, **told)


async def _first_use() -> None:
    nobody = {"api_key": "none", "base_url": "http://127.0.0.1:1/v1", "max_retries": 0}
    answers = httpx.MockTransport(lambda _: httpx.Response(200, json=ANSWER))
    for transport in (answers, None):  # the objects for an answer, then those for a connection
        async with client(transport, **nobody) as one:
            with contextlib.suppress(APIConnectionError):
                await one.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": ""}], tools=[]
                )


asyncio.run(_first_use())
