"""Whole runs as docs/agents.md prints them, made shorter: an agent that knows nothing of ROSE, and
prompts with a reward file. (Its package is installed and trained on by tests/outside.)"""

import subprocess
import sys

import printed
import pytest

from rose.coordinator import replay
from rose.observe.metrics import read_metrics, rows_of
from tests.job.hosts import HOSTS, kill_hosts
from tests.job.job import DEADLINE_S, Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(autouse=True)
def among_the_printed_files(tmp_path, monkeypatch):
    printed.write("agents.md", tmp_path)
    monkeypatch.chdir(tmp_path)


def test_prompts_are_trained_on_with_a_reward_file(tmp_path):
    subprocess.run([sys.executable, "beside.py"], check=True, timeout=DEADLINE_S)
    run = [*printed.overrides("agents.md", "beside"), "trainer.steps=1", "eval.episodes=8"]
    job = Job(tmp_path, *run)
    assert job.wait() == 0, job.said + job.logs()
    assert "Held-out tasks" in job.said and "95% interval" in job.said
    trained = [t for group in replay.load(job.run, 1) for t in group]
    assert len(trained) == 16 and {t.reward for t in trained} <= {0.0, 1.0}
    assert job.faults() == []


def test_an_unchanged_agent_is_trained_and_does_not_notice_that_hosts_and_an_engine_died(tmp_path):
    """Each trajectory is trained once, and programs that begin anew get the same answers."""
    job = Job(
        tmp_path,
        *printed.overrides("agents.md", "lake_agent"),
        "trainer.steps=2",
        "trainer.batch_size=64",
        "rollout.workers=2",
        "eval.episodes=8",
        *HOSTS,
    )
    job.until(lambda: job.phase()[0] == "rollout", "the first rollout")
    engine = job.suspended_engine()
    job.until(job.holds_a_turn, "a turn at the suspended engine")
    engine.kill()
    job.until(lambda: job.faults(), "the engine's fault")
    assert kill_hosts(job, 2) == 2
    assert job.wait() == 0, job.said + job.logs()
    died = ["engine died", *["environment host died"] * 2]
    assert [fault["what"] for fault in job.faults()] == died, "no agent failed"
    steps = job.steps()
    assert [row["version"] for row in steps] == [1, 2]
    assert sum(row["migrations"] for row in steps) > 0
    assert sum(row["trajectories_restarted"] for row in steps) >= 2
    assert sum(row["resumed_turns"] for row in steps) > 0 == steps[-1]["failed_trajectories"]
    assert all(row["mismatch_max_ratio"] < 1.01 for row in steps), "engine and trainer agree"
    assert trained_on(job.run, 2) == [f"g{g}.{m}" for g in range(32) for m in range(4)]
    trajectories = [t for step in (1, 2) for g in replay.load(job.run, step) for t in g]
    assert {t.reward for t in trajectories} == {0.0, 1.0} and {t.domain for t in trajectories} == {
        "agent"
    }
    assert all(
        t.response_tokens == sum(s.response_tokens for s in t.samples()) for t in trajectories
    )
    evals = rows_of(read_metrics(job.run), "eval")
    assert [row["eval_n"] for row in evals] == [8, 8]
    assert job.orphans() == []
