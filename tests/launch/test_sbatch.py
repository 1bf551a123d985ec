"""The texts that Slurm gets, and who stands where on its nodes."""

import os
import re
import sys
from pathlib import Path

import pytest

from rose.config import ConfigError, from_dict
from rose.launch import plan, sbatch, slurm, state
from rose.launch.layout import layout
from rose.places import REPOSITORY
from rose.protocol import Role
from tests.processes import ran

SEVEN_B = ("model=qwen2_5_7b", "env=calculator", "trainer=zero3_gpu", "rollout=gpu")
SEVEN_B += ("cluster=slurm", "name=qwen7b", "cluster.gpus=24", "trainer.ranks=16")
SEVEN_B += ("rollout.workers=4", "rollout.tensor_parallel=2", "rollout.environment_hosts=4")

GOLDEN = """#!/bin/bash

# Parameters
#SBATCH --account=me
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=qwen7b
#SBATCH --mail-user='a b'
#SBATCH --mem=0
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=11
#SBATCH --open-mode=append
#SBATCH --output='/runs/my runs/qwen7b/logs/slurm-%j.out'
#SBATCH --partition=big
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=2-00:00:00

# setup
#SBATCH hetjob
#SBATCH --account=me
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-node=8
#SBATCH --mail-user='a b'
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --partition=small
#SBATCH --time=2-00:00:00

rose_signals= rose_ready=
rose_pass() {{ [ -z "$rose_ready" ] || kill -s "$1" "$rose_python" || :; }}
trap 'rose_signals="$rose_signals INT"; rose_pass INT' INT
trap 'rose_signals="$rose_signals TERM"; rose_pass TERM' TERM
trap 'rose_signals="$rose_signals USR2"; rose_pass USR2' USR2
trap 'rose_ready=1; for rose_signal in $rose_signals; do rose_pass $rose_signal; done' USR1

export PYTHONPATH={repository}${{PYTHONPATH:+:$PYTHONPATH}}
module load cuda

# command
export SUBMITIT_EXECUTOR=slurm
set +o posix
(trap '' INT TERM USR2; export ROSE_BATCH_SHELL=$$; exec {python} -u -m rose.launch.batch '/runs/my runs/qwen7b/submitted') &
rose_python=$!
while kill -0 "$rose_python" 2>/dev/null; do wait "$rose_python" || :; done
wait "$rose_python"
"""  # noqa: E501


def test_the_batch_script_word_for_word(make_config):
    c = make_config(
        *SEVEN_B,
        "cluster.slurm.trainer.partition=big cluster.slurm.rollout.partition=small",
        "cluster.slurm.trainer.account=me cluster.slurm.trainer.time=2-00:00:00",
        "cluster.slurm.trainer.cpus_per_task=12 cluster.slurm.setup=[module load cuda]",
        "cluster.slurm.trainer.sbatch=[--mail-user=a b]",
    )
    text = sbatch.script(c, layout(c), Path("/runs/my runs/qwen7b"))
    assert text == GOLDEN.format(repository=REPOSITORY, python=sys.executable)


def test_one_srun_over_both_components(make_config):
    c = make_config(*SEVEN_B, "cluster.slurm.trainer.mem=64G", "cluster.slurm.rollout.mem=null")
    assert " ".join(sbatch.srun_argv(c, layout(c), Path("/run"), 3, ["rank"])) == (
        "srun --mpi=pmi2 --het-group=0 --nodes=2 --ntasks=22 --ntasks-per-node=11 "
        "--distribution=block "
        "--kill-on-bad-exit=0 --wait=0 --export=ALL --cpus-per-task=8 --gpus-per-node=8 "
        "--gpu-bind=none --mem=64G "
        "rank --run /run --attempt 3 : --het-group=1 --nodes=1 --ntasks=4 --ntasks-per-node=4 "
        "--distribution=block "
        "--kill-on-bad-exit=0 --wait=0 --export=ALL --cpus-per-task=12 --gpus-per-node=8 "
        "--gpu-bind=none rank --run /run --attempt 3"
    )


BOX = (
    "cluster.slurm.container={runtime: %s, image: /shared/rose.sif, python: /usr/local/bin/python, "
    "mounts: ['/scratch:/data'], args: [--no-home]}"
)


def ends(argv):
    """What each component starts, behind srun's other options."""
    return [part.split("--export=ALL ")[1] for part in " ".join(argv).split(" : ")]


