"""Whole runs as docs/agents.md and docs/environments.md print them, made shorter: an agent and
prompts with a reward file. (The package of the second page is installed by tests/outside.)"""

import signal
import subprocess
import sys

import printed
import pytest

from rose.coordinator import replay
from rose.observe.metrics import read_metrics, rows_of
from tests.job.hosts import HOSTS, kill_host, rolls
from tests.job.job import DEADLINE_S, Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


# The page's agent, whose training waits for the file `begin`; of every other of its tasks the agent
# waits again after its first move, for `go`.
HELD = """
import itertools
import os
import time
from pathlib import Path

import lake_agent

HERE = Path(__file__).parent
SHOWN, SHOW = itertools.count(), lake_agent.show


def wait(gate):
    while not (HERE / gate).exists():
        time.sleep(0.05)


def show(*place):
    if next(SHOWN) == 1:
        (HERE / f"waits-{os.environ['ROSE_TRAJECTORY']}").touch()
        wait("go")
    return SHOW(*place)


def play(task):
    if task["phase"] == "train":
        wait("begin")
        if task["seed"] % 4:
            lake_agent.show = show
    return lake_agent.play(task)
"""


# No turn is stalled for want of time, and of any two turns in a row an engine gets one.
RUN = """
rollout.turn_timeout_s=1000 env.step_timeout_s=1000 scheduler/routing=round_robin
env.args.function=held_agent.py:play trainer.steps=2 trainer.batch_size=64 rollout.workers=2
eval.episodes=8
""".split()


@pytest.fixture(autouse=True)
def among_the_printed_files(tmp_path, monkeypatch):
    printed.write("agents.md", tmp_path)
    printed.write("environments.md", tmp_path)
    monkeypatch.chdir(tmp_path)


def test_prompts_are_trained_on_with_a_reward_file(tmp_path):
    subprocess.run([sys.executable, "beside.py"], check=True, timeout=DEADLINE_S)
    run = [*printed.overrides("environments.md", "beside"), "trainer.steps=1", "eval.episodes=8"]
    job = Job(tmp_path, *run)
    assert job.wait() == 0, job.said + job.logs()
    assert "Held-out tasks" in job.said and "95% interval" in job.said
    trained = [t for group in replay.load(job.run, 1) for t in group]
    assert len(trained) == 16 and {t.reward for t in trained} <= {0.0, 1.0}
    assert job.faults() == []


def test_an_unchanged_agent_is_trained_and_does_not_notice_that_hosts_and_an_engine_died(tmp_path):
    """Each trajectory is trained once, and programs that begin anew get the same answers."""
    (tmp_path / "held_agent.py").write_text(HELD)
    page = printed.overrides("agents.md", "lake_agent")
    job = Job(tmp_path, *page, *RUN, *HOSTS)
    job.until(lambda: job.phase()[0] == "rollout", "the first rollout")
    job.until_idle("rollout-1")
    engine = job.engine()
    engine.suspend()
    (tmp_path / "begin").touch()
    job.until(lambda: job.turns_at("rollout-1"), "a turn at the suspended engine")
    engine.kill()
    job.until(lambda: job.faults(), "the engine's fault")
    job.until(lambda: rolls(job) and any(tmp_path.glob("waits-*")), "some to end, some to wait")
    kill_host(job, 0)
    kill_host(job, 1, signal.SIGSEGV)
    (tmp_path / "go").touch()
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
    assert {t.reward for t in trajectories} == {0.0, 1.0}
    assert {t.domain for t in trajectories} == {"agent"}
    assert all(
        t.response_tokens == sum(s.response_tokens for s in t.samples()) for t in trajectories
    )
    evals = rows_of(read_metrics(job.run), "eval")
    assert [row["eval_n"] for row in evals] == [8, 8]
    assert job.orphans() == []
