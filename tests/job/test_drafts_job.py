"""A run whose engines draft from what groups say, with real MPI, vLLM and DeepSpeed."""

import pytest

from tests.job.job import Job, trained_on

pytestmark = pytest.mark.slow


def test_engines_draft_through_new_weights_and_the_death_of_one_of_them(tmp_path):
    """What they sample is checked in tests/engine/test_drafts.py; here that the trainer finds the
    log-probabilities that it was told, that no trajectory is lost, and that drafts are counted."""
    job = Job(
        tmp_path,
        "rollout/draft=group",
        "rollout.draft.adaptive=false",
        "rollout.workers=2",
        "trainer.steps=3",
        "trainer.batch_size=32",
        "eval.episodes=8",
    )
    job.until(lambda: job.phase()[0] == "rollout" and job.phase()[1] == 2, "the second rollout")
    job.engine().kill()
    assert job.wait() == 0, job.said + job.logs()
    assert [fault["what"] for fault in job.faults()] == ["engine died"]
    steps = job.steps()
    assert trained_on(job.run, 3) == [f"g{g}.{m}" for g in range(24) for m in range(4)]
    assert all(row["mismatch_kl"] < 1e-4 for row in steps)
    assert sum(row.get("drafted_tokens", 0) for row in steps) > 100
    assert sum(row.get("accepted_tokens", 0) for row in steps) > 10
    assert job.orphans() == []
