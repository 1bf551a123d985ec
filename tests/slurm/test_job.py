"""The main job as a heterogeneous job on a real Slurm: it completes, requeues itself, resumes, and
says how it ended."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rose.launch import rank_status, state
from tests.processes import ran
from tests.slurm.conftest import REPOSITORY, dev_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def state_of(run) -> str:
    done = ran([sys.executable, "-m", "rose.launch.state", str(run)], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ranks(job, attempt):
    return {status.rank: status for status in rank_status.read_all(job.run, attempt).values()}


def test_a_heterogeneous_job_of_an_installed_rose_trains_and_completes(job, installed):
    """From a wheel, in an empty folder: no rank knows a checkout."""
    job.front, job.environ = (str(installed.bin / "rose"), "train"), installed.environ
    job.cwd = job.folder / "empty"
    job.cwd.mkdir()
    two_nodes = ("rollout.workers=2", "cluster.slurm.rollout.nodes=2", "observe.report=true")
    said = job.submit(*two_nodes)
    assert f"submitted run as job {job.id}" in said and f"scancel {job.id}" in said
    # the same command again: nothing is sent twice
    assert f"run is job {job.id} already" in job.submit(*two_nodes)
    assert job.until_ended() == ["COMPLETED", "COMPLETED"], job.logs()
    assert job.steps() == [1, 2, 3]
    assert [component.nodes for component in state.components(job.id)] == ["n1", "n[2-3]"]
    assert state_of(job.run).count("COMPLETED") == 2
    assert "5 done" in state_of(job.run)
    assert (job.run / "report.html").exists()
    assert str(REPOSITORY) not in job.logs().replace(sys.prefix, "")
    assert "is finished (3 steps)" in job.submit(*two_nodes)


def test_warned_preempted_and_its_node_lost_it_comes_back_until_once_too_often(job, cluster):
    # both components: it is preemptible
    job.submit(
        "trainer.steps=1000", "cluster.slurm.requeues=3", "cluster.slurm.trainer.partition=spare"
    )
    job.until(lambda: len(job.steps()) >= 2, "two steps")
    # Slurm's, near the limit
    subprocess.run(["scancel", "--signal=USR2", "--batch", job.id], check=True, timeout=120)
    goes_on(job, 2)
    assert "requeueing, 1 of at most 3" in job.said()

    command = ["sbatch", "--parsable", "--partition=serve", "--nodes=4", "--exclusive"]
    command += ["--output=/dev/null", "--wrap=sleep 1"]
    urgent = ran(command, timeout=120).stdout.strip()
    job.until(lambda: not state.is_active(urgent), "the urgent job, for which it was preempted")
    comes(job, 3)

    # lost while it starts; what the preempted attempt has left is still what the next one continues
    node = ranks(job, 3)[0].host
    dev_cluster(cluster, "lose", node)
    try:
        goes_on(job, 4)
        assert ranks(job, 4)[0].host != node
    finally:
        dev_cluster(cluster, "return", node)

    # As if none of these attempts had saved anything.
    note = {"step": 10**6, "job": job.id, "restarts": 0}
    (job.run / "status" / "requeues.json").write_text(json.dumps(note))
    engine = next(s for s in ranks(job, 4).values() if s.role == "rollout")
    os.kill(engine.pid, signal.SIGKILL)
    assert job.until_ended()[0] == "FAILED", job.logs()
    assert "given up after 3 requeues without a" in job.said() and "killed by SIGKILL" in job.said()
    # others that a busy machine keeps from leaving in time are ended, and named behind it
    assert (
        f"rank {engine.rank} (rollout {engine.index}) on {engine.host} killed by SIGKILL"
        in state_of(job.run)
    )


def comes(job, attempt):
    job.until(lambda: len(ranks(job, attempt)) == 4, f"the ranks of attempt {attempt}")


def goes_on(job, attempt):
    """The attempt comes, and continues from the last checkpoint: each step is there once."""
    comes(job, attempt)
    before = job.steps()[-1]
    job.until(lambda: job.steps()[-1] > before, f"a step of attempt {attempt}")
    steps = job.steps()
    assert steps == list(range(1, steps[-1] + 1))


def test_what_sbatch_refuses_is_said_in_its_words_with_code_2(job):
    said = job.submit("cluster.slurm.trainer.partition=nowhere", code=2)
    assert "sbatch refused the job of run" in said and "partition" in said
    assert not job.run.exists()


def test_limits_of_the_accounting_are_said_in_its_words_or_by_the_jobs_state(job):
    said = job.submit("cluster.slurm.trainer.qos=none", code=2)
    assert "sbatch refused the job of run" in said and "policy" in said
    assert not job.run.exists()
    job.submit("cluster.slurm.trainer.qos=short", "cluster.slurm.trainer.time='01:00:00'")
    words = "it asks for more than the site's limits allow (QOSMaxWallDurationPerJobLimit)"
    job.until(lambda: words in " ".join(state_of(job.run).split()), "the reason for which it waits")
    subprocess.run(["scancel", job.id], check=True, timeout=120)


def test_a_sweep_submits_every_point_and_returns(job):
    said = job.submit("seed=1,2", "cluster.slurm.trainer.sbatch=[--hold]", "-m")
    assert said.count("submitted run-seed=") == 2
    for seed in (1, 2):
        name = job.folder / f"run-seed={seed}" / "status" / "job"
        subprocess.run(["scancel", name.read_text().strip()], check=True, timeout=120)
