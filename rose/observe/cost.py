"""What a run costs: device-hours, its own and borrowed, tokens, and energy where devices tell it.

Each attempt has a file of its own, status/cost/attempt-N.json, written anew every few seconds, so
that a killed one is counted, too. A device is a GPU; of a run on CPUs it is a trainer rank or an
engine. Its own count from the coordinator's start to its end, borrowed ones while they are joined,
also where an online engine uses them besides; energy is that of the run's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rose.config import Config
from rose.files import write_whole

WRITE_S = 5.0
HOUR_S, KWH_J = 3600.0, 3.6e6


class Cost(msgspec.Struct):
    """Of an attempt, or of several."""

    attempts: int = 1
    dedicated_s: float = 0.0  # device-seconds
    borrowed_s: float = 0.0
    made: int = 0  # tokens, by all engines
    made_borrowed: int = 0
    trained: int = 0  # tokens, each as often as a step had it
    energy_j: float | None = None  # null: no device told it

    def __add__(self, other: Cost) -> Cost:
        told = [e for e in (self.energy_j, other.energy_j) if e is not None]
        return Cost(
            self.attempts + other.attempts,
            self.dedicated_s + other.dedicated_s,
            self.borrowed_s + other.borrowed_s,
            self.made + other.made,
            self.made_borrowed + other.made_borrowed,
            self.trained + other.trained,
            sum(told) if told else None,
        )

    @property
    def device_hours(self) -> tuple[float, float]:
        """(dedicated, borrowed)."""
        return self.dedicated_s / HOUR_S, self.borrowed_s / HOUR_S

    @property
    def kwh(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / KWH_J

    def text(self) -> str:
        """In one line."""
        hours = [f"{hours:,.3g}" for hours in self.device_hours]
        parts = [
            f"{hours[0]} device-hours dedicated, {hours[1]} borrowed",
            f"{self.made:,} tokens made ({self.made_borrowed:,} by borrowed engines), "
            f"{self.trained:,} trained",
        ]
        if self.kwh is not None:
            parts.append(f"{self.kwh:,.3g} kWh")
        if self.attempts > 1:
            parts.append(f"{self.attempts} attempts")
        return "; ".join(parts)


class Meter:
    """Counts one attempt's. `at`: seconds of any steady clock, everywhere."""

    def __init__(self, config: Config, run_dir: Path, attempt: int, at: float) -> None:
        self.cost = Cost()
        self._path = _folder(run_dir) / f"attempt-{attempt:03d}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._dedicated, self._each = dedicated(config), config.rollout.tensor_parallel
        self._at = self._written = at
        self._counters: dict[str, tuple[float, float]] = {}  # device -> (first, last), joules

    def tick(self, at: float, borrowed: int, made: Mapping[str, int]) -> None:
        """`borrowed`: engines joined since the last; `made`: tokens since the start of dedicated
        and borrowed ones."""
        elapsed, self._at = at - self._at, at
        self.cost.dedicated_s += elapsed * self._dedicated
        self.cost.borrowed_s += elapsed * borrowed * self._each
        self.cost.made, self.cost.made_borrowed = sum(made.values()), made["borrowed"]
        if at - self._written >= WRITE_S:
            self._written = at
            self.write()

    def trained(self, tokens: float) -> None:
        self.cost.trained += int(tokens)

    def energy(self, counters: Mapping[str, float]) -> None:
        """What devices say they have used so far, in joules; one of which two ranks tell counts
        once. A counter that falls, as of a driver that was loaded anew, begins again."""
        for device, now in counters.items():
            first, last = self._counters.get(device, (now, now))
            self._counters[device] = (first if now >= last else now - (last - first), now)
        if self._counters:
            self.cost.energy_j = sum(last - first for first, last in self._counters.values())

    def write(self) -> None:
        write_whole(self._path, msgspec.json.encode(self.cost))


def dedicated(config: Config) -> int:
    """Devices of the run's own."""
    rolls = config.rollout.replay is None
    engines = config.rollout.workers * config.rollout.tensor_parallel if rolls else 0
    ranks = config.trainer.ranks
    return max(ranks, engines) if config.shares_devices else ranks + engines


def of_attempts(run_dir: Path | str) -> tuple[dict[int, Cost], list[str]]:
    """(attempt -> what it cost so far, each damaged file and why it is left out)."""
    found, damaged = {}, []
    for path in sorted(_folder(run_dir).glob("attempt-*.json")):
        try:
            one = msgspec.json.decode(path.read_bytes(), type=Cost)
            found[int(path.stem.removeprefix("attempt-"))] = one
        except (OSError, ValueError) as error:
            damaged.append(f"{path} is damaged: {error}")
    return found, damaged


def total(attempts: Iterable[Cost]) -> Cost | None:
    """Of all together; None of none."""
    found = list(attempts)
    return sum(found[1:], found[0]) if found else None


def _folder(run_dir: Path | str) -> Path:
    return Path(run_dir) / "status" / "cost"
