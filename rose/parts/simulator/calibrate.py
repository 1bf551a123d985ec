"""Calibration of the simulator on measurements of a live run, to predict other live runs.

- `of_steps` fits an engine's step time to its step log (environment variable ROSE_COSERVING_STEPS)
  with the predictor that the co-serving gate uses.
- `of_journal` takes episodes from a run's journal: every turn with its tokens and the time until
  the next turn.
- `of_metrics` fits the times of training and synchronisation to metrics.jsonl.

Compare the simulator only with live runs that it was not calibrated on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rose.parts.lending.rules.predictor import Predictor, Work
from rose.parts.simulator.spec import Episode, StepTime


class CalibrationError(ValueError):
    """An error that names what a measurement lacks, and where."""


def of_steps(paths: Iterable[str | Path]) -> tuple[StepTime, float]:
    """Fit the step time to the steps in these logs, and return it with its mean relative error. A
    log has JSON lines of {began, ended, prefill, decodes, decode_context}. Raises `OSError`, and
    `CalibrationError` naming file and line."""
    paths = list(paths)
    samples = [sample for path in paths for sample in _steps(Path(path))]
    try:
        fitted = Predictor.fit_mean(samples)
    except ValueError as error:
        raise CalibrationError(f"step logs {[str(path) for path in paths]}: {error}") from None
    return StepTime(*fitted.coefficients), fitted.error[0]


def _steps(path: Path) -> Iterator[tuple[Work, float]]:
    """Yield the work and the seconds of each step in an engine's step log."""
    for line, found in _lines(path):
        try:
            work = Work(
                tuple((new, before) for new, before in found["prefill"]),
                found["decodes"],
                found["decode_context"],
            )
            yield work, found["ended"] - found["began"]
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(
                f"{path}, line {line}: no step of an engine: {error!r}"
            ) from None


@dataclass(frozen=True)
class Phases:
    """Fitted times of a live trainer: a step takes step_s + token_s x tokens, as in a
    `spec.Trainer` with gpus=0."""

    step_s: float
    token_s: float
    sync_s: float  # mean seconds from the end of training until the engines hold the version
    steps: int  # number of steps in the fit


