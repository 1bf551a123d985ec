"""The texts that Slurm gets, and who stands where on its nodes."""

import os
import re
import sys
from pathlib import Path

import pytest

from rose.config import ConfigError, from_dict
from rose.launch import plan, sbatch
from rose.launch.layout import layout
from rose.places import REPOSITORY
from rose.protocol import Role
from tests.processes import ran
from tests.refusals import refused, table

SEVEN_B = ("model=qwen2_5_7b", "env=calculator", "trainer=zero3_gpu", "rollout=gpu")
SEVEN_B += ("cluster=slurm", "name=qwen7b", "cluster.gpus=24", "trainer.ranks=16")
SEVEN_B += ("rollout.workers=4", "rollout.tensor_parallel=2", "rollout.environment_hosts=4")


def asked(script):
    """The sbatch options of each component of the job."""
    return [{*re.findall("^#SBATCH --(.+)$", c, re.M)} for c in script.split("#SBATCH hetjob")]


def test_each_component_asks_for_its_own_and_spaces_in_names_are_quoted(make_config):
    c = make_config(
        *SEVEN_B,
        "cluster.slurm.trainer.partition=big cluster.slurm.rollout.partition=small",
        "cluster.slurm.trainer.account=me cluster.slurm.trainer.time=2-00:00:00",
        "cluster.slurm.trainer.cpus_per_task=12 cluster.slurm.setup=[module load cuda]",
        "cluster.slurm.trainer.sbatch=['--mail-user=a b','--gpus-per-node=a100:2']",
    )
    text = sbatch.script(c, layout(c), Path("/runs/my 50%x/%j"))
    both = {*"account=me cpus-per-task=12 mem=0 time=2-00:00:00".split()}
    both |= {"mail-user='a b'", "gpus-per-node=a100:8"}
    first = "exclusive job-name=qwen7b nodes=2 ntasks-per-node=11 open-mode=append partition=big "
    first += "requeue signal=B:USR2@120"
    log = (
        "output='/runs/my 50%%x/%%j/logs/slurm-%j.out'"  # no patterns of Slurm's, but for the last
    )
    second = {"nodes=1", "ntasks-per-node=4", "partition=small"}
    assert asked(text) == [both | {*first.split(), log}, both | second]
    assert f"PYTHONPATH={REPOSITORY}${{PYTHONPATH:+:$PYTHONPATH}}\nmodule load cuda\n" in text
    assert f"{sys.executable} -u -m rose.launch.batch '/runs/my 50%x/%j/submitted')" in text
    assert "--gpus-per-node=a100:8" in sbatch.srun_argv(c, layout(c), Path("/run"), 1)
    for gpus, said in (2, {"gpus-per-node=a100:2"}), (0, set()):
        [helper] = asked(sbatch.helper_script(c, "borrowed", gpus, Path("/run"), "lend-1"))
        assert {option for option in helper if "gpus" in option} == said


def test_one_srun_over_both_components(make_config):
    c = make_config(*SEVEN_B, "cluster.slurm.trainer.mem=64G", "cluster.slurm.rollout.mem=null")
    both = "--distribution=block --kill-on-bad-exit=0 --wait=0 --export=ALL --cpus-per-task"
    rank = "rank --run /run --attempt 3"
    assert " ".join(sbatch.srun_argv(c, layout(c), Path("/run"), 3, ["rank"])) == (
        f"srun --mpi=pmi2 --het-group=0 --nodes=2 --ntasks=22 --ntasks-per-node=11 {both}=8 "
        f"--gpus-per-node=8 --gpu-bind=none --mem=64G {rank} : --het-group=1 --nodes=1 --ntasks=4 "
        f"--ntasks-per-node=4 {both}=12 --gpus-per-node=8 --gpu-bind=none {rank}"
    )


BOX = (
    "cluster.slurm.container={runtime: %s, image: /shared/rose.sif, python: /usr/local/bin/python, "
    "mounts: ['/scratch:/data'], args: [--no-home]}"
)


def ends(argv):
    """What each component starts, behind srun's other options."""
    return [part.split("--export=ALL ")[1] for part in " ".join(argv).split(" : ")]


