"""The doctor on a real Slurm of several nodes: what works, a folder that isn't shared, an MPI that
isn't there."""

import os
import subprocess
import sys

import pytest

from tests import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture
def doctor(cluster, tmp_path):
    def examine(*overrides, folder=tmp_path):
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "rose.doctor",
                "--folder",
                str(folder),
                "cluster=dev",
                *overrides,
            ],
            capture_output=True,
            text=True,
            timeout=600,
        )

    yield examine

    def queued() -> list[str]:
        left = subprocess.run(
            ["squeue", "--noheader", "--states=all", "--format=%T %j"],
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        return [line for line in left.splitlines() if line.startswith(("RUNNING", "PENDING"))]

    assert processes.left(queued) == []  # Slurm ends what was cancelled some time later


def test_it_finds_a_world_over_two_components_shared_files_and_a_join_between_two_nodes(
    doctor, tmp_path
):
    well = doctor()
    assert well.returncode == 0, well.stdout + well.stderr
    for part in (
        "files seen between nodes: a file of n",
        "one MPI world, srun over two components",
        "join and survive a killed peer: one of n",
    ):
        assert f"ok       {part}" in well.stdout, well.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_kind_of_mpi_that_is_not_there_is_named(doctor):
    ill = doctor("cluster.mpi.srun=['--mpi=pmi9']")
    assert ill.returncode == 1 and "failed   srun --mpi: no pmi9 here" in ill.stdout, ill.stdout


def test_a_folder_of_one_node_is_not_shared(doctor, cluster):
    """Each node of the dev cluster has a folder of its own mounted there."""
    if subprocess.run(["unshare", "--mount", "--uts", "true"], timeout=120).returncode:
        pytest.skip("no namespaces here, so all nodes have the same folders")
    ill = doctor(folder=cluster / "pmix" / "runs")
    assert ill.returncode == 1 and "failed   files seen between nodes" in ill.stdout, ill.stdout
    assert "on a file system that all nodes share" in ill.stdout


def test_where_none_can_join_it_says_what_is_lost(doctor, tmp_path, monkeypatch):
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
    said = doctor("cluster.mpi.join=false", f"cluster.slurm.container={box}")
    assert said.returncode == 0, said.stdout
    # the doctor also tries it as a sandbox
    lines = (tmp_path / "bin" / "started").read_text().splitlines()
    started = [line for line in lines if "-m rose.doctor.rank" in line]
    assert len(started) == 2 and all(line.startswith("exec --bind ") for line in started)
    assert "ok       one MPI world, srun over two components" in said.stdout
    assert (
        "warning  join and survive a killed peer: not tried: cluster.mpi.join=false" in said.stdout
    )
    assert "dedicated rollout ranks only" in said.stdout
