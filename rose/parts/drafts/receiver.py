"""Passes the tokens of siblings' turns to the engine that drafts from them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from rose import protocol as p
from rose.parts.drafts.sender import Span

if TYPE_CHECKING:
    from rose.engine.vllm_engine import Engine

# Number of messages (each a quarter MiB at most) kept until an engine takes them. The oldest are
# dropped.
HINTS = 32
_DECODER = msgspec.msgpack.Decoder(tuple[list[Span], list[str]])


class Receiver:
    """The messages of `Sender` to a rollout rank. `engine` returns the rank's engine, `died` whether
    an error came of its death."""

    def __init__(
        self, engine: Callable[[], Engine | None], died: Callable[[Engine], Awaitable[bool]]
    ) -> None:
        self._engine, self._died = engine, died
        # Tokens of siblings' turns, and groups that ended, until they are passed to the engine.
        self._spans: deque[list[Span]] = deque(maxlen=HINTS)
        self._ended: list[str] = []
        self._arrived = asyncio.Event()

    def add(self, message: p.DraftText) -> None:
        spans, ended = _DECODER.decode(message.content)
        self._spans.append(spans)
        self._ended += ended
        self._arrived.set()

    async def run(self) -> None:
        """Pass siblings' tokens to an engine that drafts. One call runs at a time; what arrives
        meanwhile goes with the next. Only drafts depend on it, so tokens for an engine that is
        down, or dies meanwhile, are dropped."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            spans, ended = [span for some in self._spans for span in some], self._ended
            self._spans.clear()
            self._ended = []
            engine = self._engine()
            if engine is None or not engine.alive or not engine.drafts:
                continue
            try:
                await engine.call_workers("rose_learn_siblings", spans, ended)
            except Exception:
                if not await self._died(engine):
                    raise
