"""ROSE from a wheel: the command `rose` in a folder that knows no checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rose.observe.metrics import read_metrics, rows_of

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 600
PARTS = ("rose", "conf", "scripts", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which pip has installed a wheel, made of an sdist of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        if (REPOSITORY / part).is_dir():
            junk = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / part, source / part, ignore=junk)
        else:
            shutil.copy(REPOSITORY / part, source)
    sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run(
        [sys.executable, "-c", sdist], cwd=source, check=True, timeout=SECONDS, capture_output=True
    )
    (made,) = folder.glob("*.tar.gz")
    shutil.rmtree(source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    subprocess.run([*pip, *built, str(made)], check=True, timeout=SECONDS)
    (wheel,) = folder.glob("*.whl")
    target = ["install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run([*pip, *target], check=True, timeout=SECONDS)
    return folder / "site"


@pytest.fixture
def rose(site, tmp_path):
    """rose("train", "a=b", ...) -> the ended command, in an empty folder."""

    def run(*arguments, **variables):
        return subprocess.run(
            [str(site / "bin" / "rose"), *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(site), "COLUMNS": "200"} | variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    return run


def test_the_wheel_has_all_of_conf_and_the_recipes(site):
    def below(folder):
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.yaml"))

    assert below(site / "rose" / "conf") == below(REPOSITORY / "conf")
    assert (site / "rose" / "scripts" / "make_tiny_model.py").is_file()
    assert not (site / "rose" / "scripts" / "house.py").exists()


def test_its_help_lists_the_commands_and_an_unknown_one_is_refused(rose):
    done = rose("--help")
    assert done.returncode == 0 and "rose state RUN" in done.stdout
    done = rose("trian")
    assert done.returncode == 2 and "no command 'trian'; there are train, simulate" in done.stderr
    done = rose("train", "--help")
    assert done.returncode == 0 and "frozen_lake" in done.stdout


def test_a_bad_key_is_refused_as_by_launch(rose, tmp_path):
    done = rose("train", "trainer.stepz=3")
    assert done.returncode == 2 and "did you mean trainer.steps" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_a_checkout_the_job_finds_rose_as_any_package(rose, site):
    done = rose(
        "train", "+experiment=qwen7b", "cluster=slurm", "cluster.dry_run=true", "serving=none"
    )
    assert done.returncode == 0, done.stderr
    script = done.stdout.partition("#!/bin/bash")[2]
    assert f"exec {sys.executable} -u -m submitit.core._submit" in script
    assert "PYTHONPATH" not in script and str(REPOSITORY / "rose") not in script


def test_modules_are_commands(rose, tmp_path):
    for name, words in (("state", "the run's folder"), ("serve", "Lend this process's share")):
        done = rose(name, "--help")
        assert done.returncode == 0 and words in done.stdout, done.stderr
    done = rose("state", str(tmp_path))
    assert done.returncode == 2 and "no run that was submitted to Slurm" in done.stderr


def test_rose_simulate_simulates_and_writes_below_the_current_folder(rose, tmp_path):
    done = rose(
        "simulate", "+experiment=rose_8b", "name=sim", "sim.steps=2", "sim.warmup=1",
        "sim.seeds=[1]", "sim.processes=1", "sim/systems=[roll_grpo]",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "outputs" / "sim" / "report.html").read_text()
    assert "rose train mode=simulate +experiment=rose_8b" in page
    assert rose("simulate", "mode=train").returncode == 2


def complete(line, cwd, install, path):
    """What bash proposes for `line`, by the function that `install` prints."""
    script = (
        f'eval "$({install})"; COMP_LINE={line!r}; COMP_WORDS=($COMP_LINE); '
        f"COMP_CWORD={len(line.split()) - (not line.endswith(' '))}; "
        "COMP_POINT=${#COMP_LINE}; "
        'hydra_bash_completion; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=path, capture_output=True, text=True, timeout=SECONDS
    )
    return done.stdout.split()


def test_bash_completes_options_of_both_front_doors(site, tmp_path):
    installed = os.environ | {
        "PYTHONPATH": str(site),
        "PATH": f"{site / 'bin'}:{os.environ['PATH']}",
    }
    found = complete("rose train env=", tmp_path, "rose -sc install=bash", installed)
    assert {"env=frozen_lake", "env=games", "env=prompts"} <= set(found)
    assert complete("rose pl", tmp_path, "rose -sc install=bash", installed) == ["plan"]
    found = complete("rose train", tmp_path, "rose -sc install=bash", installed)
    assert found == ["train"]
    found = complete("rose train env=frozen_lake ", tmp_path, "rose -sc install=bash", installed)
    assert "trainer." in found and "env=frozen_lake" not in found
    here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = complete(
        "python launch.py env=fr", REPOSITORY, "python launch.py -sc install=bash", here
    )
    assert found == ["env=frozen_lake"]


@pytest.mark.slow
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
