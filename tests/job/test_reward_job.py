"""A run whose rewards a pool of workers computes: each trajectory is scored once, whatever happens
to the workers, and what can't be scored is replaced."""

import pytest

from rose.coordinator import replay
from tests.job.job import Job

pytestmark = pytest.mark.slow

REWARD = """
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent

def score(episode):
    with (FOLDER / f"{episode.trajectory}.tries").open("a") as file:
        file.write("x")
    if episode.trajectory == "g0.1" and (FOLDER / "g0.1.tries").read_text() == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    if episode.trajectory == "g0.2":
        raise ValueError("nobody can say")
    time.sleep(0.05)
    assert episode.prompt and episode.seed % 2 == int(episode.trajectory[0] == "e")
    return {"reward": len(episode.response) + 0.5, "success": episode.turns > 1}
"""


def test_a_pool_scores_what_the_hosts_send_and_replaces_what_it_cannot(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    job = Job(
        tmp_path,
        "reward=function",
        f"reward.args.path={tmp_path / 'mine.py'}:score",
        "trainer.steps=2",
        "eval.episodes=4",
    )
    assert job.wait() == 0, job.said + job.logs()
    assert job.orphans() == []
    (fault,) = job.faults()
    assert fault["what"] == "scoring failed" and "g0.2: " in fault["detail"]
    assert "ValueError: nobody can say" in fault["detail"]
    first, second = job.steps()
    assert (first["reward_failures"], second["reward_failures"]) == (1, 0)
    assert first["reward_wait_s_mean"] > 0.05 and first["reward_timeouts"] == 0
    trained = [t for step in (1, 2) for group in replay.load(job.run, step) for t in group]
    names = {t.id for t in trained}
    assert len(names) == len(trained) == 32 and "g0.2" not in names and "g0.2r1" in names
    assert all(t.reward % 1 == 0.5 and t.success == (t.turns > 1) for t in trained)
    tries = {path.stem: path.read_text() for path in tmp_path.glob("g*.tries")}
    assert tries.pop("g0.1") == tries.pop("g0.2") == "xx" and set(tries.values()) == {"x"}
