"""An asynchronous run with real MPI, vLLM and DeepSpeed: rollouts go on in training, weights come
while turns run."""

import pytest

from rose import config as cfg
from rose import protocol as p
from rose.coordinator import journal, replay
from rose.policies import build
from rose.scheduler.groups import group_index
from tests.job.job import Job

pytestmark = pytest.mark.slow

STEPS, ETA = 4, 1


def test_rollouts_go_on_while_the_trainer_trains_and_no_token_is_older_than_allowed(tmp_path):
    # One place in the engine: rollouts take longer than training, so that some run whenever new
    # weights come.
    job = Job(
        tmp_path,
        "scheduler/batching=bounded_staleness",
        f"scheduler.batching.args.eta={ETA}",
        "algorithm=decoupled_ppo",
        f"trainer.steps={STEPS}",
        "rollout.workers=1",
        "rollout.max_sequences=1",
        "trainer.checkpoint_every=2",
        "eval.episodes=0",
    )
    assert job.wait() == 0, job.said + job.logs()
    steps = job.steps()
    assert [row["version"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["staleness_max"] <= row["group_staleness_max"] <= ETA for row in steps)
    assert any(row["staleness_mean"] > 0 for row in steps), (
        "nothing was made before its step had begun"
    )
    assert job.faults() == [] and job.orphans() == []

    groups = [group for step in range(1, STEPS + 1) for group in replay.load(job.run, step)]
    assert len({group_index(group[0].group) for group in groups}) == len(groups) == STEPS * 4
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
    assert begun > 10, "the engines were idle while the trainer trained"
    again = build(config.scheduler, config.rollout.turn_timeout_s)
    assert journal.replay(job.run / "journal" / "attempt-001.jsonl", again) > 100
