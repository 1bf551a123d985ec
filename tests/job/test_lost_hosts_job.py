"""Environment hosts that are killed, again and again: no trajectory is lost or counted twice, and
each has the tokens that it has in a run in which nobody dies."""

import signal

import psutil
import pytest

from rose.coordinator import replay
from tests import processes
from tests.job.job import Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, KILLS = 3, 5
SIZE = (
    f"trainer.steps={STEPS}",
    "rollout.environment_hosts=2",
    "rollout.host_restarts=100",
    "eval.episodes=4",
)


def hosts(job: Job) -> list[psutil.Process]:
    """The processes of all environment hosts that are up and run trajectories."""
    found = []
    for path in sorted((job.run / "logs" / "latest").glob("environment-*.log")):
        number = path.stem.rpartition("-")[2]
        for process in processes.bearing("rose.agent.process", str(job.run)):
            words = processes.words(process)
            if "--rank" in words and words[words.index("--rank") + 1] == number:
                found.append(process)
    return found


def kill_hosts(job: Job, kills: int) -> int:
    """In rollouts, each when some trajectories of it are in, another one since the last, and others
    run; how many died."""
    died, at = 0, (0, 0)
    while died < kills:
        lost = len(job.faults())
        job.until(lambda last=at: rolls(job) and place(job) > last, "another trajectory's end")
        if not (found := hosts(job)):
            continue
        at, victim = place(job), found[died % len(found)]
        victim.send_signal((signal.SIGKILL, signal.SIGSEGV)[died % 2])
        job.until(lambda n=lost: len(job.faults()) > n, "the fault")
        died += 1
    return died


def rolls(job: Job) -> bool:
    live = job.live()
    return live.get("phase") == "rollout" and 0 < live.get("finished", 0) < live.get("total", 0)


def place(job: Job) -> tuple[int, int]:
    live = job.live()
    return live.get("step", 0), live.get("finished", 0)


def everything(job: Job) -> list[tuple]:
    """All that is trained on, of each trajectory of each step."""
    return [
        (t.id, t.tokens, t.mask, t.versions, t.reward, t.turns, t.inherited)
        for step in range(1, STEPS + 1)
        for group in replay.load(job.run, step)
        for t in group
    ]


def test_trajectories_of_killed_hosts_have_the_tokens_of_a_run_in_which_nobody_dies(tmp_path):
    whole = Job(tmp_path / "whole", *SIZE, "deterministic=true")
    assert whole.wait() == 0, whole.said + whole.logs()
    killed = Job(tmp_path, *SIZE, "deterministic=true")
    assert kill_hosts(killed, KILLS) == KILLS
    assert killed.wait() == 0, killed.said + killed.logs()
    assert everything(killed) == everything(whole)
    assert trained_on(killed.run, STEPS) == [f"g{g}.{m}" for g in range(12) for m in range(4)]
    what = [fault["what"] for fault in killed.faults()]
    assert what == ["environment host died"] * KILLS, killed.faults()
    assert "killed by SIGKILL" in killed.faults()[0]["detail"]
    steps = killed.steps()
    assert sum(step["trajectories_restarted"] for step in steps) >= KILLS
    assert sum(step["resumed_turns"] for step in steps) > 0
    assert steps[-1]["failed_trajectories"] == 0 and killed.orphans() == []
