"""README.md: every command that it prints runs as printed, its length, its links, and the lines
that it shows of commands' output.

Commands that start a run on GPUs or a job of Slurm run as dry runs. A command that is left out
stands in `NOT_HERE` with the place that runs it instead.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose import front
from rose.places import CONF
from tests.conftest import compose_tree
from tests.processes import ran

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
CONFIGURATION = REPOSITORY / "docs" / "configuration.md"
PROGRAMS = ("python", "rose", "sbatch", "make", ".")  # the first words of commands in the text

# A reader takes in so many words of prose within the first minutes.
MOST_WORDS = 900
SECONDS = 480
NOT_HERE = {
    "make train": "it installs: the check on a fresh clone runs it",
    "make test": "it runs these tests",
    "make gpu": "it installs 12 GB for GPUs: the check on a fresh clone runs it",
    ". .venv/bin/activate": "a shell's setting: commands here find the environment's programs",
    "python scripts/gpu_check.py": "needs a GPU: tests/scripts/test_gpu_check.py, on a CPU",
    "python scripts/lending/prove_promise.py --trace FILE": "takes two hours: tests/scripts/test_prove_promise.py",
}
SMALL = ("trainer.steps=1", "trainer.batch_size=8", "rollout.group_size=4", "rollout.workers=1")
SMALL += ("rollout.kv_cache_gib=0.05", "eval.episodes=4")


def commands(page: Path) -> list[str]:
    """The page's commands, without comments: lines of blocks of sh, and code within the text."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.M)
    lines += [code for code in re.findall(r"`([^`\n]+)`", rest) if " " in code]
    found = [re.sub(r"\s+#\s.*$", "", line).strip() for line in lines]
    placeholder = re.compile(r"KEY=VALUE|\bDIR\b|--help$")
    ours = [line for line in found if line.split()[:1] and line.split()[0] in PROGRAMS]
    return [*dict.fromkeys(line for line in ours if not placeholder.search(line))]


def launches(page: Path) -> list[str]:
    return [line for line in commands(page) if line.startswith("python launch.py")]


def programs(first: str) -> list[str]:
    return [line for line in commands(README) if line.startswith(first + " ")]


def prose(page: Path) -> list[str]:
    """Words of the page's text: no tables, blocks, comments or addresses of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.M)
    text = re.sub(r"^\|.*$|^\[[\w-]+\]: .*$", "", text, flags=re.M)
    return re.findall(r"\S*\w\S*", re.sub(r"\]\([^)]*\)", "] ", text))


def block_after(heading: str) -> list[str]:
    """Lines of the page's first block without a language that follows this text."""
    after = README.read_text().split(heading, 1)[1]
    return re.search(r"^```\n(.*?)^```$", after, re.DOTALL | re.M)[1].splitlines()


def test_it_is_short():
    assert 300 < len(prose(README)) <= MOST_WORDS


def test_every_command_is_run_by_a_test_or_has_a_reason_not_to_be():
    run = {*launches(README), *programs("rose"), *programs("sbatch")}
    left = set(commands(README)) - run
    assert left == NOT_HERE.keys()
    assert len(run) >= 12


@pytest.mark.parametrize("command", [*launches(README), *launches(CONFIGURATION)])
def test_a_launch_composes_and_plans_what_it_would_start(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)[2:]
    dry = "cluster.dry_run=true"
    assert front.main(CONF, [*arguments, *([] if dry in arguments else [dry])]) == 0
    said = capfd.readouterr().out
    assert "coordinator" in said and "trajectories" in said
    assert ("#SBATCH hetjob" in said) == ("cluster=slurm" in arguments)
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing"


