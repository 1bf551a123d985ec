"""The figures of prove_promise.py's runs: their trajectories, rewards and online users' latencies.
Not a command.

A trajectory is named GROUP.MEMBER, or GROUP.MEMBERrN if it replaces one whose work was thrown away.
In a synchronous run that finished, every group admitted up to the last trained one is trained, once
and whole, whatever happened to ranks, hosts and jobs in between.

Online users' latencies beside rollouts are compared with those of serving alone. Both sides get the
same requests at the same times. Counted are those that came while both sides ran. A request that
isn't answered counts as infinitely late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rose.coordinator import journal, replay
from rose.coordinator.control import first_name
from rose.parts.simulator.study.gains import Interval, interval
from rose.scheduler import events as ev

HOUR_S = 3600.0
SLACK = 1.25  # targets of lending, as multiples of the latencies of serving alone
# Seconds of traffic that are drawn together, because requests of one burst are not independent.
WINDOW_S = 20.0
DRAWS = 2000
NAMES = {"ttft": "TTFT", "tpot": "TPOT"}
PERCENTILES = (50, 99)


class Counts(NamedTuple):
    """Trajectories of a whole run."""

    trained: int
    doubled: int  # further times that trajectories were trained
    lost: int  # not trained, though admitted in groups before the last trained one
    replaced: int  # trained in place of trajectories whose work was thrown away
    short: int  # steps whose number of trajectories isn't the batch size


def count(run: Path, steps: int, batch: int) -> Counts:
    """Count steps 1 to `steps`. Raises `ValueError` naming a file of rollouts/ that is missing."""
    trained = [[t.id for g in replay.load(run, step) for t in g] for step in range(1, steps + 1)]
    admitted: dict[str, int] = {}  # group -> index, of all attempts
    dropped: set[str] = set()  # groups that the policy chose not to train
    for path in sorted((run / "journal").glob("attempt-*.jsonl")):
        entries = journal.read(path)
        next(entries)
        for action in (action for entry in entries for action in entry.actions):
            if isinstance(action, ev.AdmitGroup):
                admitted[action.group] = action.index
            elif isinstance(action, ev.DropGroup):
                dropped.add(action.group)
    names = [name for step in trained for name in step]
    members = Counter(map(first_name, names))
    found = Counter(member.rpartition(".")[0] for member in members)
    last = max((admitted[group] for group in found if group in admitted), default=-1)
    size = max(found.values(), default=0)
    wanted = {group for group, index in admitted.items() if index <= last} - dropped
    return Counts(
        trained=len(names),
        doubled=sum(times - 1 for times in members.values()),
        lost=sum(size - found[group] for group in wanted),
        replaced=sum(first_name(name) != name for name in names),
        short=sum(len(step) != batch for step in trained),
    )


def device_hours(run: Mapping[str, Any], at: float = math.inf) -> float:
    """Return the hours of dedicated engines that a run had used `at` seconds after its submission."""
    seconds = sum(max(0.0, min(end, at) - start) for start, end in run["held"])
    return run["engines"] * seconds / HOUR_S


def rewards(run: Mapping[str, Any]) -> list[float]:
    """Return the mean reward of each step."""
    return [fmean(step) for step in run["groups"]]


def curve(runs: Sequence[Mapping[str, Any]], window: int) -> list[tuple[float, Interval]]:
    """Return (middle step, mean reward with its 95% interval) of each `window` steps of all seeds.

    Windows overlap by half, and the last one ends with the last step. The interval is over groups,
    which are the independent draws: trajectories of a group share their task."""
    steps = min((len(run["groups"]) for run in runs), default=0)
    window = min(window, steps)
    stride = max(1, window // 2)
    found = []
    for first in reversed(range(steps - window, -1, -stride) if window else ()):
        drawn = [
            one for run in runs for step in run["groups"][first : first + window] for one in step
        ]
        found.append((first + (window + 1) / 2, interval(drawn)))
    return found


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Interval:
    """Return the difference in mean reward of two sides, paired by seed, because a seed sets the
    tasks. With a single seed they are paired by step."""
    if len(ours) > 1:
        return interval([fmean(a) - fmean(b) for a, b in zip(ours, theirs, strict=True)])
    return interval([a - b for a, b in zip(ours[0], theirs[0], strict=True)])


# --------------------------------------------------------------------------- latencies of online users


class Request(NamedTuple):
    """An online request: its time and latencies in seconds. A single token has no TPOT."""

    at: float
    ttft: float
    tpot: float | None


class Ratio(NamedTuple):
    """A percentile alone and beside rollouts, in seconds, and their ratio with its 95% interval."""

    name: str
    alone: float
    beside: float
    ratio: float
    low: float
    high: float


def requests(run: Mapping[str, Any], until: float = math.inf) -> list[Request]:
    """Return the requests of a run that came before `until`."""
    found = []
    for at, ttft, tpot, done in run["requests"]:
        if at < until:
            found.append(Request(at, ttft, tpot) if done else Request(at, math.inf, math.inf))
    return found


def targets(alone: Mapping[str, Any]) -> dict[str, float]:
    """Return the targets of serving.online.slo: `SLACK` times what serving alone gave."""
    found, once = [(0, request) for request in requests(alone)], np.ones((1, 1), dtype=int)
    return {
        f"{key}_p{percent}_s": round(SLACK * float(_percentiles(found, key, percent, once)[0]), 4)
        for key in NAMES
        for percent in PERCENTILES
    }


def ratios(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Ratio]:
    """Compare the runs of each seed, (alone, beside), all seeds together.

    The interval is a bootstrap over pieces of `WINDOW_S` seconds of the traffic, the same pieces on
    both sides.
    """
    sides = [_pieces(pairs, number) for number in range(2)]
    count = 1 + max((piece for side in sides for piece, _ in side), default=0)
    once: np.ndarray = np.ones((1, count), dtype=int)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)
    found = []
    for key, name in NAMES.items():
        for percent in PERCENTILES:
            alone, beside = (_percentiles(side, key, percent, once)[0] for side in sides)
            with np.errstate(invalid="ignore"):
                all_drawn = np.divide(*(_percentiles(s, key, percent, drawn) for s in sides[::-1]))
            low, high = np.nanquantile(all_drawn, (0.025, 0.975), method="nearest")
            bounds = float(beside / alone), float(low), float(high)
            found.append(Ratio(f"{name} P{percent}", float(alone), float(beside), *bounds))
    return found


def _pieces(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], side: int
) -> list[tuple[int, Request]]:
    """Return the requests of one side of all seeds, each with the number of its piece."""
    found, first = [], 0
    for pair in pairs:
        until = min(run["served_s"] for run in pair)
        found += [(first + int(r.at // WINDOW_S), r) for r in requests(pair[side], until)]
        first += math.ceil(until / WINDOW_S)
    return found


def _percentiles(
    side: Sequence[tuple[int, Request]], key: str, percent: int, times: np.ndarray
) -> np.ndarray:
    """Return a percentile for each row of `times`, which says how often each piece counts.

    It is the value at rank p (n - 1), rounded up, as numpy's method "higher"; infinite without
    requests.
    """
    rows = [(value, at) for at, one in side if (value := getattr(one, key)) is not None]
    rows.sort()
    values = np.array([value for value, _ in rows] + [math.inf])
    weights = times[:, [at for _, at in rows]]  # (rows of times, requests)
    upto = weights.cumsum(axis=1)
    count = weights.sum(axis=1, keepdims=True)
    rank = np.ceil(percent / 100 * (count - 1))
    return values[np.where(count[:, 0] > 0, (upto <= rank).sum(axis=1), len(rows))]
