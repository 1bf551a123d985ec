"""The users of bench_coserving.py: an open loop over HTTP. Each request is sent at its time,
whether or not others are answered. Latencies count from the time at which it should be sent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from rose.parts.simulator.traces import Trace

CONNECT_S = 10.0
# Seconds that an idle connection is kept. uvicorn closes it after 5 s, when a request might fail.
IDLE_S = 1.0
WORDS = 4096  # vocabulary size of the models; token 0 is the end of text


@dataclass
class Request:
    """A request and its latencies. Times are in seconds from the traffic's start."""

    at: float  # time at which it should be sent
    prompt: list[int]
    output_tokens: int  # tokens asked for; no end of text shortens the answer
    late: float = 0.0  # seconds between `at` and the sending, which is the client's own fault
    # Arrival times of chunks. The server merges tokens that it sends late into one chunk.
    chunks: list[float] = field(default_factory=list)
    done: bool = False  # all its tokens arrived
    why: str = ""  # reason if it is not done
    ended: float = 0.0

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.at if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first."""
        if not self.done or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)


async def replay(
    url: str,
    model: str,
    trace: Trace,
    seed: int,
    drain_s: float,
    leave: dict[int, float] = {},
    start: float | None = None,
    words: int = WORDS,
) -> list[Request]:
    """Send `trace` to the completions endpoint at `url`. Requests that have not ended `drain_s`
    after the last arrival are cancelled and not done. Prompts are random tokens drawn with `seed`.

    `leave`: number of a request -> seconds after which its client disconnects. `start`: the
    traffic's start by CLOCK_MONOTONIC, by default now. `words`: the vocabulary size."""
    draw = np.random.default_rng(seed)
    requests = [
        Request(float(at), draw.integers(1, words, max(1, n)).tolist(), max(1, int(output)))
        for at, n, output in zip(trace.at, trace.prompt_tokens, trace.output_tokens, strict=False)
    ]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        start = start or time.monotonic()
        place = session, f"{url}/v1/completions", model
        sent = [
            asyncio.create_task(send(*place, request, start, leave.get(number)))
            for number, request in enumerate(requests)
        ]
        if sent:
            left_s = start + trace.seconds + drain_s - time.monotonic()
            for task in (await asyncio.wait(sent, timeout=left_s))[1]:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)
    return requests


async def send(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request: Request,
    start: float,
    leave_s: float | None,
) -> None:
    """Send one request at its time after `start` and fill in what became of it."""
    await asyncio.sleep(start + request.at - time.monotonic())
    request.late = time.monotonic() - start - request.at
    body = {"model": model, "prompt": request.prompt, "max_tokens": request.output_tokens}
    body |= {"ignore_eos": True, "stream": True, "temperature": 1.0}
    try:
        async with asyncio.timeout(leave_s), session.post(url, json=body) as response:
            if response.status != 200:
                request.why = f"status {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    request.chunks.append(time.monotonic() - start)
                    request.done = b'"finish_reason":"length"' in line
                    if b'"error"' in line[:20]:
                        request.why = line[:200].decode(errors="replace")
        request.why = request.why or ("" if request.done else "ended early")
    except TimeoutError:
        request.why = "left"
    except asyncio.CancelledError:
        request.why = "not done in time"
        raise
    except (aiohttp.ClientError, OSError) as error:
        request.why = f"{type(error).__name__}: {error}"
    finally:
        request.ended = time.monotonic() - start