def of_metrics(path: str | Path, tokens: dict[int, int] | None = None, skip: int = 1) -> Phases:
    """Fit `Phases` to a run's metrics.jsonl by least squares, with step_s and token_s >= 0.

    The first `skip` steps, in which kernels are compiled, are left out. `tokens` has the trained
    tokens of each step; None: the rows' own `tokens`. Raises `OSError`, and `CalibrationError` for
    fewer than two steps.
    """
    rows = [row for _, row in _lines(Path(path)) if row.get("kind") == "step"][skip:]
    if len(rows) < 2:
        raise CalibrationError(
            f"{path}: {len(rows)} training steps after the first {skip}; at least 2 are needed"
        )
    seconds = np.array([row["time_train"] for row in rows])
    counts = np.array(
        [row["tokens"] if tokens is None else tokens[row["step"]] for row in rows], float
    )
    step_s, token_s = _line(counts, seconds)
    return Phases(step_s, token_s, float(np.mean([row["time_sync"] for row in rows])), len(rows))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return (a, b), both >= 0, of the least-squares fit y = a + b x."""
    spread = ((x - x.mean()) ** 2).sum()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread else 0.0
    if slope <= 0:
        return float(y.mean()), 0.0
    if y.mean() - slope * x.mean() < 0:
        return 0.0, float((x @ y) / (x @ x))
    return float(y.mean() - slope * x.mean()), slope


@dataclass
class _Turn:
    """The record of one turn in a journal."""

    context: int
    requested_at: float
    domain: str
    outcome: str  # result of the tool call before the turn
    tokens: int = 0
    ended_at: float = 0.0


@dataclass
class _Recording:
    """The record of one trajectory in a journal."""

    group: str
    turns: list[_Turn] = field(default_factory=list)
    ended_at: float | None = None


def of_journal(path: str | Path, rewards: dict[str, float] | None = None) -> list[list[Episode]]:
    """Return the training groups of a journal, each as the episodes of its ended trajectories.

    A line of the journal is {"event": ..., "actions": ...}. `rewards` maps trajectories to rewards;
    missing rewards are 0. Raises `OSError`, and `CalibrationError` if no trajectory ended.
    """
    seen, admitted = _read(Path(path))
    groups: dict[str, list[Episode]] = {}
    for name, trajectory in seen.items():
        if trajectory.ended_at is not None and trajectory.group.startswith("g"):
            reward = (rewards or {}).get(name, 0.0)
            began = admitted.get(trajectory.group, trajectory.turns[0].requested_at)
            groups.setdefault(trajectory.group, []).append(_episode(trajectory, began, reward))
    if not groups:
        raise CalibrationError(f"{path}: no trajectory of a training step ended in it")
    return list(groups.values())


def _read(path: Path) -> tuple[dict[str, _Recording], dict[str, float]]:
    """Return (trajectory -> record, in order of the first turns; group -> time of admission)."""
    seen: dict[str, _Recording] = {}
    admitted: dict[str, float] = {}
    open_turns: dict[str, _Turn] = {}
    for _, entry in _lines(path):
        event: dict[str, Any] = entry.get("event", {})
        kind, at = event.get("type"), event.get("at", 0.0)
        for action in entry.get("actions", ()):
            if action["type"] == "AdmitGroup":
                admitted.setdefault(action["group"], at)
        if kind == "TurnRequested":
            turn = _Turn(
                event["context_tokens"], at, event.get("domain", ""), event.get("outcome", "")
            )
            seen.setdefault(event["trajectory"], _Recording(event["group"])).turns.append(turn)
            open_turns[event["turn"]] = turn
        elif kind == "TurnProgressed" and event["turn"] in open_turns:
            open_turns[event["turn"]].tokens += event["tokens"]
        elif kind == "TurnEnded" and event["turn"] in open_turns:
            turn = open_turns.pop(event["turn"])
            turn.tokens, turn.ended_at = max(turn.tokens, event.get("tokens", 0)), at
        elif kind == "TrajectoryEnded" and event["trajectory"] in seen:
            trajectory = seen[event["trajectory"]]
            if not event.get("failed") and all(turn.ended_at for turn in trajectory.turns):
                trajectory.ended_at = at
    return seen, admitted


def _episode(seen: _Recording, began: float, reward: float) -> Episode:
    """Convert the record of a trajectory whose group was admitted at `began`."""
    turns = seen.turns
    tokens = [max(1, turn.tokens) for turn in turns]
    after = [turn.requested_at for turn in turns[1:]] + [seen.ended_at]
    context = [turn.context for turn in turns[1:]]
    observed = [
        max(0, c - turn.context - made)
        for c, turn, made in zip(context, turns, tokens, strict=False)
    ] + [0]
    return Episode(
        prompt_tokens=turns[0].context,
        output_tokens=tuple(tokens),
        observation_tokens=tuple(observed),
        tool_s=tuple(max(0.0, at - turn.ended_at) for at, turn in zip(after, turns, strict=False)),
        failed=tuple([turn.outcome == "failed" for turn in turns[1:]] + [False]),
        reward=reward,
        reset_s=max(0.0, turns[0].requested_at - began),
        domain=turns[0].domain,
    )


class Recorded:
    """A `rose.parts.simulator.spec.Environment` of recorded groups. For each prompt it picks a
    recorded group at random and draws episodes from it with replacement, whatever the version.
    Raises `ValueError` if there is no group, or a group is empty."""

    def __init__(self, groups: list[list[Episode]], max_new_tokens: int) -> None:
        if not groups or not all(groups):
            raise ValueError("no recorded episodes to draw from")
        self._groups, self.max_new_tokens = groups, max_new_tokens

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[Episode]:
        members = self._groups[draw.integers(len(self._groups))]
        return [members[at] for at in draw.integers(len(members), size=size)]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a file of JSON lines, without a last line that a crash left
    incomplete. Raises `CalibrationError` for a line that is not JSON."""
    with path.open("rb") as file:
        for line, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                found = json.loads(text)
            except ValueError:
                raise CalibrationError(f"{path}, line {line}: no JSON") from None
            if isinstance(found, dict):
                yield line, found
