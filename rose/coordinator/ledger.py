"""The ledger of turns: which worker has each open turn, and the tokens received of it over all its
attempts, each token exactly once.

Workers stream tokens as they generate them. When a worker is lost, the turn continues on another
worker from the tokens received. Late messages of an earlier attempt are recognised by its number
and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rose import protocol as p

NO_HOST = -1  # placeholder for the rank of a lost environment host


@dataclass
class _Entry:
    request: p.TurnRequest
    host: int  # rank of the environment host
    worker: str | None = None  # None while the turn waits for one
    attempt: int = 0  # number of the newest dispatch, from 1
    # Received tokens at which this attempt is to end; 0: only the turn's own limit applies.
    chunk_ends: int = 0
    chunks: int = 0  # chunks that ended at their limit
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)
    received: int = 0  # tokens
    experts: list[bytes] = field(default_factory=list)  # experts that tokens were routed to
    routed: int = 0  # tokens that `experts` covers, after the request's first `routed` tokens


class Ledger:
    """The open turns, by name."""

    def __init__(self) -> None:
        self._turns: dict[str, _Entry] = {}
        self.migrations = 0  # dispatches that continue an interrupted attempt, since `begin_step`

    def open(self, request: p.TurnRequest, host: int, begun: p.TurnResult | None = None) -> None:
        """Open a turn, which starts with the tokens of `begun` that were recorded before."""
        entry = self._turns[request.turn] = _Entry(request, host)
        if begun is not None:
            entry.tokens, entry.logprobs = [begun.tokens], [begun.logprobs]
            entry.versions = [(int(version), 1) for version in p.unpack_tokens(begun.versions)]
            entry.received = len(entry.versions)
            entry.experts, entry.routed = [begun.experts], begun.routed

    def dispatch(self, turn: str, worker: str, attempt: int, max_tokens: int = 0) -> p.GenerateTurn:
        """Assign the turn to `worker`; return the message for it, with the context and the tokens
        received. `max_tokens` bounds the new tokens of this attempt; at 0 only the turn's limit
        applies."""
        entry = self._turns[turn]
        entry.worker = worker
        chunk_ended = 0 < entry.chunk_ends <= entry.received
        entry.chunks += chunk_ended
        self.migrations += attempt > 1 and not chunk_ended
        entry.attempt = attempt
        entry.chunk_ends = entry.received + max_tokens if max_tokens else 0
        sampling = entry.request.sampling
        left = sampling.max_new_tokens - entry.received
        if entry.received or max_tokens:
            sampling = p.Sampling(
                max_new_tokens=min(left, max_tokens or left),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=_seed(sampling.seed, attempt if entry.received else 0),
            )
        tokens = b"".join([entry.request.tokens, *entry.tokens])
        return p.GenerateTurn(turn, attempt, tokens, sampling, entry.request.routed + entry.routed)

    def orphan(self, trajectory: str) -> None:
        """Mark the trajectory's open turns as without a host. They keep running until its new host
        requests and adopts them."""
        for turn in self.of_trajectory(trajectory):
            self._turns[turn].host = NO_HOST

    def orphans(self, trajectory: str) -> list[str]:
        """Return the trajectory's open turns that no host has adopted."""
        turns = self.of_trajectory(trajectory)
        return [turn for turn in turns if self._turns[turn].host == NO_HOST]

    def adopt(self, turn: str, host: int) -> None:
        self._turns[turn].host = host

    def unassign(self, turn: str) -> None:
        """Take the turn from its worker, so that it waits; late messages about it are dropped."""
        self._turns[turn].worker = None

    def worker_of(self, turn: str) -> str | None:
        """Return the turn's worker; None if the turn waits or is not open."""
        entry = self._turns.get(turn)
        return entry.worker if entry is not None else None

    def attempt_of(self, turn: str) -> int:
        return self._turns[turn].attempt

    def request_of(self, turn: str) -> p.TurnRequest:
        return self._turns[turn].request

    def groups_by_worker(self) -> dict[str, set[str]]:
        """Return, for each worker that has turns, the groups of these turns."""
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
        """Add the tokens of a message on the current attempt; return how many, or None for a late
        message. Raises `ValueError`, and adds nothing, if it contradicts itself or the request."""
        entry = self._turns.get(message.turn)
        if entry is None or entry.attempt != message.attempt:
            return None
        count = len(message.tokens) // 4
        if len(message.logprobs) != len(message.tokens) or len(message.tokens) % 4:
            raise ValueError(
                f"turn {message.turn}: {len(message.tokens)} bytes of tokens with "
                f"{len(message.logprobs)} of log-probabilities; both have 4 for each token"
            )
        wanted, total = entry.request.sampling.max_new_tokens, entry.received + count
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
            entry.received += count
        if message.routed:
            entry.experts.append(message.experts)
            entry.routed += message.routed
        return count

    def chunk_ended(self, turn: str) -> bool:
        """True when the attempt's chunk has all its tokens and the turn is not complete."""
        entry = self._turns[turn]
        return 0 < entry.chunk_ends <= entry.received and not self.complete(turn)

    def received(self, turn: str) -> int:
        """Return the number of tokens received of the turn."""
        return self._turns[turn].received

    def last_tokens(self, turn: str) -> bytes:
        """Return the tokens (int32) that were added last."""
        return self._turns[turn].tokens[-1]

    def complete(self, turn: str) -> bool:
        """True when every requested token was received. The worker may die before it sends
        `TurnFinished`."""
        entry = self._turns[turn]
        return entry.received >= entry.request.sampling.max_new_tokens

    def close(self, turn: str, finish: p.FinishReason) -> tuple[int, p.TurnResult]:
        """Forget the turn; return (rank of its host or `NO_HOST`, result for the host)."""
        entry = self._turns.pop(turn)
        return entry.host, _result(entry, finish)

    def partial_results(self) -> list[tuple[p.TurnRequest, p.TurnResult]]:
        """Return `partial_result` of each open turn that has one."""
        return [pair for turn in self._turns if (pair := self.partial_result(turn)) is not None]

    def partial_result(self, turn: str) -> tuple[p.TurnRequest, p.TurnResult] | None:
        """Return the request and the tokens received, with `finish` LENGTH if complete, else ABORT.

        None for a turn without tokens, and for an incomplete turn with a sampling seed: its other
        tokens would be drawn differently than in a run that was not interrupted.
        """
        entry, complete = self._turns[turn], self.complete(turn)
        if not entry.received or not (entry.request.sampling.seed is None or complete):
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
    """Return a seed for `attempt`, so that it does not repeat the draws of earlier attempts."""
    return None if seed is None else (seed + attempt) & 0x7FFFFFFF
