"""The doctor on a real Slurm of several nodes: what works, a folder that isn't shared, an MPI that
isn't there."""

import os
import subprocess
import sys

import pytest

from rose.parts.doctor import slurm
from tests import processes
from tests.processes import ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(autouse=True)
def nothing_stays(cluster):
    yield

    def queued() -> list[str]:
        left = ran(["squeue", "--noheader", "--states=all", "--format=%T %j"], timeout=120).stdout
        return [line for line in left.splitlines() if line.startswith(("RUNNING", "PENDING"))]

    assert processes.left(queued) == []  # Slurm ends what was cancelled some time later


@pytest.fixture
def examine(make_config):
    """examine(folder, overrides) -> what the doctor finds about Slurm, by its part; the rest of
    what it examines is the same on any machine."""

    def found(folder, *overrides):
        folder.mkdir(exist_ok=True)
        config = make_config("cluster=dev", *overrides)
        return {finding.part: finding for finding in slurm.examine(config, folder)}

    return found


def test_it_finds_a_world_over_two_components_shared_files_and_a_join_between_two_nodes(tmp_path):
    """The command, with all that it examines."""
    well = ran(
        [sys.executable, "-m", "rose.parts.doctor", "--folder", str(tmp_path), "cluster=dev"],
        timeout=600,
    )
    assert well.returncode == 0, well.stdout + well.stderr
    for part in (
        "files seen between nodes: a file of n",
        "one MPI world, srun over two components",
        "join and survive a killed peer: one of n",
    ):
        assert f"ok       {part}" in well.stdout, well.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_kind_of_mpi_that_is_not_there_is_named(examine, tmp_path):
    ill = examine(tmp_path, "cluster.mpi.srun=['--mpi=pmi9']")["srun --mpi"]
    assert ill.state == "failed" and ill.words.startswith("no pmi9 here"), ill


def test_a_folder_of_one_node_is_not_shared(examine, cluster):
    """Each node of the dev cluster has a folder of its own mounted there."""
    if subprocess.run(["unshare", "--mount", "--uts", "true"], timeout=120).returncode:
        pytest.skip("no namespaces here, so all nodes have the same folders")
    ill = examine(cluster / "pmix" / "runs", "cluster.mpi.join=false")["files seen between nodes"]
    assert ill.state == "failed" and "on a file system that all nodes share" in ill.remedy, ill


def test_where_none_can_join_it_says_what_is_lost(examine, tmp_path, monkeypatch):
    """In a container, by an Apptainer of our own that notes its arguments and starts what it was to
    start."""
    (tmp_path / "bin").mkdir()
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/bin/started\n'
        'while [ "$1" != /no/image.sif ]; do shift; done\nshift\nexec "$@"\n'
    )
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", str(apptainer.parent), prepend=os.pathsep)
    box = f"{{runtime: apptainer, image: /no/image.sif, python: {sys.executable}, mounts: [/tmp], args: [--no-home]}}"
    said = examine(tmp_path, "cluster.mpi.join=false", f"cluster.slurm.container={box}")
    assert not [finding for finding in said.values() if finding.state == "failed"], said
    started = (tmp_path / "bin" / "started").read_text().splitlines()
    assert len(started) == 2 and all(
        line.startswith("exec --bind ") and "-m rose.parts.doctor.rank" in line for line in started
    )
    assert said["one MPI world, srun over two components"].state == "ok"
    lost = said["join and survive a killed peer"]
    assert lost.state == "warning" and lost.words.startswith("not tried: cluster.mpi.join=false")
    assert "dedicated rollout ranks only" in lost.remedy
