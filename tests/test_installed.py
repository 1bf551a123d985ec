"""ROSE from a wheel: the command `rose` in a folder that knows no checkout."""

import functools
import os
import sys
from pathlib import Path

import pytest

from rose.observe.metrics import read_metrics, rows_of
from tests.installed import REPOSITORY, SECONDS
from tests.processes import ran

pytestmark = pytest.mark.slow


@pytest.fixture
def rose(installed, tmp_path):
    """rose("train", "a=b", ...) -> the ended command, in an empty folder."""
    return functools.partial(installed.rose, cwd=tmp_path)


def test_the_wheel_has_all_of_conf_the_recipes_and_the_scripts_for_sbatch(installed, rose):
    site = installed.site

    def below(folder):
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.yaml"))

    assert below(site / "rose" / "conf") == below(REPOSITORY / "conf")
    assert (site / "rose" / "scripts" / "make_tiny_model.py").is_file()
    assert not (site / "rose" / "scripts" / "house.py").exists()
    assert (Path(rose("slurm").stdout.strip()) / "serving.sbatch").is_file()


def test_its_help_lists_the_commands_and_an_unknown_one_and_a_bad_key_are_refused(rose, tmp_path):
    done = rose("train", "trainer.stepz=3")
    assert done.returncode == 2 and "did you mean trainer.steps" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = rose("--help")
    assert done.returncode == 0 and "rose state RUN" in done.stdout
    done = rose("trian")
    assert done.returncode == 2 and "no command 'trian'; there are train, simulate" in done.stderr
    done = rose("train", "--help")
    assert done.returncode == 0 and "frozen_lake" in done.stdout


def test_without_a_checkout_the_job_finds_rose_as_any_package(rose, installed):
    done = rose(
        "train", "+experiment=qwen7b", "cluster=slurm", "cluster.dry_run=true", "serving=none"
    )
    assert done.returncode == 0, done.stderr
    script = done.stdout.partition("#!/bin/bash")[2]
    assert f"exec {installed.bin / 'python'} -u -m rose.launch.batch" in script
    assert "PYTHONPATH" not in script and str(REPOSITORY / "rose") not in script


def test_modules_are_commands(rose, tmp_path):
    for name, words in (("state", "the run's folder"), ("serve", "Lend this process's share")):
        done = rose(name, "--help")
        assert done.returncode == 0 and words in done.stdout, done.stderr
    done = rose("state", str(tmp_path))
    assert done.returncode == 2 and "no run there that has begun" in done.stderr


def test_rose_simulate_simulates_and_writes_below_the_current_folder(rose, tmp_path):
    done = rose(
        "simulate", "+experiment=rose_8b", "name=sim", "sim.steps=2", "sim.warmup=1",
        "sim.seeds=[1]", "sim.processes=1", "sim/systems=[roll_grpo]",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "outputs" / "sim" / "report.html").read_text()
    assert "rose train mode=simulate +experiment=rose_8b" in page
    assert rose("simulate", "mode=train").returncode == 2


def complete(lines, cwd, install, path):
    """What bash proposes for each line, by the function that `install` prints."""
    asks = "".join(
        f"COMP_LINE={line!r}; COMP_WORDS=($COMP_LINE); "
        f"COMP_CWORD={len(line.split()) - (not line.endswith(' '))}; "
        "COMP_POINT=${#COMP_LINE}; COMPREPLY=(); "
        'hydra_bash_completion; echo "${COMPREPLY[*]}"\n'
        for line in lines
    )
    done = ran(["bash", "-c", f'eval "$({install})"\n{asks}'], cwd=cwd, env=path, timeout=SECONDS)  # fmt: skip
    return [found.split() for found in done.stdout.splitlines()]


def test_bash_completes_options_of_both_front_doors(installed, tmp_path):
    lines = ("rose train env=", "rose pla", "rose train", "rose train env=frozen_lake ")
    of_env, commands, whole, keys = complete(
        lines, tmp_path, "rose -sc install=bash", installed.environ
    )
    assert {"env=frozen_lake", "env=games", "env=prompts"} <= set(of_env)
    assert commands == ["plan", "play"] and whole == ["train"]
    assert "trainer." in keys and "env=frozen_lake" not in keys
    here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    install = "python launch.py -sc install=bash"
    assert complete(["python launch.py env=fr"], REPOSITORY, install, here) == [["env=frozen_lake"]]


def test_rose_train_trains_below_the_current_folder(rose, tmp_path):
    done = rose(
        "train", "name=run", "trainer.steps=1", "trainer.batch_size=8", "rollout.group_size=4",
        "rollout.workers=1", "rollout.kv_cache_gib=0.05", "eval.episodes=4",
        "observe.terminal=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs" / "run"
    assert [row["version"] for row in rows_of(read_metrics(run), "step")] == [1]
    logs = "".join(path.read_text() for path in (run / "logs" / "latest").glob("*.log"))
    assert str(REPOSITORY) not in logs.replace(sys.prefix, "")
