"""A run whose groups are trained while others run, with real MPI, vLLM and two DeepSpeed ranks: it
loses its engine and then its power in the middle of such steps, and learns what a run that trains
whole batches learns of the same trajectories."""

import pytest

from tests.job.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 4
RUN = (
    f"trainer.steps={STEPS}",
    "trainer.ranks=2",
    "trainer.zero_stage=2",
    "algorithm=decoupled_ppo",  # whose weights need the tokens of the whole batch
    "eval.episodes=0",
    "rollout.max_sequences=1",  # groups finish one after the other
)
LEARNED = ("loss", "grad_norm", "entropy", "mismatch_kl", "reward_mean", "tokens", "lr")


def partly_trained(job: Job, step: int) -> bool:
    """Whether two of the step's four groups are in: the trainer was given the first of them."""
    live = job.live()
    return job.phase() == ("rollout", step) and 8 <= live["finished"] < live["total"]


def test_an_interrupted_run_that_trains_ahead_learns_what_whole_batches_teach(tmp_path):
    first = Job(tmp_path, *RUN, "trainer.stream=true")
    first.until(lambda: partly_trained(first, 2), "half of step 2")
    first.engine().kill()
    first.until(lambda: partly_trained(first, 3), "half of step 3")
    assert first.steps()[-1]["engine_restarts"] == 1
    first.kill_everything()

    again = Job(tmp_path, *RUN, "trainer.stream=true")
    assert again.wait() == 0, again.said + again.logs()
    rows = again.steps()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["stream_hidden"] < 1 for row in rows)
    assert "before its batch was complete" in (again.run / "report.html").read_text()

    whole = Job(tmp_path / "whole", *RUN, f"rollout.replay={again.run}")
    assert whole.wait() == 0, whole.said + whole.logs()
    for ahead, once in zip(rows, whole.steps(), strict=True):
        assert "stream_hidden" not in once and once["grad_norm"] > 0
        for name in LEARNED:
            assert ahead[name] == pytest.approx(once[name], rel=1e-3, abs=1e-5), name
