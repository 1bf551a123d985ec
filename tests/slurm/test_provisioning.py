"""A run asks a real Slurm for jobs that lend it a worker, gives them back, and takes no for an
answer."""

import asyncio
import contextlib
import subprocess
import sys
import time

import pytest

from rose.coordinator import provisioner
from rose.launch import lent, local, state
from rose.observe.metrics import read_metrics, rows_of
from rose.scheduler import events as ev
from tests.processes import ran
from tests.slurm.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "soak"))
import storm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
DEADLINE_S = 600.0


class Driver:
    """A provisioner without a run around it."""

    def __init__(self, config, run_dir):
        self.run_dir, self.events = run_dir, []
        run_dir.mkdir(exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)
        local.write_config(config, run_dir)
        self.provisioner = provisioner.Provisioner(
            config, run_dir, self.events.append, lambda *_: None, lambda *_: None
        )

    async def until(self, condition, what):
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"waited {DEADLINE_S:g} s for {what}: {self.events}"
            await asyncio.sleep(0.05)

    async def heard(self, kind):
        await self.until(lambda: any(isinstance(e, kind) for e in self.events), kind.__name__)
        return next(e for e in self.events if isinstance(e, kind))

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.ensure_future(self.provisioner.run())
        yield
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def driver(cluster, tmp_path, make_config, monkeypatch):
    monkeypatch.setattr(provisioner, "POLL_S", 0.5)

    def make(*overrides):
        return Driver(
            make_config(
                "cluster=dev scheduler/provisioning=on_demand",
                f"output_dir={tmp_path}",
                "name=run",
                *overrides,
            ),
            tmp_path / "run",
        )

    yield make
    lent.cancel_all(tmp_path / "run")


def queue():
    done = ran(["squeue", "--noheader", "--format=%i %j"], check=True, timeout=120)
    return [line for line in done.stdout.splitlines() if "run-lend-" in line]


HELD = "cluster.slurm.borrowed.sbatch=[--hold]"


async def test_what_is_asked_for_is_queued_noted_found_by_the_next_attempt_and_given_back(driver):
    first = driver(HELD)
    async with first.running():
        first.provisioner.do(ev.RequestCapacity("lend-1"))
        await first.heard(ev.CapacityQueued)
    job = lent.noted(first.run_dir)["lend-1"]
    assert queue() == [f"{job} run-lend-1"]
    second = driver(HELD)
    async with second.running():
        assert (await second.heard(ev.CapacityQueued)).request == "lend-1"
        second.provisioner.do(ev.ReleaseCapacity("lend-1"))
        await second.until(
            lambda: not state.is_active(job) and not lent.noted(second.run_dir), "scancel"
        )
    assert queue() == []


async def test_what_is_given_back_before_sbatch_has_answered_leaves_no_job(driver):
    hasty = driver(HELD)
    async with hasty.running():
        hasty.provisioner.do(ev.RequestCapacity("lend-1"))
        hasty.provisioner.do(ev.ReleaseCapacity("lend-1"))
        await hasty.until(
            lambda: list((hasty.run_dir / "submitted").glob("*_submitted.pkl")), "sbatch"
        )
        await hasty.until(
            lambda: not (hasty.provisioner._submitting or queue() or lent.noted(hasty.run_dir)),
            "scancel",
        )
    assert hasty.events == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("cluster.slurm.borrowed.partition=nowhere",), "invalid partition specified: nowhere"),
        ((HELD, "cluster.slurm.pending_s=1"), "pending for 1 s"),
    ],
)
async def test_a_refusal_is_told_in_words_and_leaves_no_job(driver, overrides, words):
    unlucky = driver(*overrides)
    async with unlucky.running():
        unlucky.provisioner.do(ev.RequestCapacity("lend-1"))
        refused = await unlucky.heard(ev.CapacityRefused)
        assert refused.request == "lend-1" and words in refused.reason
        await unlucky.until(lambda: not queue(), "scancel")


SCORE = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def note(episode, what):
    with (HERE / "scores").open("a") as file:
        file.write(f"{os.environ['SLURM_JOB_ID']} {what} {episode.trajectory}\\n")

def score(episode):
    note(episode, "begun")
    while (HERE / "hold").exists() and os.environ["SLURM_JOB_ID"] != (HERE / "main").read_text():
        time.sleep(0.05)
    time.sleep(0.3)
    note(episode, "ended")
    return float(episode.success)
"""


def test_a_run_gets_the_workers_that_it_asked_for_and_leaves_no_job_behind(job):
    """An engine, and a job that computes rewards; that one is cancelled in the midst of a score."""
    (job.folder / "mine.py").write_text(SCORE)
    for name in ("hold", "main", "scores"):
        (job.folder / name).touch()

    def scores(what, of):
        """Trajectories that jobs have begun or ended to score, those of a test apart."""
        lines = [line.split() for line in (job.folder / "scores").read_text().splitlines()]
        return [name for job_id, did, name in lines if did == what and of(job_id)]

    def helper(*besides):
        known = lent.noted(job.run, lent.REWARDS).values()
        return next((each for each in known if each not in besides), None)

    job.submit(
        *("scheduler/provisioning=on_demand", "scheduler.provisioning.args.min=1"),
        *("scheduler.provisioning.args.max=1", "reward=function", "reward.timeout_s=240"),
        *(f"reward.args.path={job.folder}/mine.py:score", "reward.max_workers=1"),
        *("reward.max_jobs=1", "trainer.steps=100000", "trainer.batch_size=64"),
        "trainer.checkpoint_every=1000",
    )
    (job.folder / "main").write_text(job.id)
    first = job.until(helper, "a job for rewards")
    [held] = job.until(lambda: scores("begun", lambda of: of == first), "a score that it holds")
    subprocess.run(["scancel", first], check=True, timeout=120)
    job.until(lambda: held in scores("ended", lambda of: of == job.id), "that score, elsewhere")
    (job.folder / "hold").unlink()
    second = job.until(lambda: helper(first), "another job")
    job.until(lambda: scores("ended", lambda of: of == second), "its scores")
    job.until(
        lambda: any(
            row.get("borrowed_token_share", 0) > 0 for row in rows_of(read_metrics(job.run), "step")
        ),
        "tokens of a borrowed worker",
    )
    job.until(
        lambda: any(row["reward_by_jobs"] > 0 for row in rows_of(read_metrics(job.run), "step")),
        "a step with scores of it",
    )
    jobs = [job.id, second, *lent.noted(job.run).values()]
    subprocess.run(["scancel", job.id], check=True, timeout=120)
    job.until(lambda: not any(map(state.is_active, jobs)), "the end of all jobs")
    assert storm.check(job.run) == []
    assert not any(row["reward_failures"] for row in rows_of(read_metrics(job.run), "step"))
    ended = scores("ended", lambda of: True)
    assert len(set(ended)) == len(ended), "no answer was scored twice"
