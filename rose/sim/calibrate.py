"""From measurements of a live run to what the simulator needs, for predictions of further live
runs.

- an engine's step time: from its step log (environment variable ROSE_COSERVING_STEPS), by the
  predictor that the co-serving gate uses;
- episodes: from a run's journal, every turn with its tokens and the time until the next;
- the trainer's and the synchronisation's time: from metrics.jsonl.

Runs that were calibrated on are not to be predicted: whoever compares leaves them out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rose.lending.rules.predictor import Predictor, Work
from rose.sim.spec import Episode, StepTime


class CalibrationError(ValueError):
    """What a measurement lacks, and where."""


# --------------------------------------------------------------------------- engines


def of_steps(paths: Iterable[str | Path]) -> tuple[StepTime, float]:
    """(step time, mean relative error) fitted to the steps in these logs, JSON lines of {began,
    ended, prefill, decodes, decode_context}. Raises `OSError`, `CalibrationError` naming file and
    line."""
    paths = list(paths)
    samples = [sample for path in paths for sample in _steps(Path(path))]
    try:
        fitted = Predictor.fit_mean(samples)
    except ValueError as error:
        raise CalibrationError(f"step logs {[str(path) for path in paths]}: {error}") from None
    return StepTime(*fitted.coefficients), fitted.error[0]


def _steps(path: Path) -> Iterator[tuple[Work, float]]:
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


# --------------------------------------------------------------------------- training and
# synchronisation


@dataclass(frozen=True)
class Phases:
    """`rose.sim.spec.Trainer` with gpus=0: train = step_s + token_s x tokens; sync_s: mean from the
    step's end until the engines hold the version."""

    step_s: float
    token_s: float
    sync_s: float
    steps: int


def of_metrics(path: str | Path, tokens: dict[int, int] | None = None, skip: int = 1) -> Phases:
    """Calibrate from a run's metrics.jsonl, without its first `skip` steps, in which kernels are
    compiled. `tokens`: by step, those trained on; null: the rows' own `tokens`. Least squares with
    both coefficients >= 0. Raises `OSError`, `CalibrationError` for fewer than two steps."""
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
    """(a, b) >= 0 of the best y = a + b x."""
    spread = ((x - x.mean()) ** 2).sum()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread else 0.0
    if slope <= 0:
        return float(y.mean()), 0.0
    if y.mean() - slope * x.mean() < 0:
        return 0.0, float((x @ y) / (x @ x))
    return float(y.mean() - slope * x.mean()), slope


# --------------------------------------------------------------------------- episodes


@dataclass
class _Turn:
    context: int
    requested_at: float
    domain: str
    outcome: str
    tokens: int = 0
    ended_at: float = 0.0


@dataclass
class _Seen:
    """What a journal has of one trajectory."""

    group: str
    turns: list[_Turn] = field(default_factory=list)
    ended_at: float | None = None


def of_journal(path: str | Path, rewards: dict[str, float] | None = None) -> list[list[Episode]]:
    """The training groups of a journal (lines of {"event": ..., "actions": ...}), of each the
    trajectories that ended. `rewards`: by trajectory; null, or one that is not there: 0. Raises
    `OSError`, `CalibrationError` if none ended."""
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


def _read(path: Path) -> tuple[dict[str, _Seen], dict[str, float]]:
    """Trajectories by name, in order of their first turn; and when groups were admitted."""
    seen: dict[str, _Seen] = {}
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
            seen.setdefault(event["trajectory"], _Seen(event["group"])).turns.append(turn)
            open_turns[event["turn"]] = turn
        elif kind == "TurnProgressed" and event["turn"] in open_turns:
            open_turns[event["turn"]].tokens += event["tokens"]
        elif kind == "TurnEnded" and event["turn"] in open_turns:
            turn = open_turns.pop(event["turn"])
            turn.tokens, turn.ended_at = max(turn.tokens, event.get("tokens", 0)), at
        elif kind == "TrajectoryEnded" and event["trajectory"] in seen:
            trajectory = seen[event["trajectory"]]
            if all(turn.ended_at for turn in trajectory.turns):
                trajectory.ended_at = at
    return seen, admitted


def _episode(seen: _Seen, began: float, reward: float) -> Episode:
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
    """`rose.sim.spec.Environment` of recorded groups: each prompt is one of them at random, its
    members drawn from that group's with replacement; versions don't matter. Raises `ValueError` for
    none."""

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
    """(line, object) of a file of JSON lines; a last line that a crash tore is left out. Raises
    `CalibrationError`."""
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
