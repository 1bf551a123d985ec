"""Forwards the tokens of a group's turns to the engines that draft from them, and counts what
engines decode.

All tokens pass the coordinator. Every half second, each engine that holds a turn of a group gets
the new tokens that the group's other turns got on other engines. Nothing waits for them: tokens
that arrive late, or are lost with an engine, cost drafts, but never change a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rose import protocol as p

# The end of a turn's context that is sent with its tokens: 16 int32 tokens, the longest context
# that drafts are looked up by.
CONTEXT_BYTES = 4 * 16
# An open turn's new tokens are not sent before there are this many bytes of them: 16 int32 tokens.
LEAST_BYTES = 4 * 16
# Bounds a message to an engine, which indexes this many bytes within a tenth of a second.
MOST_BYTES = 2**18


class _Turn:
    __slots__ = ("before", "open", "tokens")

    def __init__(self, before: bytes) -> None:
        self.before, self.tokens, self.open = before, bytearray(), True


class Siblings:
    """The tokens of each running group, and which of them each worker has. `send` takes (rank,
    message)."""

    def __init__(self, send: Callable[[int, p.Message], None]) -> None:
        self._send = send
        self._groups: dict[str, dict[str, _Turn]] = {}  # group -> turn
        self._have: dict[str, dict[str, int]] = {}  # worker -> turn -> bytes that the worker has
        # worker -> group of which it has held a turn -> turns with tokens that it may lack
        self._new: dict[str, dict[str, dict[str, None]]] = {}
        self._ended: dict[str, list[str]] = {}  # worker -> ended groups, not reported to it yet

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

    def turn_ended(self, request: p.TurnRequest) -> None:
        """Mark the turn as complete, so that its last few tokens are sent, too."""
        turn = self._groups.get(request.group, {}).get(request.turn)
        if turn is not None:
            turn.open = False

    def group_ended(self, group: str) -> None:
        """Forget a group, which has no further turns."""
        gone = self._groups.pop(group, {})
        for worker, have in self._have.items():
            for turn in gone:
                have.pop(turn, None)
            self._ended.setdefault(worker, []).append(group)
        for new in self._new.values():
            new.pop(group, None)

    def forget_worker(self, worker: str) -> None:
        """Forget what a worker has, because it is lost or its engine has restarted."""
        self._have.pop(worker, None)
        self._new.pop(worker, None)
        self._ended.pop(worker, None)

    def flush(self, worker: str, rank: int, groups: Iterable[str]) -> None:
        """Send `worker`, which holds turns of `groups`, the tokens of these groups that it lacks. A
        call sends at most `MOST_BYTES`; the next call sends the remaining ones."""
        have = self._have.setdefault(worker, {})
        room = MOST_BYTES
        spans = []
        of_groups = self._new.setdefault(worker, {})
        for group in groups:
            turns = self._groups.get(group, {})
            new = of_groups.get(group)
            if new is None and turns:
                new = of_groups[group] = dict.fromkeys(turns)
            for name in list(new or ()):
                turn, start = turns[name], have.get(name, 0)
                lacks = len(turn.tokens) - start
                if room > 0 and lacks >= (LEAST_BYTES if turn.open else 1):
                    tokens = bytes(turn.tokens[start : start + room])
                    spans.append(p.SiblingTurn(name, start // 4, turn.before, tokens))
                    have[name] = start + len(tokens)
                    room -= len(tokens)
                    lacks -= len(tokens)
                if not lacks:
                    del new[name]
        ended = self._ended.pop(worker, [])
        if spans or ended:
            self._send(rank, p.SiblingTurns(spans, ended))


class Decoding:
    """Counters of all engines since `begin_step`: they generated `tokens` in `steps` engine steps,
    and accepted `accepted` of `drafted` draft tokens. Heartbeats bring them up to 1 s late."""

    NAMES = ("steps", "drafted", "accepted", "generated_tokens")

    def __init__(self) -> None:
        # (worker, incarnation) -> last counts, in the order of `NAMES`
        self._last: dict[tuple[str, int], tuple[int, ...]] = {}
        self.begin_step()

    def begin_step(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0

    def count(self, m: p.WorkerLoad) -> None:
        now = tuple(getattr(m, name) for name in self.NAMES)
        before = self._last.get((m.worker, m.incarnation), (0,) * len(now))
        self._last[m.worker, m.incarnation] = now
        steps, drafted, accepted, tokens = (b - a for a, b in zip(before, now, strict=True))
        self.steps, self.drafted = self.steps + steps, self.drafted + drafted
        self.accepted, self.tokens = self.accepted + accepted, self.tokens + tokens

    def row(self) -> dict[str, float]:
        """Return the step's values for metrics.jsonl."""
        each = {"tokens_per_engine_step": self.tokens / self.steps} if self.steps else {}
        drafts = {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}
        return each | (drafts if self.drafted else {})
