"""Rows of metrics.jsonl hold what the step did."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.coordinator import step_metrics
from rose.coordinator.groups import StepCounts
from rose.coordinator.turn_log import TurnLog
from rose.coordinator.turns import TurnHub
from rose.coordinator.worker import Decoding, Worker
from rose.observe.recorder import NullRecorder
from tests.coordinator.conftest import trajectory

TIMES = {"rollout": 3.0, "idle": 1.0, "train": 2.0, "sync": 1.0}


def hub(**workers):
    """A turn hub after a step of these workers, from which version 4 came."""
    nobody, log = SimpleNamespace(), TurnLog(Path(), 0, None)
    made = TurnHub(nobody, print, None, NullRecorder(), print, print, 100, log)
    made.weights.version, made.weights.sync_bytes, made.weights.sync_pause_s = 4, 100, 0.5
    made.workers.update(workers)
    made.workers.restarts, made.counts.returned, made.ledger.migrations = 1, 1, 2
    return made


def row(groups, of=None, times=TIMES, at=7.0):
    """The row of a step that a hub is behind."""
    counts, failures = StepCounts(3, 50, 2, 9, 4), SimpleNamespace(failed=1, given_up=0)
    rollouts = SimpleNamespace(groups=failures, counts=counts, staleness_max=2)
    return step_metrics.step_row(groups, {"loss": 0.25}, times, of or hub(), rollouts, at)


def worker(tokens, busy_s):
    """It was busy in the step's first `busy_s` seconds."""
    made = Worker(10, 1, 4, tokens=tokens)
    made.turn_opened(0.0)
    made.turn_closed(busy_s)
    return made


def test_rates_are_of_the_rollout_phase_and_idle_is_what_an_engine_had_nothing_to_do():
    workers = {"rollout-0": worker(400, 4.0), "rollout-1": worker(200, 2.0)}
    found = row([[trajectory("g0.0")]], of=hub(**workers))
    assert found["tokens_per_s"] == 150 and found["tokens_per_s/rollout-0"] == 100
    assert found["time_idle"] == 1.0 and found["time_step"] == 7.0
    assert found["engine_utilisation"] == pytest.approx(3.0 / 7.0)


def test_means_and_counts_are_over_every_trajectory_of_every_group():
    first = [trajectory("g0.0", 1.0, 8), trajectory("g0.1", 0.0, 4, invalid_calls=2)]
    second = [trajectory("g1.0", 0.0, 12, truncated=True), trajectory("g1.1", 0.0, 8)]
    found = row([first, second])
    means = {"success": 0.25, "reward_mean": 0.25, "response_tokens_mean": 8, "loss": 0.25}
    counts = {"response_tokens_max": 12, "invalid_calls": 2, "truncated": 1, "groups_dropped": 3}
    counts |= {"failed_trajectories": 1, "migrations": 2, "engine_restarts": 1, "hosts_lost": 2}
    assert found.items() >= (means | counts | {"returned_turns": 1, "kind": "step"}).items()


def test_every_response_is_in_one_bar_of_the_histogram_and_no_engine_made_them():
    lengths = [1, 8, 9, 11, 30, 200]
    found = row([[trajectory(f"g0.{i}", 0.0, n) for i, n in enumerate(lengths)]])
    bars = found["response_hist"]
    assert sum(count for _, count in bars) == len(lengths)
    assert bars[0] == [8, 2] and bars[-1][0] >= 200 > bars[-2][0]
    # A run from saved trajectories has no engines.
    assert found["tokens_per_s"] == 0 and found["engine_utilisation"] == 0.0


def test_staleness_counts_versions_between_sampling_and_training():
    for made_by, mean, most in (((3, 3), 0.0, 0), ((1, 1), 2.0, 2), ((3, 1), 1.0, 2)):
        found = row([[trajectory(f"g0.{i}", version=by) for i, by in enumerate(made_by)]])
        assert found["staleness_mean"] == mean and found["staleness_max"] == most
        assert found["group_staleness_max"] == 2 and found["tokens_dropped"] == 50


def test_where_rollouts_go_on_in_training_the_rate_is_of_all_that_time():
    engine = Worker(10, 1, 4)
    made = hub(**{"rollout-0": engine})
    engine.turn_opened(0.0)  # and it runs on
    made.begin_step()
    engine.tokens = 700
    ended = made.counts.token_at = made.counts.began_at + 7.0
    times = {"rollout": 1.0, "idle": 0.0, "train": 5.0, "sync": 1.0}
    found = row([[trajectory("g0.0")]], made, times, ended)
    assert found["tokens_per_s"] == pytest.approx(100)
    assert found["engine_utilisation"] == pytest.approx(1.0)


