"""The run's folder takes no more: the main job ends with one clear error, and continues once there
is room again."""

from pathlib import Path

import pytest

from rose import config as configuration
from rose.launch import model, on_disk
from rose.trainer import checkpoint
from tests.job.job import Held, Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONTINUES = "the same launch.py command then continues the run from its last checkpoint"


@pytest.fixture
def held(tmp_path):
    """The run waits in its second and third steps, with the checkpoint of the one before whole:
    whatever the test does to the disk, however slowly, is done before the next."""
    made = Held(tmp_path / "held", 3)
    made.release(1)
    return made


@pytest.fixture
def start(disk, held):
    """start() -> the job on the disk; whatever a failing test leaves of it is killed before the
    disk goes."""
    jobs = []

    def begin() -> Job:
        jobs.append(Job(disk.path, *held.overrides))
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


def until_held(held: Held, job: Job, step: int) -> None:
    held.until(job, step)
    saved = f"step-{step - 1:06}"
    job.until(
        lambda: (found := checkpoint.latest(job.run)) and found.name == saved, f"checkpoint {saved}"
    )


def test_a_disk_that_fills_up_and_then_fails_ends_the_job_which_goes_on_mended(disk, start, held):
    job = start()
    until_held(held, job, 2)
    whole = contents(checkpoint.latest(job.run))
    config = configuration.load(job.run / "config.json")
    expected = on_disk.of(config, model.shape(config))
    assert len(whole) == expected.files
    # of a tiny model the names and shapes of its tensors are a fifth
    assert expected.checkpoint < sum(map(len, whole.values())) < 1.4 * expected.checkpoint
    # room for the step's trajectories and weights, not for its checkpoint of 1.8 MB
    disk.fill(leave=1_200_000)
    held.release(2)
    assert job.wait() == 1, job.said
    assert f"{job.run}: No space left on device; free some space there; {CONTINUES}" in job.said
    assert "Traceback" not in job.said and job.orphans() == []
    half = job.run / "checkpoints" / "step-000002.tmp"
    assert half.exists(), "the disk was to be full during the checkpoint"
    assert checkpoint.latest(job.run).name == "step-000001"
    assert contents(checkpoint.latest(job.run)) == whole
    refused = start()
    assert refused.wait() == 2
    assert str(job.run) in refused.said and "No space left on device" in refused.said

    disk.empty()
    job = start()
    until_held(held, job, 3)
    # every step once, trained on the trajectories of an uninterrupted run, nothing unfinished left
    assert [row["step"] for row in job.steps()] == [1, 2] and not half.exists()
    assert trained_on(job.run, 2) == [f"g{g}.{m}" for g in range(8) for m in range(4)]
    disk.fail()
    held.release(3)
    assert job.wait() == 1, job.said
    words = f"{job.run}: Read-only file system; have it mounted writable again; {CONTINUES}"
    assert words in job.said and "Traceback" not in job.said and job.orphans() == []
    refused = start()
    assert refused.wait() == 2
    assert str(job.run) in refused.said and "Read-only file system" in refused.said
    disk.mend()
    assert checkpoint.latest(job.run).name == "step-000002"
