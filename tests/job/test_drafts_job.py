"""A run whose engines draft from what groups say, with real MPI, vLLM and DeepSpeed, and whose turns
are rewarded one by one: an engine dies."""

import pytest

from rose.coordinator import replay
from tests.job.job import Gated, Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

RUN = """
rollout/draft=group rollout.draft.adaptive=false algorithm=turn_grpo env.args.shaping=0.5
rollout.workers=2 trainer.steps=2 eval.episodes=8 rollout.temperature=0.8
""".split()
# Each engine gets one of any two turns in a row.
RUN += ["scheduler/routing=round_robin"]


def test_an_engine_that_drafts_dies_with_turns_and_none_is_lost_or_paid_twice(tmp_path):
    """tests/parts/drafts/test_engine.py checks what they sample; here the trainer finds the
    log-probabilities that it was told, no trajectory is lost, and drafts are counted."""
    gates = Gated(tmp_path, 2, groups=8, size=4)
    gates.opens(1)
    job = Job(tmp_path, *RUN, *gates.overrides)
    gates.until(job, "waits", 2)
    job.until_idle("rollout-1")
    engine = job.engine()
    engine.suspend()
    gates.opens(2)  # only one of the step's maps has a hole beside the start: 28 episodes go on
    job.until(lambda: job.turns_at("rollout-1"), "a turn at the suspended engine")
    engine.kill()
    assert job.wait() == 0, job.said + job.logs()
    assert [fault["what"] for fault in job.faults()] == ["engine died"]
    steps = job.steps()
    assert steps[-1]["engine_restarts"] == 1 and sum(row["migrations"] for row in steps) > 0
    assert trained_on(job.run, 2) == [f"g{g}.{m}" for g in range(16) for m in range(4)]
    assert all(row["mismatch_kl"] < 1e-4 for row in steps)
    assert sum(row.get("drafted_tokens", 0) for row in steps) > 0
    assert sum(row.get("accepted_tokens", 0) for row in steps) > 0
    assert job.orphans() == []
    for t in (t for step in (1, 2) for group in replay.load(job.run, step) for t in group):
        assert len(t.turn_rewards) == len(t.turn_tokens) == t.turns
        # the way gained, at most all of it, and 1 at the goal
        assert sum(t.turn_rewards) == pytest.approx(t.reward) and t.reward <= t.success + 0.5
        assert t.reward == pytest.approx(1.5) or not t.success
