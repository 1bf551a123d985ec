"""Read the capacity of a co-serving rollout engine from its scheduler's board, and decide when a
change is worth a message to the coordinator.

The rules by which the engine admits tokens and holds memory are in rose.parts.lending.rules (gate,
budget).
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

from rose.parts.lending.board import Reader, Rollout

# Seconds after which a shut gate is reported. Moving turns elsewhere doesn't pay for shorter times.
SHUT_S = 1.0
# Seconds without requests after which an engine with a shut gate reports room for one turn: without
# a request its scheduler may not notice that the gate would open.
PROBE_S = 2.0
MATERIAL = 0.05  # least change of the budget that is reported, as a share of the whole KV cache
SPELLS = 16  # number of last periods with a shut gate that predict the length of the next


class Capacity(NamedTuple):
    """An engine's capacity, with fields as in `protocol.WorkerCapacity`."""

    kv_tokens: int
    max_sequences: int
    expected_s: float
    revoked: bool


class CapacityWatch:
    """Watches the capacity of an engine process. `kv_tokens`, `max_sequences`: full capacity."""

    def __init__(self, kv_tokens: int, max_sequences: int) -> None:
        self._whole = Capacity(kv_tokens, max_sequences, 0.0, False)
        self._reported: Capacity | None = None
        self._shut_since: float | None = None
        self._idle_since: float | None = None
        self._open_s = 0.0
        self._spells: deque[float] = deque(maxlen=SPELLS)

    def update(self, now: float, state: Rollout | None) -> Capacity | None:
        """Return the capacity if it must be reported, else None. `now` is CLOCK_MONOTONIC. `state`
        is None if the board can't be trusted."""
        found = self._capacity(now, state)
        if self._reported is not None and not self._material(self._reported, found):
            return None
        self._reported = found
        return found

    def repeat(self) -> None:
        """Make the next update return the capacity even if it hasn't changed."""
        self._reported = None

    def _capacity(self, now: float, state: Rollout | None) -> Capacity:
        """Derive the engine's present capacity from its board."""
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
        """Seconds since the gate was last open. More seconds with an open gate show that it was
        open in between."""
        shut = not state.open
        if self._shut_since is not None and (not shut or state.open_s != self._open_s):
            if now - self._shut_since > SHUT_S:
                self._spells.append(now - self._shut_since)
            self._shut_since = None
        self._open_s = state.open_s
        if shut and self._shut_since is None:
            self._shut_since = now
        return now - self._shut_since if shut else 0.0

    def _idle_for(self, now: float, state: Rollout) -> float:
        """Seconds since the engine last had a request."""
        if state.running + state.waiting:
            self._idle_since = None
            return 0.0
        self._idle_since = now if self._idle_since is None else self._idle_since
        return now - self._idle_since

    def _expected(self, shut_s: float) -> float:
        """Predict the seconds until the gate opens from the mean of the last periods with a shut
        gate. Returns -1 (unknown) before the first, or when this period is already longer."""
        left = sum(self._spells) / len(self._spells) - shut_s if self._spells else -1.0
        return left if left > 0 else -1.0

    def _material(self, reported: Capacity, found: Capacity) -> bool:
        """True if the change from `reported` to `found` must be reported."""
        return (reported.max_sequences, reported.revoked) != (
            found.max_sequences,
            found.revoked,
        ) or abs(reported.kv_tokens - found.kv_tokens) >= max(1.0, MATERIAL * self._whole.kv_tokens)


class EngineBoard:
    """The board of the engine process `pid`, once it exists. Prints each problem with it once."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path, self.pid = path, pid
        self._reader: Reader[Rollout] | None = None
        self._why = ""

    def read(self) -> Rollout | None:
        """Return the engine's state; None if the board is absent, damaged or another process's."""
        try:
            self._reader = self._reader or Reader(self._path, Rollout)
        except (OSError, ValueError) as error:
            return self._no(str(error))
        state = self._reader.read()
        if state is None:
            return self._no(self._reader.why)
        if state.pid != self.pid:
            return self._no(
                f"{self._path}: of process {state.pid:.0f}, the engine is {self.pid}; does it run "
                "ROSE's scheduler?"
            )
        self._why = ""
        return state

    def _no(self, why: str) -> None:
        """Print the problem `why` with the board, if it is new."""
        if why != self._why:
            print(f"the engine takes nothing: {why}", flush=True)
        self._why = why
        return None
