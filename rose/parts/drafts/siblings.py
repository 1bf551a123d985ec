"""Forwards the tokens of a group's trajectories ("siblings") to the engines that draft from them.

All tokens pass through the coordinator. Every half second, it sends the new tokens of a group's
turns to the other engines that hold turns of the group. Nothing waits for them. Late or lost tokens
mean fewer drafts (speculative decoding), but never change a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from rose import protocol as p
from rose.scheduler import events as ev

if TYPE_CHECKING:
    from rose.coordinator.turns import TurnHub
    from rose.engine.vllm_engine import Engine

# The end of a turn's context that is sent with its tokens: 16 int32 tokens, the longest context
# that drafts are looked up by.
CONTEXT_BYTES = 4 * 16
# Least bytes of new tokens that are sent for a turn that still runs: 16 int32 tokens.
LEAST_BYTES = 4 * 16
# Bounds a message to an engine, which indexes this many bytes within a tenth of a second.
MOST_BYTES = 2**18
# Number of messages kept until an engine takes them. The oldest are dropped.
MOST_MESSAGES = 32

# A turn, the number of its first new token, `CONTEXT_BYTES` of its context, and its new tokens.
Span = tuple[str, int, bytes, bytes]
_DECODER = msgspec.msgpack.Decoder(tuple[list[Span], list[str]])


class _Turn:
    """A turn's `tokens`, the end of its context (`before`), and whether it still runs (`open`)."""

    __slots__ = ("before", "open", "tokens")

    def __init__(self, before: bytes) -> None:
        self.before, self.tokens, self.open = before, bytearray(), True


class Sender:
    """Runs at the coordinator. Keeps the tokens of each running group, and which of them each
    worker has. `send` takes (rank, message)."""

    def __init__(self, hub: TurnHub, send: Callable[[int, p.Message], None]) -> None:
        self._hub, self._send = hub, send
        self._groups: dict[str, dict[str, _Turn]] = {}  # group -> turn
        self._have: dict[str, dict[str, int]] = {}  # worker -> turn -> bytes that the worker has
        # worker -> group of which it has held a turn -> turns with tokens that it may lack
        self._new: dict[str, dict[str, dict[str, None]]] = {}
        self._ended: dict[str, list[str]] = {}  # worker -> ended groups, not reported to it yet

    def observe(self, event: ev.Event) -> None:
        """Take the new tokens of turns. At each tick, send each worker the tokens that it lacks."""
        ledger = self._hub.ledger
        match event:
            case ev.TurnProgressed(turn=turn) if name := ledger.worker_of(turn):
                self.add_tokens(ledger.request_of(turn), name, ledger.last_tokens(turn))
            case ev.TurnEnded(turn=turn):
                self.turn_ended(turn)
            case ev.WorkerLost(worker=name, ended=ended):
                self.forget_worker(name)
                for turn in ended:
                    self.turn_ended(turn)
            case ev.Tick():
                held = ledger.groups_by_worker()
                for name, worker in self._hub.workers.items():
                    if worker.alive:
                        self.flush(name, worker.rank, sorted(held.get(name, ())))

    def group_ended(self, group: str) -> None:
        """Drop a group, which has no further turns."""
        gone = self._groups.pop(group, {})
        for worker, have in self._have.items():
            for turn in gone:
                have.pop(turn, None)
            self._ended.setdefault(worker, []).append(group)
        for new in self._new.values():
            new.pop(group, None)

    def add_tokens(self, request: p.TurnRequest, worker: str, tokens: bytes) -> None:
        """Add `tokens` (int32) that `worker` generated; the worker has the whole turn so far."""
        group = self._groups.setdefault(request.group, {})
        turn = group.get(request.turn)
        if turn is None:
            turn = group[request.turn] = _Turn(request.tokens[-CONTEXT_BYTES:])
        turn.tokens += tokens
        self._have.setdefault(worker, {})[request.turn] = len(turn.tokens)
        for name, new in self._new.items():
            if name != worker and request.group in new:
                new[request.group][request.turn] = None

    def turn_ended(self, name: str) -> None:
        """Mark the turn as complete, so that its last few tokens are sent, too."""
        turn = self._groups.get(name.partition(".")[0], {}).get(name)
        if turn is not None:
            turn.open = False

    def forget_worker(self, worker: str) -> None:
        """Forget what a worker has, because it is lost or its engine has restarted."""
        for known in (self._have, self._new, self._ended):
            known.pop(worker, None)

    def flush(self, worker: str, rank: int, groups: Iterable[str]) -> None:
        """Send `worker`, which holds turns of `groups`, the tokens of these groups that it lacks. A
        call sends at most `MOST_BYTES`; the next call sends the remaining tokens."""
        have = self._have.setdefault(worker, {})
        room = MOST_BYTES
        spans: list[Span] = []
        of_groups = self._new.setdefault(worker, {})
        for group in groups:
            turns = self._groups.get(group, {})
            new = of_groups.get(group, {})
            if group not in of_groups and turns:
                new = of_groups[group] = dict.fromkeys(turns)
            for name in list(new):
                turn, start = turns[name], have.get(name, 0)
                lacks = len(turn.tokens) - start
                if room > 0 and lacks >= (LEAST_BYTES if turn.open else 1):
                    tokens = bytes(turn.tokens[start : start + room])
                    spans.append((name, start // 4, turn.before, tokens))
                    have[name] = start + len(tokens)
                    room -= len(tokens)
                    lacks -= len(tokens)
                if not lacks:
                    del new[name]
        ended = self._ended.pop(worker, [])
        if spans or ended:
            self._send(rank, p.DraftText(msgspec.msgpack.encode((spans, ended))))


class Receiver:
    """Runs at a rollout rank, and takes the messages of `Sender`. `engine` returns the rank's
    engine. `died` returns true if an error was caused by the engine's death."""

    def __init__(
        self, engine: Callable[[], Engine | None], died: Callable[[Engine], Awaitable[bool]]
    ) -> None:
        self._engine, self._died = engine, died
        # Tokens of siblings' turns, and groups that ended, until they are passed to the engine.
        self._spans: deque[list[Span]] = deque(maxlen=MOST_MESSAGES)
        self._ended: list[str] = []
        self._arrived = asyncio.Event()

    def add(self, message: p.DraftText) -> None:
        spans, ended = _DECODER.decode(message.content)
        self._spans.append(spans)
        self._ended += ended
        self._arrived.set()

    async def run(self) -> None:
        """Pass siblings' tokens and the names of ended groups to this rank's engine. One call runs
        at a time; what arrives meanwhile goes with the next call. It is dropped if the engine is
        down, dies or doesn't draft, because only drafts depend on it."""
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