@pytest.mark.parametrize(
    ("runtime", "begins"),
    [
        (
            "apptainer",
            "--cpus-per-task=4 --gpus-per-node=8 --gpu-bind=none --mem=0 apptainer exec --nv "
            f"--bind {REPOSITORY},/runs,/scratch:/data --no-home /shared/rose.sif "
            "/usr/local/bin/python -m rose.main --run /runs/7b-seed=1,algorithm=grpo --attempt 3",
        ),
        (
            "pyxis",
            "--cpus-per-task=4 --gpus-per-node=8 --gpu-bind=none --mem=0 "
            "--container-image=/shared/rose.sif "
            f"--container-mounts={REPOSITORY}:{REPOSITORY},/runs:/runs,/scratch:/data --no-home "
            "/usr/local/bin/python -m rose.main --run /runs/7b-seed=1,algorithm=grpo --attempt 3",
        ),
    ],
)
def test_every_rank_starts_in_the_container(make_config, runtime, begins):
    c = make_config(
        *SEVEN_B,
        BOX % runtime,
        "cluster.slurm.trainer.cpus_per_task=4 cluster.slurm.rollout.cpus_per_task=4",
    )
    point = Path("/runs/7b-seed=1,algorithm=grpo")  # of a sweep
    assert ends(sbatch.srun_argv(c, layout(c), point, 3)) == [begins, begins]
    assert sys.executable in sbatch.script(c, layout(c), Path("/run")), (
        "what watches needs Slurm's commands"
    )


def test_without_a_container_ranks_start_with_this_interpreter(make_config):
    c = make_config(*SEVEN_B)
    assert all(
        f"{sys.executable} -m rose.main" in end
        for end in ends(sbatch.srun_argv(c, layout(c), Path("/run"), 1))
    )


def test_an_engine_that_the_run_asks_for_starts_in_the_container_too(make_config):
    last = {}
    for runtime in ("apptainer", "pyxis"):
        c = make_config(*SEVEN_B, BOX % runtime)
        text = sbatch.helper_script(c, "borrowed", 1, Path("/my runs/a,b"), "lend-1")
        last[runtime] = text.strip().splitlines()[-1]
    submit = "/usr/local/bin/python -u -m rose.launch.batch '/my runs/a,b/submitted'"
    assert last["apptainer"] == (
        f"exec apptainer exec --nv --bind '{REPOSITORY},/my runs,/scratch:/data' --no-home "
        f"/shared/rose.sif {submit}"
    )
    assert last["pyxis"].startswith(
        "exec srun --mpi=none --ntasks=1 --cpus-per-task=12 --container-image=/shared/rose.sif "
    ), "srun takes no CPUs over from the job"
    assert last["pyxis"].endswith(submit)


def test_a_job_that_computes_rewards_asks_for_cpus_only(make_config):
    reward = ("reward=function", "reward.args.path=/mine.py:score", "reward.max_jobs=2")
    c = make_config(*SEVEN_B, *reward, "cluster.slurm.borrowed.partition=spare")
    text = sbatch.helper_script(c, "reward", 0, Path("/runs/run"), "reward-0-1")
    assert "#SBATCH --cpus-per-task=4" in text and "#SBATCH --partition=spare" in text
    assert "gpus" not in text and "#SBATCH --job-name=qwen7b-reward-0-1" in text


@pytest.mark.parametrize(
    "model",
    [
        ("model.source=hub", "model.path=a/b", "model.snapshot=/hub/models--a--b/snapshots/c0ffee"),
        ("model.source=folder", "model.path=/hub/models--a--b/snapshots/c0ffee"),
    ],
)
def test_a_model_in_a_hubs_cache_is_mounted_with_what_its_links_lead_to(make_config, model):
    c = make_config(*SEVEN_B, BOX % "apptainer", *model)
    (mounts,) = {
        end.split("--bind ")[1].split()[0]
        for end in ends(sbatch.srun_argv(c, layout(c), Path("/runs/run"), 1))
    }
    assert mounts == f"{REPOSITORY},/runs,/hub/models--a--b,/scratch:/data"


def test_what_else_ranks_read_is_mounted(make_config):
    c = make_config(
        *SEVEN_B,
        BOX % "apptainer",
        "rollout.replay=/archive/a,b transfer.relay=http://node:7673",
        "transfer.relay_token_file=/keys/token",
    )
    (only,) = ends(sbatch.srun_argv(c, layout(c), Path("/runs/run"), 1))
    expected = f"{REPOSITORY},/runs,/archive,/keys/token,/scratch:/data"
    assert only.split("--bind ")[1].split()[0] == expected


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("output_dir=/scratch/a,b", "output_dir: /scratch/a,b can't be mounted"),
        ("model.path=/models/7b:2", "the model's folder: /models/7b:2 can't be mounted"),
    ],
)
def test_a_path_that_the_runtime_would_take_for_two_is_refused(make_config, override, words):
    ours = ("model.source=folder", override)
    with pytest.raises(ConfigError, match=words):
        plan.make(make_config(*SEVEN_B, BOX % "apptainer", *ours), None)
    plan.make(make_config(*SEVEN_B, *ours), None)


