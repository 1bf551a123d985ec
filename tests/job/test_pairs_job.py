"""Pairs of features that were once refused as not tried, each in a short run whose weights change:
engines sample with the weights that the trainer has."""

import pytest

from tests.job.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CHANGING = "trainer.steps=5 trainer.optimizer.lr=0.005 env.max_turns=6 env.args.shaping=0.5"


@pytest.mark.parametrize(
    "counted, overrides",
    [
        ("groups_dropped", ["colocate=true", "scheduler/batching=dapo"]),
        ("seconds_wake", ["colocate=true", "scheduler/batching=tail_batching"]),
        ("drafted_tokens", ["+trainer/lora=linear", "rollout/draft=group"]),
    ],
)
def test_engines_sample_with_the_trainers_weights(tmp_path, counted, overrides):
    job = Job(tmp_path, *CHANGING.split(), *overrides)
    assert job.wait() == 0, job.said + job.logs()
    steps = job.steps()
    assert len(steps) == 5
    assert any(row["grad_norm"] > 0 for row in steps[:-1])  # A later step has other weights.
    assert all(row["mismatch_kl"] < 1e-8 for row in steps)
    assert sum(row.get(counted, 0) for row in steps) > 0
