"""A real Slurm on this machine for all tests here, and the main job submitted to it as a user
does."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rose.launch import state
from rose.observe.metrics import read_metrics, rows_of
from tests import ports
from tests.job.job import SMALL
from tests.processes import ran

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0


@pytest.fixture(scope="session")
def cluster():
    """Four nodes; stopped, and everything of them removed, afterwards, also when this process or
    xdist's, which started it, is killed."""
    folder = Path(tempfile.mkdtemp(prefix="rose-slurm-", dir="/tmp"))  # sockets want short paths
    dev_cluster(folder, "start")
    yield folder
    dev_cluster(folder, "stop")
    shutil.rmtree(folder, ignore_errors=True)  # a late slurmstepd removes its own part


@pytest.fixture(scope="module", autouse=True)
def in_the_cluster(cluster):
    """Slurm's commands mean this cluster, for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", f"{cluster}/etc/slurm.conf")
        yield


def settings(folder: Path) -> dict[str, str]:
    """Settings of slurm/dev_cluster.sh."""
    owners = [os.getpid()] + [os.getppid()] * ("PYTEST_XDIST_WORKER" in os.environ)
    return {
        "FOLDER": str(folder),
        "PORT": str(_first_port()),
        "GPUS": "0",
        "OWNERS": " ".join(map(str, owners)),
    }


@functools.cache
def _first_port() -> int:
    return ports.cluster_ports()


def dev_cluster(folder: Path, *words: str) -> None:
    done = ran(
        [str(REPOSITORY / "slurm" / "dev_cluster.sh"), *words],
        env=os.environ | settings(folder),
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class SlurmJob:
    """The main job, small, on the dev cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.front = (sys.executable, str(REPOSITORY / "launch.py"))
        self.environ, self.cwd = None, None  # the tests' own

    def submit(self, *overrides: str, code: int = 0) -> str:
        """The front door's words; its exit code must be `code`."""
        command = [*self.front, "cluster=dev", f"output_dir={self.folder}", "name=run", *SMALL]
        command += ["cluster.slurm.rollout.nodes=1", *overrides]
        done = ran(command, timeout=DEADLINE_S, env=self.environ, cwd=self.cwd)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit_paused(self, *overrides: str) -> str:
        """A run of which each move waits while `paused`."""
        return self.submit(
            "env.name=tests.job.held:PausedLake",
            f"+env.args.paused={self._pause}",
            "env.step_timeout_s=1000",
            *overrides,
        )

    @contextlib.contextmanager
    def works(self) -> Iterator[None]:
        """Meanwhile it goes on, and pauses at the end: what a test waits for otherwise has the
        machine's cores."""
        self._pause.unlink(missing_ok=True)
        try:
            yield
        finally:
            self._pause.touch()

    @property
    def _pause(self) -> Path:
        return self.folder / "paused"

    @property
    def id(self) -> str:
        return state.submitted(self.run)

    def states(self) -> list[str]:
        return [component.state for component in state.components(self.id)]

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S):
        end, unanswered = time.monotonic() + deadline_s, ""

        def holds():
            nonlocal unanswered
            try:
                return condition()
            except RuntimeError as error:  # Slurm's commands on a busy machine
                unanswered = str(error)

        while not (value := holds()):
            assert time.monotonic() < end, (
                f"waited {deadline_s:.0f} s for {what}: {self.states()} {unanswered}\n{self.logs()}"
            )
            time.sleep(0.2)
        return value

    def until_ended(self) -> list[str]:
        self.until(lambda: self.states() and not state.is_active(self.id), "the job's end")
        return self.states()

    def steps(self) -> list[int]:
        return [row["step"] for row in rows_of(read_metrics(self.run), "step")]

    def said(self) -> str:
        return "".join(p.read_text() for p in sorted((self.run / "logs").glob("slurm-*.out")))

    def logs(self) -> str:
        return self.said() + "\n".join(
            f"--- {p}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-25:])
            for p in sorted((self.run / "logs" / "latest").glob("*.log"))
        )


@pytest.fixture
def job(cluster, tmp_path):
    job = SlurmJob(tmp_path)
    yield job
    if (tmp_path / "run").exists() and job.id and state.is_active(job.id):
        subprocess.run(["scancel", job.id], check=True, timeout=120)
        job.until(lambda: not state.is_active(job.id), "scancel")
