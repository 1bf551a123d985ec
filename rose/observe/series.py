"""Summarise rows of metrics.jsonl: means, held-out success rates, and a warning about steps without
a gradient. Intervals are Wilson's for one rate, and Newcombe's for a difference of two rates."""

from __future__ import annotations

import math
from typing import Any

Z_95 = 1.959963984540054  # two-sided 95% quantile of the standard normal
UNTAUGHT_STEPS = 3  # steps in a row without a gradient, from which the user is warned


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Return the 95% score interval (low, high) of a binomial rate (Wilson 1927); (0, 1) if n is 0.
    Raises ValueError unless 0 <= successes <= n."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} of n={n}: needs 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    rate, square = successes / n, Z_95 * Z_95
    center = (rate + square / (2 * n)) / (1 + square / n)
    half = Z_95 / (1 + square / n) * math.sqrt(rate * (1 - rate) / n + square / (4 * n * n))
    low = 0.0 if successes == 0 else center - half
    return low, 1.0 if successes == n else center + half


def difference_interval(before: tuple[float, int], after: tuple[float, int]) -> tuple[float, float]:
    """Return the 95% interval of rate(after) - rate(before), each (successes, n) with n > 0
    (Newcombe 1998, method 10)."""
    p1, p2 = before[0] / before[1], after[0] / after[1]
    (l1, u1), (l2, u2) = wilson_interval(*before), wilson_interval(*after)
    gain = p2 - p1
    return gain - math.hypot(p2 - l2, u1 - p1), gain + math.hypot(u2 - p2, p1 - l1)


def untaught(steps: list[dict[str, Any]]) -> str:
    """Return a warning if the last `UNTAUGHT_STEPS` steps had no gradient; "" otherwise."""
    last = steps[-UNTAUGHT_STEPS:]
    if len(last) < UNTAUGHT_STEPS or any(row.get("grad_norm") != 0 for row in last):
        return ""
    words = f"the last {UNTAUGHT_STEPS} steps taught nothing: their gradient was 0"
    if any(row.get("groups_equal") != 1 for row in last):
        return f"{words}, though rewards within groups differed; all weights of tokens were 0"
    rewards = [row["reward_mean"] for row in last if row.get("reward_mean") is not None]
    mean = f" (mean {sum(rewards) / len(rewards):.3g})" if rewards else ""
    return (
        f"{words}, since in each group all rewards were equal{mean}; tasks of another difficulty, "
        "larger groups (rollout.group_size) or a reward in parts make them differ"
    )


def mean_of(rows: list[dict[str, Any]], key: str) -> float | None:
    """Return the mean of the rows' numbers at `key`, to five digits; None without a number."""
    values = [row[key] for row in rows if isinstance(row.get(key), (int, float))]
    return float(f"{sum(values) / len(values):.5g}") if values else None


def evaluations(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the held-out evaluations that have episodes, with rate and Wilson 95% interval. The
    interval counts each task as one sample, because further samples of a task may all be alike."""
    result = []
    for row in rows:
        n = int(row.get("eval_n") or 0)
        if n == 0:
            continue
        successes = int(row.get("eval_successes", round((row.get("eval_success") or 0.0) * n)))
        tasks = int(row.get("eval_tasks") or n)
        low, high = wilson_interval(successes * tasks / n, tasks)
        rates = {"rate": successes / n, "low": low, "high": high, "reward": row.get("eval_reward")}
        counts = {"step": row["step"], "n": n, "successes": successes, "tasks": tasks}
        counts["later"] = int(row.get("eval_versions_later") or 0)
        result.append(counts | rates | {"passes": _passes(row)})
    return result


def _passes(row: dict[str, Any]) -> dict[int, float]:
    """Return k -> pass@k."""
    known = ((key.removeprefix("eval_pass_at_"), value) for key, value in row.items())
    return {int(k): value for k, value in known if k.isdecimal()}


def gain_interval(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, float]:
    """Return `difference_interval` for two results of `evaluations`."""
    a, b = ((e["rate"] * e["tasks"], e["tasks"]) for e in (before, after))
    return difference_interval(a, b)
