"""A started job ends as it should, says why, and leaves nothing behind: real mpiexec, real MPI, toy
ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rose import config as configuration
from rose.transfer import mirror
from tests import processes

pytestmark = pytest.mark.slow
DEADLINE_S = 600.0
LONG = "300"  # TOY_SECONDS of a run that ends before them, for another reason
DRIVE = Path(__file__).with_name("drive.py")
REPOSITORY = DRIVE.parents[2]


@pytest.fixture
def run_dir(tmp_path, make_config):
    configuration.save(make_config("cluster.stop_timeout_s=250"), tmp_path / "config.json")
    return tmp_path


@pytest.fixture
def impatient(run_dir, make_config):
    """The same with little time to stop, for tests in which it passes anyway."""
    configuration.save(make_config("cluster.stop_timeout_s=0.5"), run_dir / "config.json")
    return run_dir


@pytest.fixture
def begin(run_dir):
    """begin(TOY=..., TOY_SECONDS=...) -> the launcher's process, in `run_dir` or the folder given,
    with `up` once all ranks are up; whatever a failing test leaves is killed."""
    started = []

    def start(folder=run_dir, up=False, **toy):
        env = os.environ | {"PYTHONPATH": str(REPOSITORY)} | toy
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, str(DRIVE), str(folder)]
        started.append(subprocess.Popen(command, env=env, **output))
        if up:
            wait_until(lambda: all_up(folder))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=DEADLINE_S)
    for pid in of_run(run_dir):
        processes.kill(pid)


def of_run(run_dir):
    """Living processes of the job, by pid: everything with the run's folder on its command line,
    and the toy engines."""
    engines = filter(processes.alive, engines_of(run_dir))
    return {*(each.pid for each in processes.bearing(str(run_dir))), *engines}


def engines_of(run_dir):
    return {int(path.read_text()) for path in run_dir.glob("engine-*.pid")}


def outlive(run_dir):
    """What of the job does not end though its launcher has ended."""
    return processes.left(lambda: of_run(run_dir))


def wait_until(true):
    processes.until(true, "what the test needs", DEADLINE_S)


def all_up(run_dir, ranks=5):
    """Every rank says in its log that MPI is up."""
    return sum("is up" in path.read_text() for path in run_dir.glob("logs/latest/*-*.log")) == ranks


def assert_unshared(run_dir):
    """Ranks had shared memory of MPI's, by names, and the launcher that ended them removed it."""
    had = [name for path in run_dir.glob("shared-*") for name in path.read_text().splitlines()]
    assert len(had) >= 5 and not [name for name in had if Path(name).exists()]


def finish(process):
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


DEEDS = {"kill": "killed by SIGKILL", "exit": "exited with code 7"}
DEEDS |= {"raise": "exited with code 1: ValueError: the toy broke"}


@pytest.mark.parametrize("deed, words", DEEDS.items())
def test_a_dead_rank_ends_the_job_with_its_name_and_last_words(begin, run_dir, deed, words):
    memory = mirror.choose_path(run_dir)
    process = begin(up=True, TOY=f"trainer-0:{deed}", TOY_SECONDS=LONG)
    code, output = finish(process)
    assert code == 1
    assert "rank 2 (trainer 0, pid" in output and words in output
    assert "toy trainer 0 of 5 is up" in output, "the last log lines are missing"
    assert ("a rank was lost" in output) == (deed == "kill"), "for which Slurm requeues the job"
    assert not outlive(run_dir)
    assert not list(memory.parent.glob(memory.name.rpartition("-")[0] + "-*"))
    assert_unshared(run_dir)


def test_a_rank_that_does_not_leave_is_ended_once_the_coordinator_is_done(begin, impatient):
    code, output = finish(begin(TOY="rollout-1:hang", TOY_SECONDS="1"))
    assert code == 0, output  # all is saved
    assert not outlive(impatient)
    assert_unshared(impatient)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_coordinator_finish_cleanly(begin, run_dir, make_config, number):
    """Another rank, which hangs, is no fault of its."""
    configuration.save(make_config("cluster.stop_timeout_s=20"), run_dir / "config.json")
    hangs = {"TOY": "rollout-1:hang"} if number is signal.SIGTERM else {}
    process = begin(up=True, TOY_SECONDS=LONG, **hangs)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 128 + number and not output.strip(), output
    assert (run_dir / "clean").exists()
    assert not outlive(run_dir)


def test_a_coordinator_that_does_not_stop_is_ended_at_the_deadline(begin, impatient):
    process = begin(up=True, TOY="coordinator-0:hang")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143 and "did not stop within cluster.stop_timeout_s=0.5" in output
    assert not outlive(impatient)
    assert_unshared(impatient)


def test_ranks_that_do_not_appear_are_named_after_the_start_timeout(begin, run_dir, make_config):
    configuration.save(make_config("cluster.start_timeout_s=1e-6"), run_dir / "config.json")
    code, output = finish(begin(TOY_SECONDS=LONG))
    assert code == 1 and "did not start within cluster.start_timeout_s=1e-06" in output
    assert "rollout rank 4" in output
    assert not outlive(run_dir)


def test_a_second_signal_kills_at_once(begin, run_dir):
    process = begin(up=True, TOY="coordinator-0:hang")
    process.send_signal(signal.SIGINT)
    wait_until((run_dir / "told").exists)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "killed by the second signal" in output
    assert not outlive(run_dir)
    assert_unshared(run_dir)


def test_a_process_whose_maps_can_not_be_read_keeps_nobody_from_being_ended():
    """Reading them waits for the kernel's lock on its memory, which a hanging driver may hold."""
    code = """if True:
        import subprocess, time
        from rose.launch import supervise
        supervise.mpi_process.remove_shared = lambda pid: time.sleep(600)
        process = subprocess.Popen(["sleep", "600"])
        supervise.end_all(process)
        print(process.returncode)
    """
    done = processes.ran([sys.executable, "-c", code], cwd=REPOSITORY, timeout=300)
    assert done.stdout == "-9\n", done.stderr


def test_no_rank_outlives_a_launcher_that_is_killed(begin, run_dir):
    process = begin(up=True, TOY_SECONDS=LONG)
    process.kill()
    process.wait(timeout=DEADLINE_S)
    wait_until(lambda: not of_run(run_dir) - engines_of(run_dir))


@pytest.mark.parametrize("deed", ["raise", "hang"])
def test_a_full_disk_is_the_cause_and_no_lost_rank(begin, disk, tmp_path, make_config, deed):
    """With `raise` neither the rank nor its guard can say how it ended; with `hang` no rank even
    ends."""
    configuration.save(make_config(), disk.path / "config.json")
    full = tmp_path / "full"
    toy = {"TOY": f"trainer-0:{deed}", "TOY_SECONDS": LONG, "TOY_WAITS": str(full)}
    process = begin(disk.path, up=True, **toy)
    disk.fill()
    full.touch()
    code, output = finish(process)
    remedy = "No space left on device; free some space there; the same launch.py"
    assert code == 1 and f"{disk.path}: {remedy}" in output
    assert "a rank was lost" not in output
    assert "during this attempt, grew (files) by " in output  # the disk's filler
    assert not outlive(disk.path)
