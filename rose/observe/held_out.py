"""Judge a run by its held-out evaluations: which step is the best, and does the run still improve.

All are pure functions of rows of metrics.jsonl, so that a resumed run gets the same results.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb
from typing import Any

from rose.observe.metrics import rows_of

Row = dict[str, Any]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k samples is correct, estimated from n >= k
    samples of which `correct` are: the unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al.
    2021 (arXiv 2107.03374, section 2.1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def evaluated(rows: list[Row]) -> list[Row]:
    """Return the evaluations that had episodes, ordered by step."""
    return [row for row in rows_of(rows, "eval") if row.get("eval_n")]


def score(row: Row) -> float:
    """Return the mean reward over the held-out tasks of the run's own environments or, if it has
    none, over all tasks of eval.sets."""
    return row["eval_reward"]


def best(rows: list[Row]) -> Row | None:
    """Return the best evaluation after a training step, by `score`. Among equal scores, prefer
    evaluations that used no newer weights than their step's (`later`), then the first."""
    after = (row for row in evaluated(rows) if row["step"] > 0)
    return max(after, key=lambda row: (score(row), not later(row)), default=None)


def later(row: Row) -> int:
    """Return the number of versions by which the evaluation's newest weights are newer than the
    weights of its step."""
    return row.get("eval_versions_later", 0)


def without_gain(rows: list[Row], min_gain: float) -> int:
    """Return the number of evaluations since the last improvement: a score more than `min_gain`
    above the score of the improvement before it."""
    top, count = float("-inf"), 0
    for row in evaluated(rows):
        better = score(row) > top + min_gain
        top, count = (score(row), 0) if better else (top, count + 1)
    return count


def sample_counts(samples: int) -> Iterable[int]:
    """Return the values of k above 1 for which pass@k is reported: powers of 2, and `samples`."""
    return sorted({samples, *(1 << i for i in range(samples.bit_length()))} - {1})
