"""Signals that Slurm sends to a job's batch script at any time reach what the job runs, and end
nothing by themselves."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rose.launch import batch, sbatch, slurm
from rose.launch.layout import layout
from tests import processes

DEADLINE_S = 120.0


def wait_for(path):
    processes.until(path.exists, str(path), DEADLINE_S)


# Objects that Python deletes as it exits, after it has restored the default action of signals.
last = []


class Last:
    """Holds the exit of its process until the file `gate-exit` is there."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __del__(self, open=open, exists=os.path.exists, sleep=time.sleep):
        open(self.folder + "/exit", "w").close()
        for _ in range(int(DEADLINE_S / 0.02)):
            if exists(self.folder + "/gate-exit"):
                break
            sleep(0.02)


@dataclass
class Work:
    """Stands for the run inside the job: holds at `gate`, and notes its signals."""

    folder: Path
    error: str = ""

    def __call__(self):
        (self.folder / "works").touch()
        wait_for(self.folder / "gate-works")
        if (self.folder / "signalled").exists():
            processes.until(lambda: batch.received, "the signal", DEADLINE_S)
        (self.folder / "got").write_text(" ".join(map(str, batch.received)))
        if not (self.folder / "gate-exit").exists():
            last.append(Last(self.folder))
        if self.error:
            raise slurm.RunFailed(self.error)


@pytest.fixture
def job(make_config, tmp_path, stand_in):
    """job(error) -> the running batch script, which holds in its setup lines, as Python starts, and
    in its work, until the file gate-PLACE is there."""
    started = []

    def start(error=""):
        late = tmp_path / "late" / "sitecustomize.py"  # Python runs it before anything of ours
        late.parent.mkdir()
        late.write_text(
            f"import os, time\nopen({str(tmp_path / 'python')!r}, 'w').close()\n"
            f"while not os.path.exists({str(tmp_path / 'gate-python')!r}): time.sleep(0.02)\n"
        )
        hold = f"touch {tmp_path}/setup; until [ -e {tmp_path}/gate-setup ]; do sleep 0.02; done"
        c = make_config("cluster=slurm", f"output_dir={tmp_path}", "name=run")
        c.cluster.slurm.setup.append(hold)
        text = sbatch.script(c, layout(c), tmp_path / "run")
        stand_in(sbatch="echo Submitted batch job 7", srun="exit 0")
        slurm.Executor(sbatch.folder(tmp_path / "run"), text).submit(Work(tmp_path, error))
        (tmp_path / "script").write_text(text)
        env = os.environ | {"SLURM_JOB_ID": "7", "PYTHONPATH": str(late.parent)}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = ["bash", str(tmp_path / "script")]
        started.append(subprocess.Popen(command, env=env, start_new_session=True, **output))
        return started[-1]

    (tmp_path / "gate-exit").touch()
    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=DEADLINE_S)


PLACES = ("setup", "python", "works")


SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("place, number", [*zip(PLACES, SIGNALS, strict=True)])
def test_a_signal_to_the_script_reaches_the_work_wherever_the_job_is(
    job, tmp_path, monkeypatch, place, number
):
    if place == "works":  # once in bash's POSIX mode
        monkeypatch.setenv("POSIXLY_CORRECT", "1")
    process = job()
    for each in PLACES:
        wait_for(tmp_path / each)
        if each == place:
            (tmp_path / "signalled").touch()
            process.send_signal(number)
            time.sleep(0.1)
        (tmp_path / f"gate-{each}").touch()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert (tmp_path / "got").read_text() == str(int(number))
    assert "Traceback" not in said


def test_a_signal_to_all_of_the_job_counts_once_and_a_failure_is_told(job, tmp_path):
    process = job("the disk is full")
    (tmp_path / "gate-setup").touch()
    wait_for(tmp_path / "python")
    os.killpg(process.pid, signal.SIGTERM)  # scancel sends it so
    (tmp_path / "gate-python").touch()
    wait_for(tmp_path / "works")
    os.killpg(process.pid, signal.SIGTERM)
    (tmp_path / "gate-works").touch()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert (tmp_path / "got").read_text() == str(int(signal.SIGTERM))
    assert said.splitlines()[-1] == "failed: the disk is full" and "Traceback" not in said


def test_a_signal_as_python_exits_changes_no_code(job, tmp_path):
    process = job("the disk is full")
    (tmp_path / "gate-exit").unlink()
    for place in PLACES:
        (tmp_path / f"gate-{place}").touch()
    wait_for(tmp_path / "exit")
    os.killpg(process.pid, signal.SIGTERM)
    (tmp_path / "gate-exit").touch()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, said
