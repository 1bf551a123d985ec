"""A run whose groups are trained while others run, with real MPI, vLLM and two DeepSpeed ranks: it
loses its engine and then a trainer in the middle of such steps, and learns what a run that trains
whole batches learns of the same trajectories."""

import signal

import pytest

from tests import processes
from tests.job.job import Held, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 4
RUN = (f"trainer.steps={STEPS}", "trainer.ranks=2", "trainer.zero_stage=2")
# The token weights of decoupled_ppo depend on the number of tokens in the whole batch.
RUN += ("algorithm=decoupled_ppo",)
LEARNED = ("loss", "grad_norm", "entropy", "mismatch_kl", "reward_mean", "tokens", "lr")


def test_a_run_that_trains_ahead_learns_what_whole_batches_teach_though_a_rank_dies(tmp_path):
    held = Held(tmp_path, STEPS)
    run = (*RUN, *held.overrides)
    first = Job(tmp_path, *run, "trainer.stream=true")
    held.until(first, 1)
    held.release(1)
    held.until(first, 2)
    first.engine().kill()
    held.release(2)
    held.until(first, 3)
    first.until(lambda: first.steps()[-1]["step"] == 2, "the second step's row")
    assert first.steps()[-1]["engine_restarts"] == 1
    for role in ("coordinator", "environment", "trainer", "rollout"):
        assert first.rank(role)["joined"]
    died = first.rank("trainer")
    processes.kill(died["pid"])
    assert first.wait() == 1
    assert "trainer 1" in first.said and signal.SIGKILL.name in first.said
    assert f"trainer-{died['rank']}.log" in first.said and first.orphans() == []

    again = Job(tmp_path, *run, "trainer.stream=true", "observe.report=true")
    for step in (3, 4):
        held.until(again, step)
        held.release(step)
    assert again.wait() == 0, again.said + again.logs()
    rows = again.steps()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["stream_hidden"] < 1 for row in rows)
    assert "before its batch was complete" in (again.run / "report.html").read_text()

    whole = Job(tmp_path / "whole", *run, f"rollout.replay={again.run}")
    assert whole.wait() == 0, whole.said + whole.logs()
    for ahead, once in zip(rows, whole.steps(), strict=True):
        assert "stream_hidden" not in once
        for name in LEARNED:
            assert ahead[name] == pytest.approx(once[name], rel=1e-3, abs=1e-5), name
    # not each step: all members of each of its groups may have got the same reward
    assert any(row["grad_norm"] > 0 for row in rows)
