"""Count the trajectories of prove_promise.py's runs, from their files. Pure; not a command.

A trajectory is named GROUP.MEMBER, or GROUP.MEMBERrN if it replaces one whose work was thrown away.
In a synchronous run that finished, every group admitted up to the last trained one is trained, once
and whole, whatever happened to ranks, hosts and jobs in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rose.coordinator import journal, replay
from rose.coordinator.control import first_name
from rose.parts.simulator.study.gains import Interval, interval
from rose.scheduler import events as ev

HOUR_S = 3600.0


class Counts(NamedTuple):
    """Trajectories of a whole run."""

    trained: int
    doubled: int  # further times that trajectories were trained
    lost: int  # not trained, though admitted in groups before the last trained one
    replaced: int  # trained in place of trajectories whose work was thrown away
    short: int  # steps whose number of trajectories isn't the batch size


def count(run: Path, steps: int, batch: int) -> Counts:
    """Count steps 1 to `steps`. Raises `ValueError` naming a file of rollouts/ that is missing."""
    trained = [replay.load(run, step) for step in range(1, steps + 1)]
    admitted: dict[str, int] = {}
    dropped: set[str] = set()
    for path in sorted((run / "journal").glob("attempt-*.jsonl")):
        entries = journal.read(path)
        next(entries)
        for entry in entries:
            for action in entry.actions:
                if isinstance(action, ev.AdmitGroup):
                    admitted[action.group] = action.index
                elif isinstance(action, ev.DropGroup):
                    dropped.add(action.group)
    return tally(
        [[t.id for group in step for t in group] for step in trained], admitted, dropped, batch
    )


def tally(
    steps: Sequence[Sequence[str]], admitted: dict[str, int], dropped: set[str], batch: int
) -> Counts:
    """Count by names. `steps`: names of the trajectories that each step trained; `admitted`: group
    -> index, of all attempts; `dropped`: groups that the policy chose not to train.
    """
    names = [name for step in steps for name in step]
    members = Counter(first_name(name) for name in names)
    found = Counter(member.rpartition(".")[0] for member in members)
    last = max((admitted[group] for group in found if group in admitted), default=-1)
    size = max(found.values(), default=0)
    wanted = {group for group, index in admitted.items() if index <= last} - dropped
    return Counts(
        trained=len(names),
        doubled=sum(times - 1 for times in members.values()),
        lost=sum(size - found[group] for group in wanted),
        replaced=sum(first_name(name) != name for name in names),
        short=sum(len(step) != batch for step in steps),
    )


def held(rows: Iterable[str], component: int, now: float) -> list[tuple[float, float]]:
    """Return from when to when a job held the nodes of one of its components, one pair per attempt,
    in seconds of the wall's clock.

    `rows` are those of sacct --duplicates --parsable2 --noheader --format=JobID,Start,End; an
    attempt that runs ends `now`. An attempt that never started has no pair."""
    found = []
    for row in rows:
        job, start, end = row.strip().split("|")
        if job.partition("+")[2] == str(component) and start[:1].isdigit():
            until = datetime.fromisoformat(end).timestamp() if end[:1].isdigit() else now
            found.append((datetime.fromisoformat(start).timestamp(), until))
    return sorted(found)


def device_hours(run: Mapping[str, Any], at: float = math.inf) -> float:
    """Return the hours of dedicated engines that a run had used `at` seconds after its submission."""
    seconds = sum(max(0.0, min(end, at) - start) for start, end in run["held"])
    return run["engines"] * seconds / HOUR_S


def group_rewards(run: Path, steps: int) -> list[list[float]]:
    """Return each group's mean reward, by step. Raises `ValueError` naming a missing file."""
    trained = [replay.load(run, step) for step in range(1, steps + 1)]
    return [[fmean(t.reward for t in group) for group in step] for step in trained]


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
