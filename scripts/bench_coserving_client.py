"""The users of bench_coserving.py: an open loop over HTTP. Each request is sent at its time,
whatever became of the others, and every latency counts from the time at which it should have been
sent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from rose.sim.traces import Trace

CONNECT_S = 10.0
# of a kept connection: uvicorn closes it after 5, and closing as a request leaves is an error here
IDLE_S = 1.0
WORDS = 4096  # of the models' vocabulary; 0 is the end of text


@dataclass
class Request:
    """Times in seconds from the traffic's start."""

    at: float  # when it should be sent
    prompt_tokens: int
    output_tokens: int  # asked for; no end of text shortens it
    late: float = 0.0  # sent after `at`: the client's own fault
    # when tokens came; the server merges what it sends late
    chunks: list[float] = field(default_factory=list)
    done: bool = False  # all its tokens came
    why: str = ""  # else
    ended: float = 0.0

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.at if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first."""
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
    """Send `trace` to the completions endpoint at `url`; what has not ended `drain_s` after the
    last arrival is cut off and not done. Prompts are random tokens of `seed`. `leave`: number of a
    request -> seconds after which its client disconnects. `start`: of the traffic, CLOCK_MONOTONIC;
    at once if none is given. `words`: of the model's vocabulary."""
    draw = np.random.default_rng(seed)
    prompts = [
        draw.integers(1, words, max(1, int(length))).tolist() for length in trace.prompt_tokens
    ]
    requests = [
        Request(float(at), len(prompt), max(1, int(output)))
        for at, prompt, output in zip(trace.at, prompts, trace.output_tokens)
    ]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        start = start or time.monotonic()
        sent = [
            asyncio.create_task(
                _one(
                    session,
                    f"{url}/v1/completions",
                    model,
                    request,
                    prompt,
                    start,
                    leave.get(number),
                )
            )
            for number, (request, prompt) in enumerate(zip(requests, prompts))
        ]
        if sent:
            _, pending = await asyncio.wait(
                sent, timeout=start + trace.seconds + drain_s - time.monotonic()
            )
            for task in pending:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)
    return requests


async def _one(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request: Request,
    prompt: list[int],
    start: float,
    leave_s: float | None,
) -> None:
    await asyncio.sleep(start + request.at - time.monotonic())
    request.late = time.monotonic() - start - request.at
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 1.0,
    }
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
