"""The run's folder takes no more: the main job ends with one clear error, and continues once there
is room again."""

from pathlib import Path

import psutil
import pytest

from rose.trainer import checkpoint
from tests.job.job import Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONTINUES = "the same launch.py command then continues the run from its last checkpoint"


@pytest.fixture
def start(disk):
    """start() -> the job on the disk; whatever a failing test leaves of it is killed before the
    disk goes."""
    jobs = []

    def begin() -> Job:
        jobs.append(Job(disk.path))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            job.kill_everything()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def halves(run: Path) -> list[Path]:
    return [path for path in run.rglob("*") if path.suffix in (".tmp", ".part")]


def trainer_held(job: Job) -> psutil.Process:
    """The trainer, suspended once the first step's checkpoint is whole: whatever the test does to
    the disk, however slowly, is done before the second's."""
    job.until(lambda: checkpoint.latest(job.run), "the first step's checkpoint")
    trainer = psutil.Process(job.rank("trainer")["pid"])
    trainer.suspend()
    assert not list((job.run / "checkpoints").glob("step-000002*"))
    return trainer


def assert_complete(job: Job) -> None:
    """Every step once, trained on the trajectories of an uninterrupted run, and nothing unfinished
    left."""
    assert [row["step"] for row in job.steps()] == [1, 2, 3]
    assert trained_on(job.run, 3) == [f"g{g}.{m}" for g in range(12) for m in range(4)]
    assert halves(job.run) == []


def test_a_disk_that_fills_up_during_a_checkpoint_ends_the_job_and_with_room_again_it_continues(
    disk, start
):
    job = start()
    trainer = trainer_held(job)
    whole = contents(checkpoint.latest(job.run))
    # room for the step's trajectories and weights, not for its checkpoint of 1.8 MB
    disk.fill(leave=1_200_000)
    trainer.resume()
    assert job.wait() == 1, job.said
    assert f"{job.run}: No space left on device; free some space there; {CONTINUES}" in job.said
    assert "Traceback" not in job.said and job.orphans() == []
    assert (job.run / "checkpoints" / "step-000002.tmp").exists(), (
        "the disk was to be full during the checkpoint"
    )
    assert (
        checkpoint.latest(job.run).name == "step-000001"
        and contents(checkpoint.latest(job.run)) == whole
    )

    refused = start()
    assert refused.wait() == 2
    assert str(job.run) in refused.said and "No space left on device" in refused.said

    disk.empty()
    job = start()
    assert job.wait() == 0, job.said + job.logs()
    assert_complete(job)


def test_a_disk_that_becomes_read_only_ends_the_job_and_leaves_the_last_checkpoint(disk, start):
    job = start()
    trainer = trainer_held(job)
    disk.fail()
    trainer.resume()
    assert job.wait() == 1, job.said
    assert (
        f"{job.run}: Read-only file system; have it mounted writable again; {CONTINUES}" in job.said
    )
    assert "Traceback" not in job.said and job.orphans() == []

    refused = start()
    assert refused.wait() == 2
    assert str(job.run) in refused.said and "Read-only file system" in refused.said

    disk.mend()
    assert checkpoint.latest(job.run).name == "step-000001"
