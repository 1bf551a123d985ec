"""Rows of metrics.jsonl hold what the step did."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.coordinator.groups import StepCounts
from rose.coordinator.step_metrics import (
    MOST_VALUES,
    by_member,
    evaluation,
    evaluation_by_domain,
    evaluation_row,
    step_row,
    value_counts,
)
from rose.coordinator.turn_log import TurnLog
from rose.coordinator.turns import TurnHub
from rose.coordinator.worker import Decoding, Worker
from rose.observe.recorder import NullRecorder


def trajectory(name, reward, response, version=3, **more):
    made = [version] * response
    return p.Trajectory(
        name,
        name.partition(".")[0],
        p.Phase.TRAIN,
        p.pack_tokens([0, *made]),
        b"\0" + b"\1" * response,
        p.pack_floats([0.0] * (response + 1)),
        p.pack_tokens([-1, *made]),
        reward,
        reward > 0,
        turns=2,
        response_tokens=response,
        **more,
    )


def hub(version, **workers):
    """A turn hub after a step of these workers."""
    made = TurnHub(
        SimpleNamespace(),
        lambda *_: None,
        None,
        NullRecorder(),
        lambda *_: None,
        lambda *_: None,
        100,
        TurnLog(Path(), 0, None),
    )
    made.weights.version, made.weights.sync_bytes, made.weights.sync_pause_s = version, 100, 0.5
    made.workers.update(workers)
    made.workers.restarts, made.counts.returned, made.ledger.migrations = 1, 1, 2
    return made


def row(groups, times=None, at=7.0, **workers):
    times = times or {"rollout": 3.0, "idle": 1.0, "train": 2.0, "sync": 1.0}
    rollouts = SimpleNamespace(
        groups=SimpleNamespace(failed=1, given_up=0),
        counts=StepCounts(3, 50, 2, 9, 4),
        staleness_max=2,
    )
    return step_row(groups, {"loss": 0.25}, times, hub(4, **workers), rollouts, at)


def worker(tokens, busy_s):
    """It was busy in the step's first `busy_s` seconds."""
    made = Worker(10, 1, 4, tokens=tokens)
    made.turn_opened(0.0)
    made.turn_closed(busy_s)
    return made


def test_rates_are_of_the_rollout_phase_and_idle_is_what_an_engine_had_nothing_to_do():
    found = row(
        [[trajectory("g0.0", 1.0, 8)]],
        **{"rollout-0": worker(400, 4.0), "rollout-1": worker(200, 2.0)},
    )
    assert found["tokens_per_s"] == 150 and found["tokens_per_s/rollout-0"] == 100
    assert found["time_idle"] == 1.0 and found["time_step"] == 7.0
    assert found["engine_utilisation"] == pytest.approx(3.0 / 7.0)


def test_means_and_counts_are_over_every_trajectory_of_every_group():
    found = row(
        [
            [trajectory("g0.0", 1.0, 8), trajectory("g0.1", 0.0, 4, invalid_calls=2)],
            [trajectory("g1.0", 0.0, 12, truncated=True), trajectory("g1.1", 0.0, 8)],
        ]
    )
    assert found["success"] == 0.25 and found["reward_mean"] == 0.25
    assert found["response_tokens_mean"] == 8 and found["response_tokens_max"] == 12
    assert found["invalid_calls"] == 2 and found["truncated"] == 1
    assert (found["failed_trajectories"], found["groups_dropped"], found["migrations"]) == (1, 3, 2)
    assert (found["engine_restarts"], found["returned_turns"]) == (1, 1)
    assert (found["hosts_lost"], found["trajectories_restarted"]) == (2, 9)
    assert found["loss"] == 0.25 and found["kind"] == "step"


def test_every_response_is_in_one_bar_of_the_histogram():
    lengths = [1, 8, 9, 11, 30, 200]
    bars = row([[trajectory(f"g0.{i}", 0.0, n) for i, n in enumerate(lengths)]])["response_hist"]
    assert sum(count for _, count in bars) == len(lengths)
    assert bars[0] == [8, 2] and bars[-1][0] >= 200 > bars[-2][0]


@pytest.mark.parametrize(
    "made_by, mean, most", [((3, 3), 0.0, 0), ((1, 1), 2.0, 2), ((3, 1), 1.0, 2)]
)
def test_staleness_counts_versions_between_sampling_and_training(made_by, mean, most):
    found = row(
        [[trajectory(f"g0.{i}", 1.0, 8, version=version) for i, version in enumerate(made_by)]]
    )
    assert found["staleness_mean"] == mean and found["staleness_max"] == most
    assert found["group_staleness_max"] == 2 and found["tokens_dropped"] == 50