PYXIS = "--container-image=/shared/rose.sif "
PYXIS += f"--container-mounts={REPOSITORY}:{REPOSITORY},/runs:/runs,/scratch:/data --no-home"
APPTAINER = f"apptainer exec --nv --bind {REPOSITORY},/runs,/scratch:/data --no-home "
APPTAINER += "/shared/rose.sif"


@pytest.mark.parametrize(("runtime", "box"), [("apptainer", APPTAINER), ("pyxis", PYXIS)])
def test_every_rank_starts_in_the_container(make_config, runtime, box):
    cpus = "cluster.slurm.trainer.cpus_per_task=4 cluster.slurm.rollout.cpus_per_task=4"
    c = make_config(*SEVEN_B, BOX % runtime, cpus)
    point = Path("/runs/7b-seed=1,algorithm=grpo")  # run folder of one point of a sweep
    begins = "--cpus-per-task=4 --gpus-per-node=8 --gpu-bind=none --mem=0"
    rank = f"/usr/local/bin/python -m rose.main --run {point} --attempt 3"
    assert ends(sbatch.srun_argv(c, layout(c), point, 3)) == [f"{begins} {box} {rank}"] * 2
    script = sbatch.script(c, layout(c), Path("/run"))
    assert sys.executable in script, "what watches needs Slurm's commands"


def test_an_engine_that_the_run_asks_for_starts_in_the_container_too(make_config):
    begins = {
        "apptainer": f"apptainer exec --nv --bind '{REPOSITORY},/my runs,/scratch:/data' --no-home",
        # srun takes no CPUs over from the job.
        "pyxis": "srun --mpi=none --ntasks=1 --cpus-per-task=12 --container-image=/shared/rose.sif",
    }
    for runtime, begin in begins.items():
        c = make_config(*SEVEN_B, BOX % runtime)
        text = sbatch.helper_script(c, "borrowed", 1, Path("/my runs/a,b"), "lend-1")
        last = text.strip().splitlines()[-1]
        assert last.startswith(f"exec {begin} ")
        assert last.endswith(
            " /usr/local/bin/python -u -m rose.launch.batch '/my runs/a,b/submitted'"
        )


# The snapshot's files are links to files elsewhere in models--a--b.
SNAPSHOT = "/hub/models--a--b/snapshots/c0ffee"
RELAY = "transfer.relay=http://node:7673 transfer.relay_token_file=/keys/token"


READ = [(f"model.source=hub model.path=a/b model.snapshot={SNAPSHOT}", "/hub/models--a--b")]
READ += [(f"model.source=folder model.path={SNAPSHOT}", "/hub/models--a--b")]
READ += [(f"rollout.replay=/archive/a,b {RELAY}", "/archive,/keys/token")]


@pytest.mark.parametrize("overrides, mounted", READ)
def test_what_ranks_read_is_mounted_with_what_its_links_lead_to(make_config, overrides, mounted):
    c = make_config(*SEVEN_B, BOX % "apptainer", overrides)
    starts = ends(sbatch.srun_argv(c, layout(c), Path("/runs/run"), 1))
    found = {start.split("--bind ")[1].split()[0] for start in starts}
    assert found == {f"{REPOSITORY},/runs,{mounted},/scratch:/data"}


def test_a_path_that_the_runtime_would_take_for_two_is_refused(make_config):
    named = {
        "output_dir=/scratch/a,b": "output_dir",
        "model.path=/models/7b:2": "the model's folder",
    }
    for given, name in named.items():
        ours = (*SEVEN_B, "model.source=folder", given)
        with refused([f"{name}: {given.partition('=')[2]} can't be mounted"]):
            plan.make(make_config(*ours, BOX % "apptainer"), None)
        plan.make(make_config(*ours), None)


def test_a_job_that_computes_rewards_asks_for_cpus_only(make_config):
    reward = "reward=function reward.args.path=/mine.py:score reward.max_jobs=2"
    c = make_config(*SEVEN_B, reward, "cluster.slurm.borrowed.partition=spare")
    [options] = asked(sbatch.helper_script(c, "reward", 0, Path("/runs/100%"), "reward-0-1"))
    assert options >= {"cpus-per-task=4", "partition=spare", "job-name=qwen7b-reward-0-1"}
    # A percent sign in a path is none of Slurm's patterns.
    assert "output=/runs/100%%/logs/reward-0-1-%j.out" in options and "gpus" not in str(options)