def test_a_run_without_engines_is_a_plain_job(make_config, tmp_path):
    c = make_config("cluster=dev", f"rollout.replay={tmp_path}")
    assert "hetjob" not in sbatch.script(c, layout(c), Path("/run"))
    assert "--het-group" not in " ".join(sbatch.srun_argv(c, layout(c), Path("/run"), 1))


def test_a_run_without_engines_trains_on_gpus_too(make_config):
    ranks = layout(make_config(*SEVEN_B, "rollout.replay=/archive/run"))
    assert len(ranks) == 18 and all(rank.role is not Role.ROLLOUT for rank in ranks)


def test_every_node_of_the_trainer_component_has_the_same_number_of_ranks(make_config):
    ranks = layout(make_config(*SEVEN_B))
    assert [r.rank for r in ranks] == list(range(26))
    assert (ranks[0].role, ranks[0].node) == (Role.COORDINATOR, 0)
    for node in (0, 1):
        here = [r for r in ranks if (r.component, r.node) == (0, node)]
        trainers = [r for r in here if r.role is Role.TRAINER]
        assert len(here) == 11 and [r.gpus for r in trainers] == [(gpu,) for gpu in range(8)]
    engines = [r for r in ranks if r.component == 1]
    assert [r.gpus for r in engines] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {r.role for r in engines} == {Role.ROLLOUT}
    for role in Role:
        expected = list(range(sum(r.role is role for r in ranks)))
        assert [r.index for r in ranks if r.role is role] == expected
    assert sum(r.role is Role.ENVIRONMENT for r in ranks) >= 4


@pytest.mark.parametrize("text", ["a\n#SBATCH --uid=0", "", "\x07"])
def test_no_text_can_leave_its_line(tree, text):
    for section, key in (("trainer", "partition"), ("rollout", "qos")):
        made = tree("cluster=dev")
        made["cluster"]["slurm"][section][key] = text
        with pytest.raises(ConfigError, match=f"cluster.slurm.{section}.{key}=.*one line"):
            from_dict(made)
    made = tree("cluster=dev")
    made["cluster"]["slurm"]["setup"] = [text]
    with pytest.raises(ConfigError, match="cluster.slurm.setup.0=.*one line"):
        from_dict(made)


def test_memory_may_be_a_plain_number_and_a_time_is_text(make_config):
    c = make_config(
        *SEVEN_B,
        "cluster.slurm.trainer.time='90'",
        "cluster.slurm.rollout.mem=64000",
        "cluster.slurm.rollout.time='1:30:00'",
    )
    text = sbatch.script(c, layout(c), Path("/runs/x"))
    assert "#SBATCH --time=90\n" in text and "#SBATCH --mem=64000\n" in text
    assert "#SBATCH --time=1:30:00\n" in text


def test_a_percent_sign_in_a_path_is_none_of_slurms_patterns(make_config):
    c = make_config(*SEVEN_B)
    text = sbatch.script(c, layout(c), Path("/runs 50%x/%j"))
    assert "/runs 50%%x/%%j/logs/slurm-%j.out" in text
    text = sbatch.helper_script(c, "borrowed", 1, Path("/runs/100%"), "lend")
    assert "/runs/100%%/logs/lend-%j.out" in text


def test_a_users_defaults_for_slurms_commands_overrule_nothing(monkeypatch):
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_OUTPUT", "SBATCH_TIMELIMIT"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")
    text = "#SBATCH --partition=gpu\n#SBATCH --time=1:00:00\n"
    found = set(slurm._overruling(text))
    assert found == {"SBATCH_PARTITION", "SBATCH_OUTPUT", "SBATCH_TIMELIMIT", "SBATCH_NO_REQUEUE"}
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SACCT_FORMAT", "jobid")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    own = state.own_environment()
    assert "SLURM_CONF" in own and not {"SQUEUE_STATES", "SACCT_FORMAT"} & own.keys()


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ((), [4, 4]),
        (
            (
                "trainer.ranks=8",
                "rollout.workers=3",
                "rollout.tensor_parallel=2",
                "cluster.gpus=16",
            ),
            [8, 6],
        ),
    ],
)
def test_only_the_gpus_that_ranks_use_are_asked_for(make_config, tmp_path, more, asked):
    c = make_config("+experiment=qwen7b", "cluster=slurm", *more)
    text = sbatch.script(c, layout(c), tmp_path, 120)
    assert re.findall(r"gpus-per-node=(\d+)", text) == [str(gpus) for gpus in asked]
    steps = " ".join(sbatch.srun_argv(c, layout(c), tmp_path, 1))
    assert re.findall(r"gpus-per-node=(\d+)", steps) == [str(gpus) for gpus in asked]


