"""A run asks a real Slurm for jobs that lend it a worker, gives them back, and takes no for an
answer."""

import asyncio
import contextlib
import subprocess
import time

import pytest

from rose.coordinator import provisioner
from rose.launch import lent, local, state
from rose.observe.metrics import read_metrics, rows_of
from rose.scheduler import events as ev

pytestmark = pytest.mark.slow
DEADLINE_S = 180.0


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
    monkeypatch.setattr(provisioner, "LOOK_S", 0.5)

    def make(*overrides):
        return Driver(
            make_config(
                "cluster=dev",
                "scheduler/provisioning=on_demand",
                f"output_dir={tmp_path}",
                "name=run",
                *overrides,
            ),
            tmp_path / "run",
        )

    yield make
    lent.cancel_all(tmp_path / "run")


def queue():
    done = subprocess.run(
        ["squeue", "--noheader", "--format=%i %j"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [line for line in done.stdout.splitlines() if "run-lend-" in line]


HELD = "cluster.slurm.borrowed.sbatch=[--hold]"


def test_what_is_asked_for_is_queued_noted_found_by_the_next_attempt_and_given_back(driver):
    async def story():
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

    asyncio.run(story())
    assert queue() == []


def test_what_is_given_back_before_sbatch_has_answered_leaves_no_job(driver):
    async def story():
        hasty = driver(HELD)
        async with hasty.running():
            hasty.provisioner.do(ev.RequestCapacity("lend-1"))
            hasty.provisioner.do(ev.ReleaseCapacity("lend-1"))
            await hasty.until(
                lambda: list((hasty.run_dir / "submitted").glob("*_submitted.pkl")), "sbatch"
            )
            await hasty.until(lambda: not queue() and not hasty.provisioner._submitting, "scancel")
        assert hasty.events == [] and lent.noted(hasty.run_dir) == {}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("cluster.slurm.borrowed.partition=nowhere",), "invalid partition specified: nowhere"),
        ((HELD, "cluster.slurm.pending_s=1"), "pending for 1 s"),
    ],
)
def test_a_refusal_is_told_in_words_and_leaves_no_job(driver, overrides, words):
    async def story():
        unlucky = driver(*overrides)
        async with unlucky.running():
            unlucky.provisioner.do(ev.RequestCapacity("lend-1"))
            refused = await unlucky.heard(ev.CapacityRefused)
            assert refused.request == "lend-1" and words in refused.reason
            await unlucky.until(lambda: not queue(), "scancel")

    asyncio.run(story())


def test_a_run_gets_the_worker_that_it_asked_for_and_leaves_no_job_behind(job):
    job.submit(
        "scheduler/provisioning=on_demand",
        "scheduler.provisioning.args.min=1",
        "scheduler.provisioning.args.max=1",
        "trainer.steps=100000",
        "trainer.batch_size=64",
        "eval.episodes=0",
        "observe.report=false",
        "trainer.checkpoint_every=1000",
    )
    job.until(
        lambda: any(
            row.get("borrowed_token_share", 0) > 0 for row in rows_of(read_metrics(job.run), "step")
        ),
        "tokens of a borrowed worker",
    )
    [borrowed] = lent.noted(job.run).values()
    subprocess.run(["scancel", job.id], check=True, timeout=60)
    job.until(
        lambda: not state.is_active(job.id) and not state.is_active(borrowed),
        "the end of both jobs",
    )
