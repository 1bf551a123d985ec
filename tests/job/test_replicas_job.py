"""A run whose engine's device trains, too, with real MPI, vLLM and DeepSpeed: a replica computes a
part of each batch while the engine sleeps, is killed at work, and comes back; what is trained is
what a run without replicas makes of the same trajectories."""

from collections import Counter

import psutil
import pytest

from rose.coordinator import replay
from rose.coordinator.control import first_name, train_task
from tests.job.job import Job, replica

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS, GROUPS, SIZE = 3, 2, 4
SIZES = (
    f"trainer.steps={STEPS}",
    f"trainer.batch_size={GROUPS * SIZE}",
    f"rollout.group_size={SIZE}",
    "rollout.temperature=0.8",
    "trainer.step_timeout_s=3000",  # so that nobody is given up for want of time
)


class Scene:
    """A job whose episodes all wait at their first move until `opens`."""

    def __init__(self, folder) -> None:
        self.gates = folder / "gates"
        self.gates.mkdir()
        held = [
            [train_task(1, GROUPS * step + k, {"frozen_lake": 1.0}).seed for k in range(GROUPS)]
            for step in range(STEPS)
        ]
        self.job = Job(
            folder,
            *SIZES,
            f"+env.args.folder={self.gates}",
            f"+env.args.held={held}",
            "env.name=tests.job.held:GatedLake",
            "env.step_timeout_s=1000",
            "rollout.turn_timeout_s=1000",
            "trainer.elastic_replicas=1",
        )

    def until_all_wait(self, step: int) -> None:
        self.job.until(
            lambda: len(list(self.gates.glob(f"waits-{step}-*"))) == GROUPS * SIZE,
            f"all episodes of step {step} to wait",
        )

    def opens(self, step: int) -> None:
        (self.gates / f"open-{step}").touch()


def test_a_replica_trains_is_killed_at_work_and_comes_back(tmp_path):
    scene = Scene(tmp_path)
    job = scene.job
    scene.until_all_wait(1)
    first = replica(scene.job, 1)
    scene.opens(1)
    scene.until_all_wait(2)
    trainer = psutil.Process(job.rank("trainer")["pid"])
    trainer.suspend(), first.suspend()
    scene.opens(2)
    job.until(
        lambda: "compute their part of step 2" in job.live().get("waiting_for", ""),
        "step 2 to be given to trainer and replica",
    )
    first.kill()
    job.until(job.faults, "word of the replica that died")
    trainer.resume()
    scene.until_all_wait(3)
    assert replica(scene.job, 2).pid != first.pid
    scene.opens(3)
    assert job.wait() == 0, job.said + job.logs()

    [fault] = job.faults()
    assert fault["what"] == "replica died"
    assert fault["detail"] == "rollout-0: killed by SIGKILL; another is started"
    rows = job.steps()
    assert [(r["step"], r["replicas"], r["replicas_lost"]) for r in rows] == [
        (1, 1, 0),
        (2, 1, 1),
        (3, 1, 0),
    ]
    assert [row["replica_token_share"] > 0 for row in rows] == [True, False, True]
    # of weights that are the engine's
    assert all(row["staleness_max"] == 0 and row["mismatch_kl"] < 1e-3 for row in rows)
    for step in range(1, STEPS + 1):
        trained = Counter(first_name(t.id) for g in replay.load(job.run, step) for t in g)
        assert set(trained.values()) == {1} and len(trained) == GROUPS * SIZE

    alone = Job(tmp_path / "alone", *SIZES, f"rollout.replay={job.run}")
    assert alone.wait() == 0, alone.said + alone.logs()
    for shared, without in zip(rows, alone.steps(), strict=True):
        # Adam divides by a gradient's own size, so after an update another order of the sum is seen
        rel, least = (1e-4, 1e-6) if shared["step"] == 1 else (1e-2, 1e-4)
        assert shared["tokens"] == without["tokens"]
        for name in ("loss", "grad_norm", "entropy", "mismatch_abs"):
            assert shared[name] == pytest.approx(without[name], rel=rel, abs=least), name