def test_where_rollouts_go_on_in_training_the_rate_is_of_all_that_time():
    engine = Worker(10, 1, 4)
    made = hub(4, **{"rollout-0": engine})
    engine.turn_opened(0.0)  # and it runs on
    made.begin_step()
    engine.tokens = 700
    began = made.counts.began_at
    made.counts.token_at = began + 7.0
    rollouts = SimpleNamespace(
        groups=SimpleNamespace(failed=0, given_up=0), counts=StepCounts(), staleness_max=0
    )
    times = {"rollout": 1.0, "idle": 0.0, "train": 5.0, "sync": 1.0}
    found = step_row([[trajectory("g0.0", 1.0, 8)]], {}, times, made, rollouts, began + 7.0)
    assert found["tokens_per_s"] == pytest.approx(100) and found[
        "engine_utilisation"
    ] == pytest.approx(1.0)


def test_a_run_from_saved_trajectories_has_no_engines():
    found = row([[trajectory("g0.0", 1.0, 8)]])
    assert found["tokens_per_s"] == 0 and found["engine_utilisation"] == 0.0


def test_rewards_and_turns_are_counted_by_value_and_tasks_by_name():
    named = [trajectory(f"g0.{i}", i % 2, 8, task="row 1", domain="sums") for i in range(3)]
    found = row([[*named, trajectory("g0.3", 0.5, 8, task="row 2", domain="sums")]])
    assert found["reward_values"] == [[0.0, 2], [0.5, 1], [1.0, 1]]
    assert found["turn_values"] == [[2.0, 4]]
    assert found["task_successes"] == {"sums: row 1": [1, 3], "sums: row 2": [1, 1]}
    assert "task_successes" not in row([[trajectory("g0.0", 1.0, 8)]])


def test_an_evaluation_has_the_successes_of_each_task(make_config):
    groups = [[trajectory("e0-0.0", 1.0, 8, task="row 1", domain="sums")]]
    assert evaluation(groups, make_config(), 3)["eval_task_successes"] == {"sums: row 1": [1, 1]}


def test_of_many_values_the_parts_of_their_range_are_counted():
    found = value_counts([*range(1000), 1e15])
    assert sum(count for _, count in found) == 1001 and len(found) <= MOST_VALUES
    assert found[0][1] == 1000 and found[-1][1] == 1


def test_an_evaluation_counts_its_successes():
    found = evaluation_row([[trajectory(f"e0-{i}.0", i % 2, 8)] for i in range(3)])
    assert (found["eval_n"], found["eval_successes"]) == (3, 1)
    assert found["eval_success"] == pytest.approx(1 / 3)
    assert not [key for key in found if key.startswith(("eval_pass", "eval_tasks"))]


def test_of_several_samples_a_task_counts_once_in_pass_at_k():
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    found = evaluation_row([[trajectory("e", r, 8) for r in each] for each in rewards])
    assert (found["eval_n"], found["eval_tasks"], found["eval_successes"]) == (10, 3, 3)
    assert found["eval_pass_at_2"] == pytest.approx((0.5 + 0.0 + (1 - 1 / 6)) / 3)
    assert found["eval_pass_at_4"] == 1.0, "of the tasks that have four samples"


MIXED = [
    trajectory("g0.0", 1.0, 8, domain="lake"),
    trajectory("g0.1", 0.0, 4, domain="lake", invalid_calls=2),
    trajectory("g1.0", 0.0, 12, domain="sums", truncated=True),
]


def test_each_member_of_a_mixture_has_values_of_its_own_and_one_without_trajectories_only_their_number():
    found = by_member(["lake", "sums", "words"], MIXED)
    assert (
        found["trajectories/lake"],
        found["trajectories/sums"],
        found["trajectories/words"],
    ) == (2, 1, 0)
    assert (
        found["success/lake"] == found["reward_mean/lake"] == 0.5 and found["success/sums"] == 0.0
    )
    assert found["response_tokens_mean/lake"] == 6 and found["turns_mean/sums"] == 2
    assert (found["invalid_calls/lake"], found["truncated/sums"], found["truncated/lake"]) == (
        2,
        1,
        0,
    )
    assert "success/words" not in found and by_member([], MIXED) == {}


def test_each_member_is_evaluated_on_the_held_out_tasks_that_are_its_own():
    found = evaluation_by_domain(["lake", "sums", "words"], [[each] for each in MIXED])
    assert (found["eval_n/lake"], found["eval_successes/lake"], found["eval_success/lake"]) == (
        2,
        1,
        0.5,
    )
    assert (found["eval_n/sums"], found["eval_reward/sums"], found["eval_turns/sums"]) == (
        1,
        0.0,
        2.0,
    )
    assert "eval_n/words" not in found and evaluation_by_domain([], [MIXED]) == {}


def test_engines_steps_are_counted_from_heartbeats_over_restarts():
    decoding = Decoding()

    def load(incarnation: int, tokens: int, steps: int, drafted: int, accepted: int) -> None:
        decoding.count(
            p.WorkerLoad("a", incarnation, 1, 0, 0.0, tokens, 0, 0, steps, drafted, accepted)
        )

    load(1, 100, 50, 0, 0)
    assert decoding.row() == {"tokens_per_engine_step": 2.0}
    decoding.begin_step()
    load(1, 160, 70, 40, 20)
    load(2, 20, 20, 10, 0)
    expected = {"tokens_per_engine_step": 2.0, "drafted_tokens": 50, "accepted_tokens": 20}
    assert decoding.row() == expected
