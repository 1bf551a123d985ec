"""What evaluations say of a run."""

from itertools import combinations

import pytest

from rose.observe import held_out
from rose.observe.metrics import MetricsWriter
from rose.parts.report.report import build_report


@pytest.mark.parametrize("n, k", [(1, 1), (5, 2), (6, 6), (8, 3)])
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_correct_one(n, k):
    for correct in range(n + 1):
        choices = [any(i < correct for i in chosen) for chosen in combinations(range(n), k)]
        assert held_out.pass_at_k(n, correct, k) == pytest.approx(sum(choices) / len(choices))
    assert [*map(list, map(held_out.sample_counts, (1, 2, 5)))] == [[], [2], [2, 4, 5]]


def rows(*rewards, every=5):
    """Evaluations from step 0 on; None: without episodes."""
    return [
        {"kind": "eval", "step": every * i, "eval_n": int(r is not None), "eval_reward": r}
        for i, r in enumerate(rewards)
    ]


def test_the_best_is_the_first_of_the_highest_after_a_step():
    assert held_out.best(rows(0.9, 0.2, 0.5, 0.5, 0.1))["step"] == 10
    beside = rows(0.9, 0.5, 0.5, 0.5)
    beside[1]["eval_versions_later"], beside[2]["eval_versions_later"] = 2, 0
    assert held_out.best(beside)["step"] == 10, "of equal ones one without newer weights"
    beside[1]["eval_reward"] = 0.6
    assert held_out.best(beside)["step"] == 5 and held_out.later(held_out.best(beside)) == 2
    assert held_out.best(rows(0.9, None)) is None and held_out.best([]) is None


COUNTS = [([], 0.0, 0), ([0.5], 0.0, 0), ([0.5, 0.5, 0.5], 0.0, 2), ([0.5, 0.4, 0.6], 0.0, 0)]
COUNTS += [([0.5, 0.55, 0.6], 0.1, 2)]  # 0.6 is no more than 0.1 above 0.5
COUNTS += [([0.5, 0.55, 0.65, 0.6], 0.1, 1), ([-3.0, -2.0, -2.5], 0.0, 1)]


@pytest.mark.parametrize("rewards, min_gain, count", COUNTS)
def test_evaluations_without_gain_are_counted_since_the_best_before_them(rewards, min_gain, count):
    assert held_out.without_gain(rows(*rewards), min_gain) == count


def test_the_report_says_which_evaluations_have_newer_weights_in_them(tmp_path):
    metrics = MetricsWriter(tmp_path, tensorboard=False)
    for row in rows(0.1, 0.5, 0.5, 0.2):
        later = 2 if row["step"] == 5 else 0
        metrics.write(row["step"], row | {"eval_successes": 0, "eval_versions_later": later})
    assert "(step 10)" in build_report(tmp_path).read_text(), "the best without newer weights"
    metrics.write(5, rows(0, 0.6)[1] | {"eval_successes": 0, "eval_versions_later": 2})
    metrics.close()
    assert "(step 5, weights up to 2 versions newer)" in build_report(tmp_path).read_text()