def test_a_serving_task_runs_the_checkouts_rose_in_a_container_too(tmp_path):
    """Its image has a copy of ROSE without conf/, which pyxis, starting in the image's own folder,
    would find first."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$PYTHONPATH"; echo "$*"; env | grep BIND\nexit 0\n')
    srun.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_MEM_BIND": "quiet,none",
        "ROSE_PYTHON": "--container-image=/a.sqsh /usr/local/bin/python",
    }
    said = ran(
        ["bash", str(REPOSITORY / "slurm" / "serving_gpu.sbatch"), "name=x"], env=env, check=True
    ).stdout.splitlines()
    assert said == [
        str(REPOSITORY),
        "--gpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --export=ALL "
        "--container-image=/a.sqsh /usr/local/bin/python -u -m rose serve name=x",
    ]


BARE = "cluster.slurm.container={runtime: pyxis, image: a, python: /p, mounts: [], args: []}"
HERE = "cluster.slurm.container"


@pytest.mark.parametrize(
    "base, overrides, words",
    [
        (SEVEN_B, f"{BARE} {HERE}.runtime=docker", "container.runtime='docker'"),
        (
            SEVEN_B,
            f"{BARE} {HERE}.python=python",
            "container.python='python': the interpreter's absolute",
        ),
        (SEVEN_B, f"{BARE} {HERE}.mounts=[scratch]", "container.mounts.0='scratch'"),
        (SEVEN_B, f"{BARE} {HERE}.args=[x]", "container.args.0='x'"),
        (
            SEVEN_B,
            f"{BARE} {HERE}.runtime=apptainer {HERE}.image=--help",
            "container.image='--help'",
        ),
        (
            ["cluster=dev"],
            "trainer.ranks=3 cluster.slurm.trainer.nodes=2",
            "trainer.nodes=2.*trainer.ranks=3",
        ),
        (["cluster=dev"], "rollout.workers=3", "cluster.slurm.rollout.nodes=2.*rollout.workers=3"),
        (
            ["cluster=dev"],
            "cluster.slurm.trainer.sbatch=[exclusive]",
            "trainer.sbatch.0='exclusive'.*--exclusive",
        ),
        (["cluster=dev"], "cluster.slurm.trainer.nodes=0", "cluster.slurm.trainer.nodes=0.*>= 1"),
        (
            SEVEN_B,
            "cluster.slurm.trainer.gpus_per_node=4 cluster.slurm.trainer.nodes=2",
            "slurm.trainer.gpus_per_node=4.*nodes=2",
        ),
        (SEVEN_B, r"output_dir='/runs\\x'", "output_dir=.*backslashes"),
        # A number without a unit; YAML reads 12:00:00 as 43200.
        *(
            (SEVEN_B, f"cluster.slurm.{part}.{key}", rf"cluster.slurm.{part}.{key[:3]}.*=.*{words}")
            for part in ("trainer", "rollout", "borrowed", "reward")
            for key, words in (
                *(("time=43200", "quotes"), ("mem=64", "64G"), ("mem='512'", "64G")),
                *((f"time={text}", "Slurm's forms") for text in ("2d", "1.5h", "'1:30:00:00'")),
                *((f"mem={text}", "64G") for text in ("all", "64.5G", "1M", "900KB", "64B")),
            )
        ),
        *(
            (
                SEVEN_B,
                f"cluster.slurm.trainer.sbatch=['{option}']",
                f"trainer.sbatch.0='{option}'.*{words}",
            )
            for option, words in (
                *(
                    (f"--{each}", "is set by ROSE")
                    for each in ("no-requeue", "nodes=3", "array=1-3")
                ),
                *((each, "must be an option") for each in ("--time 1", "--", "-N3", "--Nodes=3")),
            )
        ),
    ],
)
def test_what_cannot_be_a_job_is_refused_by_key(make_config, base, overrides, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        make_config(*base, overrides)


@pytest.mark.parametrize("mem", ["64G", "64GB", "64gb", "2048", "2T", "0"])
def test_memory_is_given_as_sbatch_reads_it(make_config, mem):
    c = make_config(*SEVEN_B, f"cluster.slurm.trainer.mem='{mem}'")
    assert f"--mem={mem}\n" in sbatch.script(c, layout(c), Path("/runs/x"))