def test_a_run_without_engines_is_a_plain_job_on_gpus_too(make_config):
    c = make_config(*SEVEN_B, "rollout.replay=/archive/run")
    ranks = layout(c)
    assert len(ranks) == 18 and all(rank.role is not Role.ROLLOUT for rank in ranks)
    assert "hetjob" not in sbatch.script(c, ranks, Path("/run"))
    assert "--het-group" not in " ".join(sbatch.srun_argv(c, ranks, Path("/run"), 1))


def test_every_node_of_the_trainer_component_has_the_same_number_of_ranks(make_config):
    ranks = layout(make_config(*SEVEN_B))
    assert [r.rank for r in ranks] == list(range(26))
    assert (ranks[0].role, ranks[0].node) == (Role.COORDINATOR, 0)
    for node in (0, 1):
        here = [r for r in ranks if (r.component, r.node) == (0, node)]
        of_trainers = [r.gpus for r in here if r.role is Role.TRAINER]
        assert len(here) == 11 and of_trainers == [(gpu,) for gpu in range(8)]
    engines = [r for r in ranks if r.component == 1]
    assert [r.gpus for r in engines] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {r.role for r in engines} == {Role.ROLLOUT}
    for role in Role:
        expected = list(range(sum(r.role is role for r in ranks)))
        assert [r.index for r in ranks if r.role is role] == expected
    assert sum(r.role is Role.ENVIRONMENT for r in ranks) >= 4


@pytest.mark.parametrize("text", ["a\n#SBATCH --uid=0", "", "\x07"])
def test_no_text_can_leave_its_line(tree, text):
    slurm = {"trainer": {"partition": text}, "rollout": {"qos": text}, "setup": [text]}
    for section, given in slurm.items():
        made = tree("cluster=dev")
        of = made["cluster"]["slurm"]
        of[section] = of[section] | given if isinstance(given, dict) else given
        with pytest.raises(ConfigError, match=rf"cluster.slurm.{section}\.\w+=.*one line"):
            from_dict(made)


SIZES = "mem='64G' mem='64GB' mem='64gb' mem='2048' mem='2T' mem='0' mem=64000 time='-1'"


@pytest.mark.parametrize("limit", [*SIZES.split(), "time='90'", "time='1:30:00'"])
def test_memory_and_time_are_given_as_sbatch_reads_them(make_config, limit):
    c = make_config(*SEVEN_B, f"cluster.slurm.rollout.{limit}")
    _, engines = asked(sbatch.script(c, layout(c), Path("/runs/x")))
    assert limit.replace("'", "") in engines


MORE = "trainer.ranks=8 rollout.workers=3 rollout.tensor_parallel=2 cluster.gpus=16"


@pytest.mark.parametrize(("more", "gpus"), [("", ["4", "4"]), (MORE, ["8", "6"])])
def test_only_the_gpus_that_ranks_use_are_asked_for(make_config, tmp_path, more, gpus):
    c = make_config("+experiment=qwen7b", "cluster=slurm", *more.split())
    steps = " ".join(sbatch.srun_argv(c, layout(c), tmp_path, 1))
    for text in (sbatch.script(c, layout(c), tmp_path, 120), steps):
        assert re.findall(r"gpus-per-node=(\d+)", text) == gpus


