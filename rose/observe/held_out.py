"""What held-out evaluations say of a run: which step is the best, and whether it still gets better.

Pure functions of rows of metrics.jsonl, so that an interrupted run comes to the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb
from typing import Any

from rose.observe.metrics import rows_of

Row = dict[str, Any]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that one of k samples is correct, by n >= k of which `correct` are: the unbiased
    estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, section 2.1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def evaluated(rows: list[Row]) -> list[Row]:
    """Evaluations by step, those without episodes left out."""
    return [row for row in rows_of(rows, "eval") if row.get("eval_n")]


def score(row: Row) -> float:
    """Mean reward over the held-out tasks of the run's own environments; without these, over all
    tasks of eval.sets."""
    return row["eval_reward"]


def best(rows: list[Row]) -> Row | None:
    """The evaluation with the highest score of those after a training step, of equal ones the
    first that has no newer weights in it, else the first."""
    after = (row for row in evaluated(rows) if row["step"] > 0)
    return max(after, key=lambda row: (score(row), not later(row)), default=None)


def later(row: Row) -> int:
    """Versions by which its newest token's weights are newer than its step's."""
    return row.get("eval_versions_later", 0)


def without_gain(rows: list[Row], min_gain: float) -> int:
    """Evaluations in a row, up to the last, that were not better by more than `min_gain` than the
    best before them."""
    top, count = float("-inf"), 0
    for row in evaluated(rows):
        better = score(row) > top + min_gain
        top, count = (score(row), 0) if better else (top, count + 1)
    return count


def sample_counts(samples: int) -> Iterable[int]:
    """k of pass@k that so many samples tell of: powers of 2, and all of them."""
    return sorted({samples, *(1 << i for i in range(samples.bit_length()))} - {1})
