"""The dev cluster's daemons and jobs end with the test run that started them, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.ports import cluster_ports

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
# Starts a cluster and on it a job that ignores SIGTERM, whose children have left its session and
# lost its environment. Then the test hangs.
HANGS = """
import subprocess, time
from pathlib import Path
from tests.slurm.conftest import cluster, in_the_cluster

def test_hangs(cluster):
    job = f'trap "" TERM; env -i setsid sleep 7000 & touch {cluster}/runs; sleep 7000'
    subprocess.run(["sbatch", "--output=/dev/null", "--wrap", job], check=True, timeout=600)
    while not (cluster / "runs").exists():
        time.sleep(0.1)
    Path("folder").write_text(str(cluster))
    time.sleep(7000)
"""


def of_cluster(folder: str) -> list[psutil.Process]:
    """The processes that name the cluster's folder in their command line or environment."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(*processes.VANISHED):
            if folder in " ".join([*each.cmdline(), *each.environ().values()]):
                found.append(each)
    return [each for each in found if processes.alive(each)]


def with_children(found: list[psutil.Process]) -> set[psutil.Process]:
    return {child for each in found for child in processes.children(each.pid, True)} | {*found}


@pytest.fixture
def start(tmp_path):
    """start(WORD, ...) -> a pytest in a session of its own, killed with all its children at the
    end."""
    started = []

    def start(*words: str) -> subprocess.Popen:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environ |= {"NODES": "1", "PYTHONPATH": str(REPOSITORY)}
        with (tmp_path / "output").open("w") as output:
            own = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            started.append(subprocess.Popen(words, cwd=tmp_path, env=environ, **own))
        return started[-1]

    yield start
    for each in started:
        processes.kill_family(each.pid)
        each.wait()


@pytest.mark.parametrize(
    "options, number", [((), signal.SIGTERM), (("-n", "1"), signal.SIGKILL)], ids=str
)
def test_an_interrupted_test_run_leaves_no_cluster(start, tmp_path, options, number):
    (tmp_path / "test_hangs.py").write_text(HANGS)
    here = ("-c", str(REPOSITORY / "pyproject.toml"), "--rootdir", str(tmp_path))
    run = start(sys.executable, "-m", "pytest", *here, *options, str(tmp_path / "test_hangs.py"))

    def up() -> str:
        assert run.poll() is None, (tmp_path / "output").read_text()
        with contextlib.suppress(FileNotFoundError):
            return (tmp_path / "folder").read_text()
        return ""

    folder = processes.until(up, "the job", 600.0)
    daemons = {processes.name(each) for each in of_cluster(folder)}
    assert {"munged", "mariadbd", "slurmctld", "slurmd"} <= daemons
    everything = with_children(of_cluster(folder))
    assert any(processes.words(each) == ["sleep", "7000"] for each in everything)

    run.send_signal(number)
    gone = [*everything, psutil.Process(run.pid)]
    assert not processes.left(lambda: [each for each in gone if processes.alive(each)])
    assert not processes.left(lambda: of_cluster(folder))
    processes.until(lambda: not Path(folder).exists(), f"the removal of {folder}")


def test_an_owner_that_ends_while_the_cluster_starts_takes_it_along(start, tmp_path):
    owner = start("sleep", "7000")
    folder = tmp_path / "c"
    settings = f"FOLDER={folder} PORT={cluster_ports()} NODES=1 GPUS=0 OWNERS={owner.pid}"
    starts = start("env", *settings.split(), f"{REPOSITORY}/slurm/dev_cluster.sh", "start")
    processes.until(lambda: processes.bearing(f"--socket={folder}/run/munge.sock"), "munged")
    owner.kill()
    owner.wait()
    starts.wait(processes.DEADLINE_S)
    assert not processes.left(lambda: of_cluster(str(folder)))
    processes.until(lambda: not folder.exists(), f"the removal of {folder}")