def test_the_lines_of_the_dry_run_are_what_it_prints(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (command,) = [c for c in launches(README) if "cluster=slurm" in c and "dry_run" in c]
    assert front.main(CONF, shlex.split(command)[2:]) == 0
    said = [line.rstrip() for line in capfd.readouterr().out.splitlines()]
    shown = block_after("prints among others:")
    assert len(shown) == 8 and [line for line in shown if line not in said] == []


def test_the_lending_job_starts_a_rank_for_the_run_of_that_name(tmp_path):
    """sbatch and srun are stand-ins here. tests/slurm runs such jobs on a real Slurm."""
    lines = {"sbatch": 'SLURM_SUBMIT_DIR=$PWD exec bash "$@"', "srun": 'echo "$@"'}
    for name, line in lines.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert programs("sbatch")
    for command in programs("sbatch"):
        done = ran(["bash", "-c", command], cwd=REPOSITORY, env=environment, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        assert "-m rose serve name=qwen7b" in done.stdout


@pytest.mark.slow
def test_the_commands_on_a_run_do_what_they_say_on_one(tmp_path):
    """The run is the default one, shortened to a step. A game of a person is typed by nobody."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    place = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL, "timeout": SECONDS}

    def shell(command: str) -> subprocess.CompletedProcess:
        return ran(["bash", "-c", command], **place)

    done = shell(f"python {REPOSITORY}/launch.py {' '.join(SMALL)}")
    assert done.returncode == 0, done.stdout + done.stderr
    # The lines with a colon say where the report is, what to do next, and what the run cost.
    # The README shows `make train`, which activates no environment; here one is active.
    shown = "\n".join(block_after("The end of what it prints")).replace(".venv/bin/rose", "rose")
    for line in shown.splitlines():
        if ": " in line and "│" not in line:
            assert re.search(re.sub(r"\\?[\d.,]*\d", r"[\\d.,]+", re.escape(line)), done.stdout)
    assert sum(": " in line for line in shown.splitlines()) >= 3
    for command in programs("rose"):
        done = shell(command)
        # without Slurm the doctor says so, and exits with 1
        expected = 1 if "doctor" in command and "failed   Slurm" in done.stdout else 0
        assert done.returncode == expected, command + done.stdout + done.stderr
    assert (tmp_path / "my-model" / "config.json").is_file()


@pytest.mark.parametrize(
    "page", [README, CONFIGURATION, REPOSITORY / "SECURITY.md"], ids=lambda page: page.name
)
def test_links_by_a_name_have_an_address(page):
    """tests/test_docs.py checks where the links of every page lead."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.M)
    names = set(re.findall(r"^\[([\w-]+)\]: ", text, re.M))
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == names


def test_help_names_the_ten_keys_that_most_runs_set_before_all_others():
    done = ran([sys.executable, "-m", "rose", "train", "--help"], cwd=REPOSITORY, timeout=SECONDS)
    first = done.stdout.split("== Configuration groups ==")[0]
    keys = re.findall(r"^  (\+?[\w.]+=\S+)  ", first, re.M)
    assert done.returncode == 0 and len(keys) == 10
    tree = compose_tree(*keys)
    assert tree["trainer"]["ranks"] == 4, "the experiment's own keys stay"
    assert tree["trainer"]["steps"] == 200 and tree["name"] == "frozenlake"


def paths(tree: dict, above: str = "") -> Iterator[str]:
    """Every key of a tree, as a.b.c."""
    for key, value in tree.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from paths(value, f"{above}{key}.")


def test_the_keys_that_the_translation_names_are_keys_here():
    rows = [
        line.split(" | ")[-1]
        for line in CONFIGURATION.read_text().split("## Coming from TRL or verl")[1].splitlines()
        if line.startswith("| ") and not line.startswith("| what")
    ]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    known = {
        *paths(compose_tree("env=prompts", "+trainer/lora=linear")),
        *paths(compose_tree("reward=function", "algorithm=dapo")),
    }
    groups = [name for name in names if "=" in name]
    assert len(names) > 50
    for group, _, option in (g.lstrip("+").partition("=") for g in groups):
        assert (CONF / group / f"{option}.yaml").is_file() if option else (CONF / group).is_dir()
    assert [name for name in names if "=" not in name and name not in known] == []


def test_messages_name_the_distribution_that_pip_knows():
    """Another project owns the name `rose` on PyPI."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["license"]) == ("rose-rl", "Apache-2.0")
    for folder in ("rose", "scripts", "docs"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh"):
                text = path.read_text()
                assert not re.search(r"pip install\W+rose\b(?!-rl)", text), path
                named = set(re.findall(r"rose-rl\[(\w+)\]", text))
                assert named <= project["optional-dependencies"].keys(), path
