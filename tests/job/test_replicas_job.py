"""A run whose engine's device trains, too, with real MPI, vLLM and DeepSpeed: a replica computes a
part of each batch while the engine sleeps, is killed at work, and comes back; what is trained is
what a run without replicas makes of the same trajectories."""

from collections import Counter

import psutil
import pytest

from rose.coordinator import replay
from rose.coordinator.control import first_name
from tests.job.job import Gated, Job, replica, resume, suspend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS, GROUPS, SIZE = 3, 2, 4
SIZES = (
    f"trainer.steps={STEPS}",
    f"trainer.batch_size={GROUPS * SIZE}",
    f"rollout.group_size={SIZE}",
    "rollout.temperature=0.8",
    "trainer.step_timeout_s=3000",  # so that nobody is given up for want of time
)


def test_a_replica_trains_is_killed_at_work_and_comes_back(tmp_path):
    gates = Gated(tmp_path, STEPS, GROUPS, SIZE)
    job = Job(tmp_path, *SIZES, *gates.overrides, "trainer.elastic_replicas=1")
    gates.until(job, "waits", 1)
    first = replica(job, 1)
    gates.opens(1)
    gates.until(job, "waits", 2)
    trainer = psutil.Process(job.rank("trainer")["pid"])
    suspend(trainer), first.suspend()
    gates.opens(2)
    job.until(
        lambda: "compute their part of step 2" in job.live().get("waiting_for", ""),
        "step 2 to be given to trainer and replica",
    )
    first.kill()
    job.until(job.faults, "word of the replica that died")
    resume(trainer)
    gates.until(job, "waits", 3)
    assert replica(job, 2).pid != first.pid
    gates.opens(3)
    assert job.wait() == 0, job.said + job.logs()

    [fault] = job.faults()
    assert fault["what"] == "replica died"
    assert fault["detail"] == "rollout-0: killed by SIGKILL; another is started"
    rows = job.steps()
    expected = [(1, 1, 0), (2, 1, 1), (3, 1, 0)]
    assert [(r["step"], r["replicas"], r["replicas_lost"]) for r in rows] == expected
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
