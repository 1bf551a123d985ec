"""The ledger of turns: who works on each, and what has been received of it, over all its attempts,
exactly once.

Tokens stream in as they are made. When a worker is lost the turn goes on elsewhere from the tokens
received; words of an earlier attempt that arrive late are recognised by their number and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rose import protocol as p

NOBODY = -1  # the host of a turn whose own was lost


@dataclass
class _Entry:
    request: p.TurnRequest
    host: int  # rank of the environment host
    worker: str | None = None  # that works on it; None: it waits for one
    attempt: int = 0
    chunk_ends: int = 0  # at so many tokens made; 0: the attempt goes on to the turn's own limit
    chunks: int = 0  # that ended as they should
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)
    made: int = 0
    experts: list[bytes] = field(default_factory=list)
    routed: int = 0  # tokens whose experts they are, behind the request's


class Ledger:
    def __init__(self) -> None:
        self._turns: dict[str, _Entry] = {}
        self.migrations = 0

    def open(self, request: p.TurnRequest, host: int, begun: p.TurnResult | None = None) -> None:
        """`begun`: what an earlier attempt of the run has of it."""
        entry = self._turns[request.turn] = _Entry(request, host)
        if begun is not None:
            entry.tokens, entry.logprobs = [begun.tokens], [begun.logprobs]
            entry.versions = [(int(version), 1) for version in p.unpack_tokens(begun.versions)]
            entry.made = len(entry.versions)
            entry.experts, entry.routed = [begun.experts], begun.routed

    def dispatch(self, turn: str, worker: str, attempt: int, max_tokens: int = 0) -> p.GenerateTurn:
        """The message for the worker that takes attempt `attempt`: context, then the tokens
        received. `max_tokens`: new ones of this attempt, 0 for all that are left."""
        entry = self._turns[turn]
        entry.worker = worker
        chunk_ended = 0 < entry.chunk_ends <= entry.made
        entry.chunks += chunk_ended
        self.migrations += attempt > 1 and not chunk_ended
        entry.attempt = attempt
        entry.chunk_ends = entry.made + max_tokens if max_tokens else 0
        sampling = entry.request.sampling
        left = sampling.max_new_tokens - entry.made
        if entry.made or max_tokens:
            sampling = p.Sampling(
                max_new_tokens=min(left, max_tokens or left),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=_seed(sampling.seed, attempt if entry.made else 0),
            )
        tokens = b"".join([entry.request.tokens, *entry.tokens])
        return p.GenerateTurn(turn, attempt, tokens, sampling, entry.request.routed + entry.routed)

    def leave(self, trajectory: str) -> None:
        """Its host is lost: what is open goes on, for whoever asks for the same turns."""
        for turn in self.of_trajectory(trajectory):
            self._turns[turn].host = NOBODY

    def left(self, trajectory: str) -> list[str]:
        """Turns of it that nobody has asked for again."""
        return [turn for turn in self.of_trajectory(trajectory) if self._turns[turn].host == NOBODY]

    def adopt(self, turn: str, host: int) -> None:
        self._turns[turn].host = host

    def take_back(self, turn: str) -> None:
        """Nobody works on it any more: it waits, and late words about it are dropped."""
        self._turns[turn].worker = None

    def worker_of(self, turn: str) -> str | None:
        """None for a turn that waits, and for one that is not open."""
        entry = self._turns.get(turn)
        return entry.worker if entry is not None else None

    def attempt_of(self, turn: str) -> int:
        return self._turns[turn].attempt

    def request_of(self, turn: str) -> p.TurnRequest:
        return self._turns[turn].request

    def trajectory_of(self, turn: str) -> str:
        return self._turns[turn].request.trajectory

    def groups_held(self) -> dict[str, set[str]]:
        """Of each worker that has turns, their groups."""
        held: dict[str, set[str]] = {}
        for entry in self._turns.values():
            if entry.worker is not None:
                held.setdefault(entry.worker, set()).add(entry.request.group)
        return held

    def of_worker(self, worker: str) -> list[str]:
        return [turn for turn, entry in self._turns.items() if entry.worker == worker]

    def __contains__(self, turn: str) -> bool:
        return turn in self._turns

    def add(self, message: p.TurnProgress | p.TurnFinished | p.TurnReturned) -> int | None:
        """Take the tokens of a message on the current attempt; how many, or None for a late
        message. Raises `ValueError`, and takes nothing, when it can't be true."""
        entry = self._turns.get(message.turn)
        if entry is None or entry.attempt != message.attempt:
            return None
        count = len(message.tokens) // 4
        if len(message.logprobs) != len(message.tokens) or len(message.tokens) % 4:
            raise ValueError(
                f"turn {message.turn}: {len(message.tokens)} bytes of tokens with "
                f"{len(message.logprobs)} of log-probabilities; both have 4 for each token"
            )
        wanted, total = entry.request.sampling.max_new_tokens, entry.made + count
        if total > wanted or total == 0 and isinstance(message, p.TurnFinished):
            raise ValueError(
                f"turn {message.turn}: {total} tokens, where 1 to {wanted} were asked for"
            )
        context = len(entry.request.tokens) // 4
        if message.routed and not (
            len(message.experts) % message.routed == 0
            and 0 < entry.request.routed + entry.routed + message.routed < context + total
        ):
            raise ValueError(
                f"turn {message.turn}: {len(message.experts)} bytes of experts for "
                f"{message.routed} tokens more, of {context + total}"
            )
        if count:
            entry.tokens.append(message.tokens)
            entry.logprobs.append(message.logprobs)
            entry.versions.append((message.version, count))
            entry.made += count
        if message.routed:
            entry.experts.append(message.experts)
            entry.routed += message.routed
        return count

    def chunk_ended(self, turn: str) -> bool:
        """True when the attempt has made what it was to make and the turn isn't complete."""
        entry = self._turns[turn]
        return 0 < entry.chunk_ends <= entry.made and not self.complete(turn)

    def made(self, turn: str) -> int:
        """Tokens of the turn that are here."""
        return self._turns[turn].made

    def complete(self, turn: str) -> bool:
        """True when every token asked for is here although no worker sent the end (it died
        first)."""
        entry = self._turns[turn]
        return entry.made >= entry.request.sampling.max_new_tokens

    def close(self, turn: str, finish: p.FinishReason) -> tuple[int, p.TurnResult]:
        """(rank of the host, or `NOBODY`, the result it gets); the turn is forgotten."""
        entry = self._turns.pop(turn)
        return entry.host, _result(entry, finish)

    def cut(self) -> list[tuple[p.TurnRequest, p.TurnResult]]:
        """What open turns have, as `cut_of`."""
        return [pair for turn in self._turns if (pair := self.cut_of(turn)) is not None]

    def cut_of(self, turn: str) -> tuple[p.TurnRequest, p.TurnResult] | None:
        """What an open turn has, if any tokens: with `finish` LENGTH where that is all that was
        asked for, else ABORT. A seeded turn is left out, unless complete: its second half would get
        other draws than in a run that wasn't interrupted."""
        entry, complete = self._turns[turn], self.complete(turn)
        if not entry.made or not (entry.request.sampling.seed is None or complete):
            return None
        finish = p.FinishReason.LENGTH if complete else p.FinishReason.ABORT
        return entry.request, _result(entry, finish)

    def of_trajectory(self, trajectory: str) -> list[str]:
        return [t for t, entry in self._turns.items() if entry.request.trajectory == trajectory]

    def drop(self, turn: str) -> None:
        self._turns.pop(turn, None)

    def __len__(self) -> int:
        return len(self._turns)


def _result(entry: _Entry, finish: p.FinishReason) -> p.TurnResult:
    versions = np.repeat([v for v, _ in entry.versions], [n for _, n in entry.versions])
    return p.TurnResult(
        entry.request.turn,
        b"".join(entry.tokens),
        b"".join(entry.logprobs),
        p.pack_tokens(versions),
        finish,
        migrations=max(0, entry.attempt - 1 - entry.chunks),
        experts=b"".join(entry.experts),
        routed=entry.routed,
    )


def _seed(seed: int | None, attempt: int) -> int | None:
    """Another one for tokens that follow those of earlier attempts."""
    return None if seed is None else (seed + attempt) & 0x7FFFFFFF
