"""Rows of metrics.jsonl hold what the step did."""

from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.roles.step_metrics import evaluation_row, step_row
from rose.roles.turn_hub import Worker


def trajectory(name, reward, response, version=3, **more):
    made = [version] * response
    return p.Trajectory(name, name.partition(".")[0], p.Phase.TRAIN, p.pack_tokens([0, *made]), b"\0" + b"\1" * response,
                        p.pack_floats([0.0] * (response + 1)), p.pack_tokens([-1, *made]), reward, reward > 0,
                        turns=2, response_tokens=response, **more)


def hub(version, **workers):
    return SimpleNamespace(version=version, workers=workers, sync_bytes=100, sync_pause_s=0.5, engine_restarts=1,
                           ledger=SimpleNamespace(migrations=2), past={"dedicated": 0, "cooperative": 0},
                           dedicated=lambda: [(n, w) for n, w in workers.items() if w.kind == "dedicated"])


def row(groups, times=None, **workers):
    times = times or {"rollout": 4.0, "train": 2.0, "sync": 1.0}
    return step_row(groups, {"loss": 0.25}, times, hub(4, **workers), SimpleNamespace(failed=1), dropped=3)


def worker(tokens, busy_s):
    return Worker(10, 1, 4, tokens=tokens, busy_s=busy_s)


def test_rates_are_of_the_rollout_phase_and_idle_is_what_an_engine_had_nothing_to_do():
    found = row([[trajectory("g0.0", 1.0, 8)]], **{"rollout-0": worker(400, 4.0), "rollout-1": worker(200, 2.0)})
    assert found["tokens_per_s"] == 150 and found["tokens_per_s/rollout-0"] == 100
    assert found["time_idle"] == pytest.approx(1.0) and found["time_step"] == 7.0


def test_means_and_counts_are_over_every_trajectory_of_every_group():
    found = row([[trajectory("g0.0", 1.0, 8), trajectory("g0.1", 0.0, 4, invalid_calls=2)],
                 [trajectory("g1.0", 0.0, 12, truncated=True), trajectory("g1.1", 0.0, 8)]])
    assert found["success"] == 0.25 and found["reward_mean"] == 0.25
    assert found["response_tokens_mean"] == 8 and found["response_tokens_max"] == 12
    assert found["invalid_calls"] == 2 and found["truncated"] == 1
    assert (found["failed_trajectories"], found["groups_dropped"], found["migrations"]) == (1, 3, 2)
    assert found["loss"] == 0.25 and found["kind"] == "step"


def test_every_response_is_in_one_bar_of_the_histogram():
    lengths = [1, 8, 9, 11, 30, 200]
    bars = row([[trajectory(f"g0.{i}", 0.0, n) for i, n in enumerate(lengths)]])["response_hist"]
    assert sum(count for _, count in bars) == len(lengths)
    assert bars[0] == [8, 2] and bars[-1][0] >= 200 > bars[-2][0]


@pytest.mark.parametrize("made_by, staleness", [(3, 0.0), (1, 2.0)])
def test_staleness_counts_versions_between_sampling_and_training(made_by, staleness):
    assert row([[trajectory("g0.0", 1.0, 8, version=made_by)]])["staleness_mean"] == staleness


def test_a_run_from_saved_trajectories_has_no_engines():
    found = row([[trajectory("g0.0", 1.0, 8)]])
    assert found["tokens_per_s"] == 0 and found["time_idle"] == 0.0


def test_an_evaluation_counts_its_successes():
    found = evaluation_row([trajectory("e0-0.0", 1.0, 8), trajectory("e0-1.0", 0.0, 8), trajectory("e0-2.0", 1.0, 8)])
    assert (found["eval_n"], found["eval_successes"]) == (3, 2) and found["eval_success"] == pytest.approx(2 / 3)
