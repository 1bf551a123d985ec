"""An environment, an algorithm and a policy of a package that ROSE knows nothing of."""

import os
import shutil
import sys
from pathlib import Path

import printed
import pytest

from rose import config, front
from rose.config import ConfigError, outside
from rose.coordinator import replay
from rose.observe.metrics import read_metrics, rows_of
from tests.processes import ran
from tests.refusals import table

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).parent / "rose_dark"
OPTIONS = ("hydra.searchpath=[pkg://rose_dark.conf]", "algorithm=plain", "scheduler/routing=first")
SMALL = ("trainer.steps=1", "trainer.batch_size=8", "rollout.group_size=4", "rollout.workers=1")
SMALL += ("rollout.kv_cache_gib=0.1", "eval.episodes=4", "env.members.lake.max_turns=3")
SMALL += ("env.members.dark.max_turns=3", "observe.terminal=false")
MIXED = ("env=mixture", "+env@env.members.dark=dark_lake", "+env.members.dark.weight=1")
MIXED += ("+env@env.members.lake=frozen_lake", "+env.members.lake.weight=1")
SECONDS = 600


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which pip has installed the package, as a user does it."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(SOURCE, folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    own = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    ran([*pip, *own, str(folder / "source")], check=True, timeout=SECONDS)
    return folder / "site"


@pytest.fixture
def launch(installed, tmp_path, monkeypatch, capsys):
    """launch("a=b", ...) -> (exit code, what it said on stderr), in a folder that is neither ROSE's
    nor the package's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        code = front.main(REPOSITORY / "conf", list(arguments))
        return code, " ".join(capsys.readouterr().err.split())

    return run


@pytest.mark.slow
def test_all_ranks_of_a_run_find_what_the_package_has(installed, tmp_path):
    env = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{installed}"}
    command = [sys.executable, str(REPOSITORY / "launch.py"), *OPTIONS, *MIXED, *SMALL, "name=run"]
    done = ran(command, cwd=tmp_path, env=env, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs" / "run"
    (step,) = rows_of(read_metrics(run), "step")
    assert step["version"] == 1 and step["invalid_calls"] >= 0
    assert {t.domain for group in replay.load(run, 1) for t in group} == {"dark", "lake"}
    again = config.load(run / "config.json")
    assert (again.algorithm.name, again.scheduler.routing.name) == ("plain", "first")


@pytest.mark.slow
@pytest.mark.parametrize("as_flag", [True, False])
def test_the_conf_file_may_lie_in_a_folder_of_the_users(launch, tmp_path, as_flag):
    mine = tmp_path / "mine" / "env"
    mine.mkdir(parents=True)
    text = (SOURCE / "rose_dark" / "conf" / "env" / "dark_lake.yaml").read_text()
    text = text.replace("dark_lake", "rose_dark.lake:DarkLake").replace("size: 3", "size: 5")
    (mine / "harder.yaml").write_text(text)
    folder = str(mine.parent)
    where = ["--config-dir", folder] if as_flag else [f"hydra.searchpath=[file://{folder}]"]
    assert launch(*where, "env=harder", "cluster.dry_run=true")[0] == 0
    code, said = launch(*where, "env=harder", "env.max_turn=3", "cluster.dry_run=true")
    assert code == 2 and "env.max_turn=3: no such key; did you mean env.max_turns" in said
    code, said = launch(*where, "env=hardr", "cluster.dry_run=true")
    assert code == 2 and "env=hardr: no such option; did you mean harder" in said


def test_the_printed_command_is_accepted(launch):
    command = printed.overrides("environments.md", "dark_lake")
    assert launch(*command, "cluster.dry_run=true")[0] == 0


NOT_THERE = """
env.name=dark_lak -> no such environment | frozen_lake | dark_lake of rose-dark (rose_dark.lake:
env.name=sys:Foo -> env.name='sys:Foo': sys has no class Foo
env.name=rose_dark.lake:Dark -> lake.py has no class Dark | DarkLake
env.name=rose_dark.lke:DarkLake -> importing rose_dark.lke failed: ModuleNotFoundError | looked in
env.name=rose_dark.plain:Plain -> size=3: rose_dark.plain:Plain takes no
env.name=rose_dark.plain:Plain ~env.args.size ~env.args.holes
    -> is no environment, it lacks requires_tool, reset, step, close
env.args.size=1 -> env.args.size=1, holes=4: too few cells
algorithm.name=plane -> no such algorithm | plain of rose-dark
algorithm.name=rose_dark.first:First -> must be a dataclass
+algorithm.args.scal=2 -> plain has no such argument; it has scale
algorithm.args.scale=x -> algorithm.args.scale='x': expected `float`
scheduler.routing.name=last -> no such routing policy | first of rose-dark
scheduler.order.name=rose_dark.first:First -> is no order policy, it lacks key
"""


@pytest.mark.parametrize("overrides, words", table(NOT_THERE))
def test_what_is_not_there_is_refused_with_what_was_looked_for_and_where(launch, overrides, words):
    code, said = launch(*OPTIONS, "env=dark_lake", *overrides.split())
    assert code == 2 and all(word in said for word in words), said


EXITS = "import sys\nclass Order:\n    def __init__(self): sys.exit(0)\n"
# The last two are classes in C, of which Python shows no parameters.
EXITING = """
hydra.searchpath=[file:///no/such/folder] -> /no/such/folder is no folder
env.name=broken_game:Game -> No module named 'a_library_that_is_not_there'
env.name=exits:Game -> importing exits ended the process (SystemExit 0); put what runs
algorithm.name=exits:Game -> algorithm.name='exits:Game': importing exits ended
hydra.searchpath=[pkg://exits] -> searchpath=[pkg://exits]: importing exits ended
reward=function reward.args.path=exits:f -> reward.args.path='exits:f': importing exits ended
scheduler.order.name=made:Order -> made:Order raised SystemExit(0)
env.name=builtins:bytes -> builtins:bytes raised TypeError(
scheduler.order.name=builtins:int -> int is no order policy, it lacks key
"""


@pytest.mark.parametrize("overrides, words", table(EXITING))
def test_code_that_exits_or_lacks_something_is_named(
    launch, tmp_path, monkeypatch, overrides, words
):
    (tmp_path / "broken_game.py").write_text("import a_library_that_is_not_there\n")
    (tmp_path / "exits.py").write_text("class Game: pass\nraise SystemExit(0)\n")
    (tmp_path / "made.py").write_text(EXITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, said = launch(*overrides.split(), "cluster.dry_run=true")
    assert code == 2 and words[0] in said, said
    assert "a_library" not in said or "looked in" not in said


def test_two_packages_with_one_name_are_refused(tmp_path, monkeypatch):
    for package in ("one", "other"):
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[rose.environments]\nsame = {package}:Game\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"two packages .* one \(one:Game\), other \(other:Game"):
        outside.find("env.name", "same", "environment", (), "rose.environments")