def test_a_serving_task_runs_the_checkouts_rose_in_a_container_too(stand_in):
    """Its image has a copy of ROSE without conf/, which pyxis, starting in the image's own folder,
    would find first."""
    stand_in(srun='echo "$PYTHONPATH"; echo "$*"; env | grep BIND\nexit 0')
    env = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(REPOSITORY)}
    env |= {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    env |= {
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_MEM_BIND": "quiet,none",
        "ROSE_PYTHON": "--container-image=/a.sqsh /usr/local/bin/python",
    }
    script = str(REPOSITORY / "slurm" / "serving_gpu.sbatch")
    assert ran(["bash", script, "name=x"], env=env, check=True).stdout.splitlines() == [
        str(REPOSITORY),
        "--gpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --export=ALL "
        "--container-image=/a.sqsh /usr/local/bin/python -u -m rose serve name=x",
    ]


BARE = "cluster.slurm.container={runtime: pyxis, image: a, python: /p, mounts: [], args: []}"
NO_JOB = rf"""
{BARE} cluster.slurm.container.runtime=docker -> container.runtime='docker'
{BARE} cluster.slurm.container.python=python
    -> container.python='python': the interpreter's absolute
{BARE} cluster.slurm.container.mounts=[scratch] -> container.mounts.0='scratch'
{BARE} cluster.slurm.container.args=[x] -> container.args.0='x'
{BARE} cluster.slurm.container.runtime=apptainer cluster.slurm.container.image=--help
    -> container.image='--help'
cluster=dev trainer.ranks=3 cluster.slurm.trainer.nodes=2 -> trainer.nodes=2 | trainer.ranks=3
cluster=dev rollout.workers=3 -> cluster.slurm.rollout.nodes=2 | rollout.workers=3
cluster=dev cluster.slurm.trainer.sbatch=[exclusive] -> trainer.sbatch.0='exclusive' | --exclusive
cluster=dev cluster.slurm.trainer.nodes=0 -> cluster.slurm.trainer.nodes=0 | >= 1
cluster.slurm.trainer.gpus_per_node=4 cluster.slurm.trainer.nodes=2
    -> slurm.trainer.gpus_per_node=4 | nodes=2
output_dir='/runs\\x' -> output_dir= | backslashes
cluster.slurm.trainer.sbatch=['--no-requeue'] -> sbatch.0='--no-requeue' | is set by ROSE
cluster.slurm.trainer.sbatch=['--nodes=3'] -> sbatch.0='--nodes=3' | is set by ROSE
cluster.slurm.trainer.sbatch=['--gpus-per-node=8'] -> sbatch.0= | set by ROSE | node=a100
cluster.slurm.trainer.sbatch=['--gpus-per-node=8:4'] -> sbatch.0= | set by ROSE | node=a100
cluster.slurm.trainer.sbatch=['--gpus=8'] -> sbatch.0='--gpus=8' | set by ROSE | node=a100
cluster.slurm.trainer.sbatch=['--time=2d'] -> sbatch.0='--time=2d' | Slurm's forms
cluster.slurm.trainer.sbatch=['--mem=64'] -> sbatch.0='--mem=64' | 64G
cluster.slurm.trainer.sbatch=['--array=1-3'] -> sbatch.0='--array=1-3' | is set by ROSE
cluster.slurm.trainer.sbatch=['--time 1'] -> sbatch.0='--time 1' | must be an option
cluster.slurm.trainer.sbatch=['--'] -> sbatch.0='--' | must be an option
cluster.slurm.trainer.sbatch=['-N3'] -> sbatch.0='-N3' | must be an option
cluster.slurm.trainer.sbatch=['--Nodes=3'] -> sbatch.0='--Nodes=3' | must be an option
"""


@pytest.mark.parametrize("overrides, words", table(NO_JOB))
def test_what_cannot_be_a_job_is_refused_by_key(make_config, overrides, words):
    with refused(words):
        make_config(*(() if "cluster=dev" in overrides else SEVEN_B), overrides)


# YAML reads 12:00:00 without quotes as the number 43200.
UNCLEAR = [("time=43200", "quotes")]
UNCLEAR += [(f"time={text}", "Slurm's forms") for text in ("2d", "1.5h", "'1:30:00:00'")]
UNCLEAR += [(f"mem={text}", "64G") for text in "64 '512' all 64.5G 1M 900KB 64B".split()]


@pytest.mark.parametrize("part", ["trainer", "rollout", "borrowed", "reward"])
@pytest.mark.parametrize("limit, words", UNCLEAR)
def test_a_limit_without_a_unit_is_refused(make_config, part, limit, words):
    override = f"cluster.slurm.{part}.{limit}"
    with refused([override.partition("=")[0] + "=", words]):
        make_config(*SEVEN_B, override)
