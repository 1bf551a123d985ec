"""What the turns of each group have got, sent on to the engines that draft from it; and how engines
decode.

Tokens pass the coordinator anyway. Every half second each engine that holds a turn of a group gets
what the group's other turns have got elsewhere since; nothing waits for it, and what is late, or
lost with an engine, costs drafts and no token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rose import protocol as p

BEFORE = 4 * 16  # bytes of a turn's context that go along: the longest that drafts are found by
LEAST = 4 * 16  # bytes of an open turn: fewer wait for more
MOST = 2**18  # bytes of one message to an engine: a tenth of a second's feeding, at most


class _Turn:
    __slots__ = ("before", "open", "tokens")

    def __init__(self, before: bytes) -> None:
        self.before, self.tokens, self.open = before, bytearray(), True


class Siblings:
    """`send`: a message to the rank of a worker."""

    def __init__(self, send: Callable[[int, p.Message], None]) -> None:
        self._send = send
        self._groups: dict[str, dict[str, _Turn]] = {}  # group -> turn
        self._have: dict[str, dict[str, int]] = {}  # worker -> turn -> bytes of it that are there
        # worker -> group, once it has held a turn of it -> turns with tokens that it may lack
        self._new: dict[str, dict[str, dict[str, None]]] = {}
        self._ended: dict[str, list[str]] = {}  # worker -> groups that it doesn't know to be over

    def got(self, request: p.TurnRequest, worker: str, tokens: bytes) -> None:
        """The turn got `tokens` from `worker`, which thus has all of it."""
        group = self._groups.setdefault(request.group, {})
        turn = group.get(request.turn)
        if turn is None:
            turn = group[request.turn] = _Turn(request.tokens[-BEFORE:])
        turn.tokens += tokens
        self._have.setdefault(worker, {})[request.turn] = len(turn.tokens)
        for name, new in self._new.items():
            if name != worker and request.group in new:
                new[request.group][request.turn] = None

    def closed(self, request: p.TurnRequest) -> None:
        """It gets no more."""
        turn = self._groups.get(request.group, {}).get(request.turn)
        if turn is not None:
            turn.open = False

    def end(self, group: str) -> None:
        """No turn of it will come."""
        gone = self._groups.pop(group, {})
        for worker, have in self._have.items():
            for turn in gone:
                have.pop(turn, None)
            self._ended.setdefault(worker, []).append(group)
        for new in self._new.values():
            new.pop(group, None)

    def forget(self, worker: str) -> None:
        """It is gone, or has started again."""
        self._have.pop(worker, None)
        self._new.pop(worker, None)
        self._ended.pop(worker, None)

    def flush(self, worker: str, rank: int, groups: Iterable[str]) -> None:
        """Send `worker`, which holds turns of `groups`, what it lacks; at most `MOST` bytes, the
        rest the next time."""
        have, room, spans = self._have.setdefault(worker, {}), MOST, []
        of_groups = self._new.setdefault(worker, {})
        for group in groups:
            turns = self._groups.get(group, {})
            new = of_groups.get(group)
            if new is None and turns:
                new = of_groups[group] = dict.fromkeys(turns)
            for name in list(new or ()):
                turn, start = turns[name], have.get(name, 0)
                lacks = len(turn.tokens) - start
                if room > 0 and lacks >= (LEAST if turn.open else 1):
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
    """What engines did since `begin_step`, by their heartbeats, so up to a second late: `tokens` in
    `steps` of theirs, of which `accepted` of `drafted` ones were drafts."""

    NAMES = ("steps", "drafted", "accepted", "generated_tokens")

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[int, ...]] = {}  # (worker, incarnation)
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
        """For metrics.jsonl."""
        each = {"tokens_per_engine_step": self.tokens / self.steps} if self.steps else {}
        drafts = {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}
        return each | (drafts if self.drafted else {})
