"""What the doctor says of a part that works, and of one that doesn't."""

import subprocess
import sys

import pytest

from rose import doctor


def ended(stdout="", stderr="", code=0):
    return subprocess.CompletedProcess(["x"], code, stdout, stderr)


def test_a_folder_that_cannot_hold_runs_is_named(tmp_path):
    assert doctor.file_system(tmp_path / "runs").state in ("ok", "warning")
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "file").touch()
    found = doctor.file_system(tmp_path / "file" / "runs")
    assert found.state == "failed" and str(tmp_path / "file") in found.words and "folder that you may write" in found.remedy


def test_a_package_that_does_not_import_is_named():
    assert doctor.package("h5py").state == "ok"
    found = doctor.package("rose_has_no_such_package")
    assert found.state == "failed" and "rose_has_no_such_package" in found.words and "pip install" in found.remedy


@pytest.mark.parametrize(("done", "state", "words"), [
    (ended("ranks 2 MPICH 5\nranks 2 MPICH 5\n"), "ok", "MPICH 5"),
    (ended("ranks 1 MPICH 5\nranks 1 MPICH 5\n"), "failed", "2 ranks, each in a world of 1"),
    (ended("", "srun: error: no", 1), "failed", "srun: error: no"),
    (ended("", "", 3), "failed", "exit code 3"),
])
def test_one_world_is_two_ranks_that_know_of_each_other(done, state, words):
    found = doctor._world(done, "srun", "ask")
    assert found.state == state and words in found.words


@pytest.mark.parametrize(("overrides", "words"), [
    (["cluster.kind=pbs"], "cluster.kind='pbs'"), (["cluster=nowhere"], "cluster=nowhere"), (["-m", "seed=1,2"], "no sweep")])
def test_bad_overrides_are_refused_with_code_2(overrides, words):
    done = subprocess.run([sys.executable, "-m", "rose.doctor", *overrides], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.slow
def test_this_machine_works(tmp_path):
    done = subprocess.run([sys.executable, "-m", "rose.doctor", "--folder", str(tmp_path)], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("import vllm", "import deepspeed", "one MPI world, mpiexec"):
        assert f"ok       {part}" in done.stdout
