"""What a co-serving rollout engine can take now, read from its scheduler's board, and when that is
worth a message.

Left out: the rules by which the engine lets tokens in and holds memory (rose.lending.rules.gate,
budget), and who listens (rose.scheduler). Nothing is written here.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

from rose.lending.board import Reader, Rollout

# a gate that is shut for longer is worth a message: shorter, the turns there gain nothing by a move
SHUT_S = 1.0
# an idle engine's scheduler may sleep, and a gate that it found shut stays so: then one turn may
# try
PROBE_S = 2.0
MATERIAL = 0.05  # of the whole cache: a smaller change of the budget is not worth a message
SPELLS = 16  # the last times that the gate was shut, from which the next opening is expected


class Capacity(NamedTuple):
    """Fields as in `protocol.WorkerCapacity`."""

    kv_tokens: int
    max_sequences: int
    expected_s: float
    revoked: bool


class CapacityWatch:
    """Of one engine, from its start to its end: `kv_tokens` and `max_sequences` are its whole."""

    def __init__(self, kv_tokens: int, max_sequences: int) -> None:
        self._whole = Capacity(kv_tokens, max_sequences, 0.0, False)
        self._reported: Capacity | None = None
        self._shut_since: float | None = None
        self._idle_since: float | None = None
        self._steps = 0.0
        self._spells: deque[float] = deque(maxlen=SPELLS)

    def look(self, now: float, state: Rollout | None) -> Capacity | None:
        """`now`: CLOCK_MONOTONIC; `state`: None for a board that can't be trusted. What is to be
        said, if anything."""
        found = self._capacity(now, state)
        if self._reported is not None and not self._material(self._reported, found):
            return None
        self._reported = found
        return found

    def repeat(self) -> None:
        """The next look reports, changed or not."""
        self._reported = None

    def _capacity(self, now: float, state: Rollout | None) -> Capacity:
        if state is None:
            return Capacity(0, 0, -1.0, False)
        shut_s, idle_s = self._shut_for(now, state), self._idle_for(now, state)
        share = min(state.kv_budget / state.kv_total, 1.0) if state.kv_total > 0 else 0.0
        kv_tokens, frozen = int(self._whole.kv_tokens * share), bool(state.frozen)
        if shut_s > SHUT_S or not kv_tokens:
            tries = int(bool(kv_tokens) and idle_s > PROBE_S)
            return Capacity(kv_tokens, tries, self._expected(shut_s), frozen)
        return Capacity(
            kv_tokens, self._whole.max_sequences, -1.0 if frozen or share < 1 else 0.0, frozen
        )

    def _shut_for(self, now: float, state: Rollout) -> float:
        """Seconds for which the gate is shut without a break; a step means that it was open."""
        shut = not state.open
        if self._shut_since is not None and (not shut or state.steps != self._steps):
            if now - self._shut_since > SHUT_S:
                self._spells.append(now - self._shut_since)
            self._shut_since = None
        self._steps = state.steps
        if shut and self._shut_since is None:
            self._shut_since = now
        return now - self._shut_since if shut else 0.0

    def _idle_for(self, now: float, state: Rollout) -> float:
        """Seconds without a request."""
        if state.running + state.waiting:
            self._idle_since = None
            return 0.0
        self._idle_since = now if self._idle_since is None else self._idle_since
        return now - self._idle_since

    def _expected(self, shut_s: float) -> float:
        """Seconds until the gate opens, by the mean of the last times; -1 without any, or when this
        one is longer."""
        left = sum(self._spells) / len(self._spells) - shut_s if self._spells else -1.0
        return left if left > 0 else -1.0

    def _material(self, reported: Capacity, found: Capacity) -> bool:
        return (reported.max_sequences, reported.revoked) != (
            found.max_sequences,
            found.revoked,
        ) or abs(reported.kv_tokens - found.kv_tokens) >= max(1.0, MATERIAL * self._whole.kv_tokens)


class EngineBoard:
    """The board of engine process `pid`, absent at first; what is wrong with it is printed once."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path, self._pid = path, pid
        self._reader: Reader[Rollout] | None = None
        self._why = ""

    def read(self) -> Rollout | None:
        """None for no board, a damaged one, or another process's."""
        try:
            self._reader = self._reader or Reader(self._path, Rollout)
        except (OSError, ValueError) as error:
            return self._no(str(error))
        state = self._reader.read()
        if state is None:
            return self._no(self._reader.why)
        if state.pid != self._pid:
            return self._no(
                f"{self._path}: of process {state.pid:.0f}, the engine is {self._pid}; does it run "
                "ROSE's scheduler?"
            )
        self._why = ""
        return state

    def _no(self, why: str) -> None:
        if why != self._why:
            print(f"the engine takes nothing: {why}", flush=True)
        self._why = why
        return None