def test_rewards_and_turns_are_counted_by_value_and_tasks_by_name():
    named = [trajectory(f"g0.{i}", i % 2, 8, task="row 1", domain="sums") for i in range(3)]
    found = row([[*named, trajectory("g0.3", 0.5, 8, task="row 2", domain="sums")]])
    assert found["reward_values"] == [[0.0, 2], [0.5, 1], [1.0, 1]]
    assert found["turn_values"] == [[2.0, 4]]
    many = step_metrics.value_counts([*range(1000), 1e15])
    assert len(many) <= step_metrics.MOST_VALUES and (many[0][1], many[-1][1]) == (1000, 1)
    assert found["task_successes"] == {"sums: row 1": [1, 3], "sums: row 2": [1, 1]}
    assert "task_successes" not in row([[trajectory("g0.0")]])


def test_an_evaluation_counts_its_successes_also_of_each_task(make_config):
    groups = [[trajectory(f"e0-{i}.0", i % 2, task=f"row {i}", domain="sums")] for i in range(3)]
    found = step_metrics.evaluation(groups, make_config(), 3)
    assert (found["eval_n"], found["eval_successes"]) == (3, 1)
    assert found["eval_success"] == pytest.approx(1 / 3)
    assert not [key for key in found if key.startswith(("eval_pass", "eval_tasks"))]
    successes = {"sums: row 0": [0, 1], "sums: row 1": [1, 1], "sums: row 2": [0, 1]}
    assert found["eval_task_successes"] == successes


def test_of_several_samples_a_task_counts_once_in_pass_at_k():
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    groups = [[trajectory("e", reward) for reward in each] for each in rewards]
    found = step_metrics.evaluation_row(groups)
    assert (found["eval_n"], found["eval_tasks"], found["eval_successes"]) == (10, 3, 3)
    assert found["eval_pass_at_2"] == pytest.approx((0.5 + 0.0 + (1 - 1 / 6)) / 3)
    assert found["eval_pass_at_4"] == 1.0, "of the tasks that have four samples"


MIXED = [
    trajectory("g0.0", 1.0, 8, domain="lake"),
    trajectory("g0.1", 0.0, 4, domain="lake", invalid_calls=2),
    trajectory("g1.0", 0.0, 12, domain="sums", truncated=True),
]


def test_each_member_of_a_mixture_has_values_of_its_own_and_one_without_trajectories_their_number():
    found = step_metrics.by_member(["lake", "sums", "words"], MIXED)
    lake = {"trajectories": 2, "success": 0.5, "reward_mean": 0.5, "turns_mean": 2.0}
    lake |= {"response_tokens_mean": 6.0, "invalid_calls": 2, "truncated": 0}
    sums = {"trajectories": 1, "success": 0.0, "reward_mean": 0.0, "turns_mean": 2.0}
    sums |= {"response_tokens_mean": 12.0, "invalid_calls": 0, "truncated": 1}
    expected = {f"{key}/lake": value for key, value in lake.items()} | {"trajectories/words": 0}
    assert found == expected | {f"{key}/sums": value for key, value in sums.items()}
    assert step_metrics.by_member([], MIXED) == {}


def test_each_member_is_evaluated_on_the_held_out_tasks_that_are_its_own():
    groups = [[each] for each in MIXED]
    found = step_metrics.evaluation_by_domain(["lake", "sums", "words"], groups)
    expected = {"n/lake": 2, "successes/lake": 1, "success/lake": 0.5}
    expected |= {"n/sums": 1, "reward/sums": 0.0, "turns/sums": 2.0}
    assert {key: found[f"eval_{key}"] for key in expected} == expected
    assert "eval_n/words" not in found and step_metrics.evaluation_by_domain([], [MIXED]) == {}


def test_engines_steps_are_counted_from_heartbeats_over_restarts():
    decoding = Decoding()

    def load(incarnation, tokens, steps, drafted, accepted):
        counts = (tokens, 0, 0, steps, drafted, accepted)
        decoding.count(p.WorkerLoad("a", incarnation, 1, 0, 0.0, *counts))

    load(1, 100, 50, 0, 0)
    assert decoding.row() == {"tokens_per_engine_step": 2.0}
    decoding.begin_step()
    load(1, 160, 70, 40, 20), load(2, 20, 20, 10, 0)
    expected = {"tokens_per_engine_step": 2.0, "drafted_tokens": 50, "accepted_tokens": 20}
    assert decoding.row() == expected
