"""Files that a run reads have fingerprints: what is recorded, what counts as changed, and who refuses."""

import json
import os
import sys
from importlib.metadata import EntryPoint

import pytest

from rose import config as configuration
from rose import inputs
from rose.agent import envs
from rose.config import ConfigError
from rose.launch import local, resume
from rose.parts.adapters.envs.agent import Agent, _lines
from rose.parts.rewards import scorers
from rose.parts.sandbox.envs import _tasks
from rose.reward import function
from tests.refusals import table


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files that keys may name."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "mine.py").write_text("def score(text):\n    return 1.0\n")
    (tmp_path / "judge.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "key").write_text("secret")
    task = tmp_path / "tasks" / "one"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("Do it.")
    (task / "tests" / "test.sh").write_text("exit 0\n")
    (tmp_path / "tasks" / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(inputs.VARIABLE, raising=False)
    return tmp_path


PROMPTS = ["env=prompts", "env.args.held_out=0.5", "env.max_new_tokens=4"]


def names(config):
    return {os.path.basename(path): key for path, key in inputs.named(config).items()}


# What a shell reads or a command writes, keywords and secrets are none of these files.
NAMED = """
env=prompts env.max_new_tokens=4 env.args.data=rows.jsonl env.args.reward=mine.py:score
    reward=command reward.args.argv=[python,judge.py]
    -> rows.jsonl env.args.data | mine.py env.args.reward | judge.py reward.args.argv
env=prompts env.max_new_tokens=4 env.args.data=rows.jsonl env.args.held_out=0.5
    -> rows.jsonl env.args.data
reward=sum reward.args.parts={one: {name: function, args: {path: 'mine.py:score'}}, two: {name:
    judge, args: {api_key_file: key}}} -> mine.py reward.args.parts.one.args.path
env=agent env.args.command='python judge.py --fast' -> judge.py env.args.command
env=agent env.args.command=[bash,-c,"python judge.py; echo it's"] -> nothing
env=agent env.args.function=mine:score -> mine.py env.args.function
env=agent env.args.command='python -m own --rows=rows.jsonl' -> __init__.py env.args.command
    | __main__.py env.args.command | rows.jsonl env.args.command
env=agent env.args.command=[python,-m,own,--rows=rows.jsonl] -> __init__.py env.args.command
    | __main__.py env.args.command | rows.jsonl env.args.command
env=agent env.args.command='python judge.py --log=rows.jsonl --output rows.jsonl --save-to
    rows.jsonl' -> judge.py env.args.command
env=agent env.args.command='python -m pytest' -> nothing
env.name=mine:Env env.args.log_path=./tasks env.args.train_data=./tasks
    -> mine.py env.name | tasks env.args.train_data
env=terminal env.max_new_tokens=4 env.args.tasks=./tasks -> tasks env.args.tasks
"""


@pytest.mark.parametrize("overrides, named", table(NAMED))
def test_every_file_that_a_key_names_is_found(folder, make_config, overrides, named):
    (folder / "math").write_text("a file that is called as the keyword is")
    (folder / "own").mkdir()
    for name in ("__init__.py", "__main__.py"):
        (folder / "own" / name).write_text("")
    expected = dict(each.split() for each in named if each != "nothing")
    assert names(make_config(overrides)) == expected


def test_a_digest_is_of_contents_and_names(folder, monkeypatch):
    before = inputs.digest(folder / "tasks")
    os.utime(folder / "tasks/one/instruction.md")
    assert inputs.digest(folder / "tasks") == before
    (folder / "tasks/one/tests/__pycache__").mkdir()
    (folder / "tasks/one/tests/__pycache__/a.pyc").write_text("x")
    for beside in ".instruction.md.swp 4913 test.sh~ .#a.md .DS_Store ../../.git/index".split():
        (folder / "tasks/one/tests" / beside).write_text("an editor's or git's")
    assert inputs.digest(folder / "tasks") == before
    (folder / "tasks/one/instruction.md").rename(folder / "tasks/one/other.md")
    assert inputs.digest(folder / "tasks") != before
    assert inputs.digest(folder / "nowhere") == ""
    monkeypatch.setattr(inputs, "WHOLE", 100)
    monkeypatch.setattr(inputs, "STRETCH", 10)
    large = folder / "large"
    for content in (b"a" * 1000, b"a" * 999, b"a" * 999 + b"b"):
        large.write_bytes(content)
        assert inputs.digest(large) not in (before, "")
        before = inputs.digest(large)


def test_a_run_with_a_saved_step_refuses_other_files(folder, make_config, monkeypatch):
    data = f"env.args.data={folder}/rows.jsonl"
    config = make_config(*PROMPTS, data, "env.args.reward=mine.py:score")
    run = folder / "run"
    run.mkdir()
    assert resume.check_inputs(run, "run") == ""
    local.write_config(config, run)
    assert resume.check_inputs(run, "run") == ""
    (folder / "rows.jsonl").write_text('{"prompt": "b", "answer": "2"}\n')
    (folder / "mine.py").unlink()
    words = resume.check_inputs(run, "run")
    assert "env.args.data" in words and "rows.jsonl has changed" in words
    assert "mine.py is gone" in words
    monkeypatch.setattr(resume.checkpoint, "latest", lambda folder: folder / "step-000001")
    with pytest.raises(ConfigError, match=r"(?s)rows.jsonl has changed.*mine.py is"):
        resume.check_inputs(run, "run")
    (run / inputs.NAME).unlink()
    assert resume.check_inputs(run, "run") == ""


def test_what_may_change_as_a_key_may_as_a_file(folder, make_config, monkeypatch):
    config = make_config(
        "+env@eval.sets.more=prompts", f"eval.sets.more.args.data={folder}/rows.jsonl",
        "+eval.sets.more.episodes=1", "eval.sets.more.max_new_tokens=4",
    )  # fmt: skip
    local.write_config(config, folder)
    monkeypatch.setattr(resume.checkpoint, "latest", lambda folder: folder / "step-000001")
    (folder / "rows.jsonl").write_text('{"prompt": "b", "answer": "2"}\n')
    assert "eval.sets.more.args.data" in resume.check_inputs(folder, "run")


def test_other_versions_of_packages_are_told(folder, make_config):
    local.write_config(make_config(), folder)
    found = json.loads((folder / inputs.NAME).read_text())
    assert found["packages"]["torch"] and found["packages"]["python"]
    found["packages"] |= {"torch": "1.0", "gone": "2.0"}
    (folder / inputs.NAME).write_text(json.dumps(found))
    words = resume.check_inputs(folder, "run")
    assert "torch 1.0 -> " in words and "gone 2.0 -> absent" in words and "numpy" not in words


def test_a_checkouts_package_is_the_file_of_its_class(folder, make_config, monkeypatch):
    point = EntryPoint("lake", "mine:Lake", "rose.environments")
    monkeypatch.setattr(inputs, "entry_points", lambda group: [point] * (group == point.group))
    assert names(make_config("env.name=lake")) == {"mine.py": "env.name"}


def test_packages_of_the_python_that_runs_an_agent_are_told_too(folder, make_config):
    for name in ("bin", "lib/python3.11/site-packages/verifiers-0.4.0.dist-info"):
        (folder / "venv" / name).mkdir(parents=True)
    (folder / "venv/pyvenv.cfg").write_text("")
    (folder / "venv/bin/python").symlink_to(sys.executable)
    config = make_config("env=agent", f"env.args.command='{folder}/venv/bin/python -m own'")
    local.write_config(config, folder)
    assert resume.check_inputs(folder, "run") == ""
    packages = folder / "venv/lib/python3.11/site-packages"
    (packages / "verifiers-0.4.0.dist-info").rename(packages / "verifiers-0.4.1.dist-info")
    words = resume.check_inputs(folder, "run")
    assert f"{packages}/verifiers 0.4.0 -> 0.4.1" in words


def test_data_that_no_file_holds_is_compared_by_what_was_noted(folder, make_config, monkeypatch):
    """A library's environment may load its tasks from a hub."""
    monkeypatch.setattr(inputs, "_noted", {})
    inputs.note("env.args.id", "the tasks of x", "one")
    local.write_config(make_config(), folder)
    assert resume.check_inputs(folder, "run") == ""
    monkeypatch.setattr(inputs, "_noted", {})
    assert resume.check_inputs(folder, "run") == ""
    # The attempt after a requeue loads no environments.
    local.write_config(make_config(), folder)
    inputs.note("env.args.id", "the tasks of x", "two")
    assert "env.args.id: the tasks of x have changed" in resume.check_inputs(folder, "run")
    monkeypatch.setenv(inputs.VARIABLE, str(folder / inputs.NAME))
    inputs._expected.cache_clear()
    inputs.note("env.args.id", "the tasks of x", "one")
    inputs.note("env.args.id", "the tasks of y", "any")
    with pytest.raises(ConfigError, match="the tasks of x have changed since this attempt"):
        inputs.note("env.args.id", "the tasks of x", "two")
    inputs._expected.cache_clear()


@pytest.fixture
def begun(folder, make_config, monkeypatch):
    """An attempt of this configuration has begun, and this process belongs to it."""

    def begin(*overrides):
        local.write_config(make_config(*overrides), folder)
        inputs._expected.cache_clear()
        monkeypatch.setenv(inputs.VARIABLE, str(folder / inputs.NAME))

    yield begin
    inputs._expected.cache_clear()


def test_whoever_reads_a_file_that_was_edited_refuses_it(folder, begun):
    begun(
        "env=agent", f"env.args.function={folder}/mine.py:score", f"env.args.tasks={folder}/rows.jsonl",
        "reward=command", f"reward.args.argv=[{sys.executable},{folder}/judge.py]",
    )  # fmt: skip
    agent = Agent(function=f"{folder}/mine.py:score")
    agent.verify()
    function.load("mine.py:score", "key")
    for name in ("mine.py", "judge.py", "rows.jsonl"):
        with open(folder / name, "a") as file:
            file.write("\n")
    program = Agent(command=[sys.executable, f"{folder}/judge.py"])
    for read in (
        agent.verify,
        program.verify,
        lambda: function.load("mine.py:score", "key"),
        lambda: _lines(f"{folder}/rows.jsonl"),
    ):
        with pytest.raises(ConfigError, match="has changed since this attempt of the run began"):
            read()


def test_a_module_that_was_edited_is_refused_by_whoever_imports_it(folder, begun, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    begun("env.name=mine:score", "reward=function", "reward.args.path=mine:score")
    function.load("mine:score", "key")
    (folder / "mine.py").write_text("class Env: pass")
    made = type("Env", (), {"__module__": "mine"})
    for read in (
        lambda: function.load("mine:score", "key"),
        lambda: envs._verify(made),
        lambda: Agent(function="mine:score"),
        Agent(command=[sys.executable, "-m", "mine"]).verify,
    ):
        with pytest.raises(ConfigError, match="mine.py has changed since this attempt"):
            read()


def test_a_tasks_files_are_those_that_its_process_first_read(folder, begun):
    begun("env=terminal", "env.max_new_tokens=4", f"env.args.tasks={folder}/tasks")
    (task, *_), _ = _tasks.load(f"{folder}/tasks")
    task.files()
    (folder / "tasks/one/tests/test.sh").write_text("exit 1\n")
    with pytest.raises(ConfigError, match="tasks/one has changed"):
        task.files()
    _tasks.load.cache_clear()
    with pytest.raises(ConfigError, match="env.args.tasks: .*tasks has changed"):
        _tasks.load(f"{folder}/tasks")
    (folder / "tasks/one/tests/test.sh").write_text("exit 0\n")
    task.files()


def test_a_changed_file_is_refused_as_a_changed_key(folder, make_config, monkeypatch):
    config = make_config(*PROMPTS, f"env.args.data={folder}/rows.jsonl")
    local.write_config(config, folder)
    (folder / "rows.jsonl").write_text("{}\n")
    resume.check(folder / "config.json", config)  # nothing is trained yet
    monkeypatch.setattr(resume, "other_shape", lambda *_: "")
    monkeypatch.setattr(resume.checkpoint, "latest", lambda folder: folder / "step-000001")
    with pytest.raises(ConfigError, match="trained with other files"):
        resume.check(folder / "config.json", config)
    assert configuration.load(folder / "config.json").env.args["data"] == f"{folder}/rows.jsonl"


def test_a_part_of_a_sum_is_refused_too(folder, begun):
    parts = {"one": {"name": "function", "args": {"path": f"{folder}/mine.py:score"}}}
    given = f"{{one: {{name: function, args: {{path: '{folder}/mine.py:score'}}}}}}"
    begun("reward=sum", f"reward.args.parts={given}")
    scorers.build("sum", {"parts": parts})
    (folder / "mine.py").write_text("def score(text):\n    return 70.0\n")
    with pytest.raises(ConfigError, match="mine.py has changed"):
        scorers.build("sum", {"parts": parts})
