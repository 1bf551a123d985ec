"""A run is submitted from any shell, one within another job too, as `srun --pty bash` on a GPU node
gives: none of that job's settings may reach the ranks."""

import os

import pytest
from rich.console import Console

from rose.launch import slurm, state
from rose.launch.layout import layout

OF_THE_SHELL = """
SLURM_JOB_ID=6 SLURM_HET_SIZE=2 SLURM_CPU_BIND=quiet,mask_cpu:0x1 SLURM_CPU_BIND_LIST=0x1
SLURM_GPUS_PER_TASK=1 SLURM_GPUS=1 SLURM_TRES_PER_TASK=gpu:1 SLURM_NTASKS_PER_GPU=1
SLURM_EXPORT_ENV=NONE SLURMD_NODENAME=n1 PMI_RANK=0
"""
OF_THE_SHELL = dict(each.split("=") for each in OF_THE_SHELL.split())
OF_THE_USER = {"SLURM_CONF": "/etc/here/slurm.conf", "SLURM_CLUSTERS": "big"}
OF_THE_USER |= {"SBATCH_ACCOUNT": "me", "LANG": "C"}


@pytest.fixture
def shell(monkeypatch):
    """shell(variables): this process's environment has them, and no others of Slurm or MPI."""

    def make(variables):
        for name in [name for name in os.environ if name.startswith(("SLURM", "PMI"))]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.fixture
def submitted(make_config, tmp_path, stand_in):
    """submitted("a=b", ...) -> the environment that sbatch finds."""

    def submit(*overrides):
        stand_in(sbatch=f"env > {tmp_path}/found; echo Submitted batch job 7")
        stand_in(srun="exit 0", squeue="exit 0", scontrol="exit 0")
        c = make_config("cluster=slurm", f"output_dir={tmp_path}", "name=run", *overrides)
        slurm.submit(c, layout(c), Console(quiet=True))
        lines = (tmp_path / "found").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    return submit


def test_sbatch_gets_nothing_of_the_job_in_whose_shell_it_is_called(shell, submitted):
    shell(OF_THE_SHELL | OF_THE_USER)
    found = submitted()
    assert not found.keys() & OF_THE_SHELL.keys()
    assert OF_THE_USER.items() <= found.items()
    assert OF_THE_SHELL.items() <= os.environ.items(), "this process keeps its own"
    site = {"SLURM_HINT": "nomultithread", "SLURM_MPI_TYPE": "pmix"} | OF_THE_USER
    shell(site)  # outside a job
    assert site.items() <= submitted().items()


def test_a_users_defaults_overrule_nothing_that_a_run_says(shell, submitted):
    names = ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_OUTPUT", "SBATCH_NO_REQUEUE")
    shell(dict.fromkeys((*names, "SQUEUE_STATES", "SACCT_FORMAT", "SLURM_CONF"), "theirs"))
    found = submitted("cluster.slurm.trainer.partition=gpu")
    assert found["SBATCH_ACCOUNT"] == "theirs", "the run names no account"
    assert not {"SBATCH_PARTITION", "SBATCH_OUTPUT", "SBATCH_NO_REQUEUE"} & found.keys()
    own = state.own_environment()
    assert "SLURM_CONF" in own and not {"SQUEUE_STATES", "SACCT_FORMAT"} & own.keys()


def test_the_ranks_srun_gets_nothing_that_is_of_one_component_only(shell, make_config):
    of_the_job = {"SLURM_CPUS_PER_TASK": "8", "SLURM_MEM_PER_NODE": "9", "SLURM_MEM_BIND": "local"}
    of_the_job |= {"SLURM_GPU_BIND": "single:1", "SLURM_NTASKS_PER_NODE": "4"}
    shell(OF_THE_SHELL | OF_THE_USER | of_the_job)
    found = slurm._environment(make_config("cluster=slurm", "+cluster.env.SLURM_MEM_BIND=none"))
    ours = {name.removeprefix("SLURM_") for name in found if name.startswith("SLURM_")}
    assert ours == {"JOB_ID", "HET_SIZE", "CONF", "CLUSTERS", "MEM_BIND"}
    assert found["SLURM_MEM_BIND"] == "none", "what cluster.env says goes for all ranks"
