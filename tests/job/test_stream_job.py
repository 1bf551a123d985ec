"""A run whose groups are trained while others run, with real MPI, vLLM and two DeepSpeed ranks: it
loses its engine and then its power in the middle of such steps, and learns what a run that trains
whole batches learns of the same trajectories."""

import pytest

from rose.coordinator.control import train_task
from tests.job.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, GROUPS, SIZE = 4, 4, 4
# the last group of each step ends when the test says so
HELD = [train_task(1, GROUPS * step - 1, {"frozen_lake": 1.0}).seed for step in (1, 2, 3, 4)]
RUN = (
    f"trainer.steps={STEPS}",
    "trainer.ranks=2",
    "trainer.zero_stage=2",
    "algorithm=decoupled_ppo",  # whose weights need the tokens of the whole batch
    "eval.episodes=0",
    "env.name=tests.job.held:HeldLake",
    "env.step_timeout_s=450",
)
LEARNED = ("loss", "grad_norm", "entropy", "mismatch_kl", "reward_mean", "tokens", "lr")


def until_held(job: Job, step: int) -> None:
    """Until all groups of the step are in but the one that is held."""

    def held() -> bool:
        live = job.live()
        return (
            live.get("phase") == "rollout"
            and live["step"] == step
            and live["finished"] == (GROUPS - 1) * SIZE
        )

    job.until(held, f"three groups of step {step}")


def test_an_interrupted_run_that_trains_ahead_learns_what_whole_batches_teach(tmp_path):
    released = tmp_path / "released"
    released.mkdir()
    env = (f"+env.args.folder={released}", f"+env.args.held={HELD}")
    first = Job(tmp_path, *RUN, *env, "trainer.stream=true")
    until_held(first, 1)
    (released / str(HELD[0])).touch()
    until_held(first, 2)
    first.engine().kill()
    (released / str(HELD[1])).touch()
    until_held(first, 3)
    assert first.steps()[-1]["engine_restarts"] == 1
    first.kill_everything()

    again = Job(tmp_path, *RUN, *env, "trainer.stream=true")
    for step in (3, 4):
        until_held(again, step)
        (released / str(HELD[step - 1])).touch()
    assert again.wait() == 0, again.said + again.logs()
    rows = again.steps()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["stream_hidden"] < 1 for row in rows)
    assert "before its batch was complete" in (again.run / "report.html").read_text()

    whole = Job(tmp_path / "whole", *RUN, *env, f"rollout.replay={again.run}")
    assert whole.wait() == 0, whole.said + whole.logs()
    for ahead, once in zip(rows, whole.steps(), strict=True):
        assert "stream_hidden" not in once and once["grad_norm"] > 0
        for name in LEARNED:
            assert ahead[name] == pytest.approx(once[name], rel=1e-3, abs=1e-5), name
