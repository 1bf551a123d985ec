"""An asynchronous run with real MPI, vLLM and DeepSpeed, whose rewards a pool of workers computes:
rollouts go on in training, weights come while turns run, each trajectory is scored once whatever
happens to the workers, and what can't be scored is replaced."""

import pytest

from rose import config as cfg
from rose import protocol as p
from rose.coordinator import journal, replay
from rose.policies import build
from rose.scheduler.groups import group_index
from tests.job.job import Held, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS, ETA = 4, 1
REWARD = """
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent

def score(episode):
    while episode.trajectory[0] == "e" and not (FOLDER / "go").exists():
        time.sleep(0.05)
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


def test_rollouts_go_on_while_the_trainer_trains_and_a_pool_scores_each_once(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    # A group of the third step waits at its first move until the second step's weights are there,
    # so its trajectories have turns of two versions.
    held = Held(tmp_path, STEPS)
    held.release(1, 2, 4)
    job = Job(
        tmp_path,
        *held.overrides,
        *("scheduler/batching=bounded_staleness", f"scheduler.batching.args.eta={ETA}"),
        *("algorithm=decoupled_ppo", f"trainer.steps={STEPS}", "rollout.workers=1"),
        *("rollout.max_sequences=1", "trainer.checkpoint_every=2", "eval.episodes=4"),
        *("reward=function", f"reward.args.path={tmp_path / 'mine.py'}:score"),
        *("reward.timeout_s=1000", "reward.deadline_s=2100"),
    )
    job.until(lambda: job.phase()[0] == "evaluating", "the evaluation before the first step")
    with job.trainer_stopped():
        (tmp_path / "go").touch()
        job.until(lambda: job.phase() == ("train", 1), "the first step's training")
        # 33 are scored if it doesn't end: its four groups, the four that run then, and one for the
        # trajectory that fails. Of these four groups one has just begun, so at least seven were
        # without a score then, and now one that had no turn then has one.
        job.until(lambda: len(list(tmp_path.glob("g*.tries"))) >= 30, "scores of other groups")
    job.until(
        lambda: job.live().get("workers", {}).get("rollout-0", {}).get("version") == 2,
        "the engine's load of the second step's weights",
    )
    held.release(3)
    assert job.wait() == 0, job.said + job.logs()
    steps = job.steps()
    assert [row["version"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["staleness_max"] <= row["group_staleness_max"] <= ETA for row in steps)
    assert any(row["staleness_mean"] > 0 for row in steps), (
        "nothing was made before its step had begun"
    )
    assert job.orphans() == []
    (fault,) = job.faults()
    assert fault["what"] == "scoring failed" and "g0.2: " in fault["detail"]
    assert "ValueError: nobody can say" in fault["detail"]
    assert sum(row["reward_failures"] for row in steps) == 1
    assert steps[0]["reward_wait_s_mean"] > 0.05 and steps[0]["reward_timeouts"] == 0

    groups = [group for step in range(1, STEPS + 1) for group in replay.load(job.run, step)]
    assert len({group_index(group[0].group) for group in groups}) == len(groups) == STEPS * 4
    trained = [t for group in groups for t in group]
    names = {t.id for t in trained}
    assert len(names) == len(trained) == STEPS * 16 and "g0.2" not in names and "g0.2r1" in names
    assert all(t.reward % 1 == 0.5 and t.success == (t.turns > 1) for t in trained)
    tries = {path.stem: path.read_text() for path in tmp_path.glob("g*.tries")}
    assert tries.pop("g0.1") == tries.pop("g0.2") == "xx"
    assert set(tries.values()) <= {"x", ""}, (
        "at most once; empty where the run's end was in between"
    )
    several = [
        t for group in groups for t in group if len(set(p.unpack_tokens(t.versions)) - {-1}) > 1
    ]
    assert several, "no trajectory met new weights on its way"

    config = cfg.load(job.run / "config.json")
    entries = journal.read(job.run / "journal" / "attempt-001.jsonl")
    next(entries)
    training, begun = False, 0
    for entry in entries:
        kinds = {type(action).__name__ for action in entry.actions}
        training = (
            training
            and type(entry.event).__name__ != "VersionPublished"
            or "StartTraining" in kinds
        )
        begun += training and "AssignTurn" in kinds
    assert begun > 0, "the engines were idle while the trainer trained"
    again = build(config.scheduler, config.rollout.turn_timeout_s)
    assert journal.replay(job.run / "journal" / "attempt-001.jsonl", again) > 100
