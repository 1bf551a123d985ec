"""The pages of docs/ say what is there: their links, their keys, and their commands as dry runs."""

import asyncio
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import printed
import pytest
import yaml

from rose import config, front
from rose.agent import envs
from rose.agent.envs.base import Action, ToolCall
from rose.parts.rewards import scorers
from rose.reward.episode import Said
from tests.conftest import compose_tree
from tests.made import episode, model_folder

REPOSITORY = Path(__file__).resolve().parents[1]
CONF = REPOSITORY / "conf"
PAGES = sorted(REPOSITORY.glob("*.md")) + sorted(printed.DOCS.glob("*.md"))
# Pages whose keys, files and commands are tried.
PLAIN = "agents.md algorithms.md environments.md export.md frozenlake.md install.md play.md "
PLAIN = (PLAIN + "rewards.md slurm.md").split()
SECTIONS = "algorithm|cluster|env|eval|model|observe|reward|rollout|sandbox|scheduler|serving|trainer|transfer"
# Keys under names that users give, and names of files.
OF_USERS = r".*\.(md|py|log)$|env\.members\.|eval\.sets\.|reward\.args\.parts\."


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def text(page: str) -> str:
    return (printed.DOCS / page).read_text()


def prose(path: Path) -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.M)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def known_keys() -> set[str]:
    """Return each key of conf/, whichever options set it."""
    found: set[str] = set()

    def add(tree, prefix: str) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                found.add(f"{prefix}{key}")
                add(value, f"{prefix}{key}.")

    for path in CONF.rglob("*.yaml"):
        folder = path.parent.relative_to(CONF)
        add(yaml.safe_load(path.read_text()), ".".join([*folder.parts, ""]))
    return found


def test_keys_that_pages_name_are_in_conf():
    # The type of `cluster` has this one, and no file of conf/ sets it.
    known = {*known_keys(), "cluster.slurm.container.mounts"}
    for page in PLAIN:
        for key in re.findall(rf"(?<![\w/.])((?:{SECTIONS})(?:\.\w+)+)(?![\w/(*])", text(page)):
            assert key in known or re.match(OF_USERS, key), f"{page}: {key}"


def test_programs_and_files_that_pages_name_are_there():
    for page in PLAIN:
        for module in re.findall(r"python -m (rose\.[\w.]*\w)", text(page)):
            assert find_spec(module), f"{page}: {module}"
        for path in re.findall(r"(?<![\w/.])(?:rose|conf|scripts|slurm)/[\w/]+\.\w+", text(page)):
            assert (REPOSITORY / path).is_file() or "NAME" in path, f"{page}: {path}"


def dry_runs() -> list[tuple[str, list[str]]]:
    """Return (page, arguments) of each command, but that of the package, which must be installed
    (tests/outside)."""
    runs = [(page, run) for page in PLAIN for run in printed.commands(page)]
    return [(page, run) for page, run in runs if "name=dark_lake" not in run]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """reader(page): the current folder is that of a reader of the page, who has written its
    files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def sit_down(page: str) -> Path:
        printed.write(page, tmp_path)
        for path, row in re.findall(r"`(\w+\.jsonl)` with rows like `(\{.*?\})`[:\s]", text(page)):
            row = json.loads(row)
            rows = [row | {"prompt": f"{row['prompt']} ({n})"} for n in range(40)]
            (tmp_path / path).write_text("\n".join(map(json.dumps, rows)))
        return tmp_path

    return sit_down


@pytest.mark.parametrize("page, run", dry_runs())
def test_commands_are_accepted(page, run, reader, monkeypatch):
    folder = reader(page)
    (folder / "agent.py").touch()  # a program of the reader's own
    # Earlier commands of the pages make these files.
    for path in ("beside.jsonl", "my-model"):
        if f"={path}" in " ".join(run):
            make(folder, path)
    # Neither OpenEnv's server nor the library of verifiers is here.
    adapters = "rose.parts.adapters.envs"
    monkeypatch.setattr(f"{adapters}.openenv._schema", lambda *_: {})
    monkeypatch.setattr(f"{adapters}.verifiers._load", lambda *_: {"tasks": ""})
    # As in an activated environment; Debian has no `python` elsewhere.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    replaced = {"env.args.python=$VENV_PYTHON": "env.args.python=/bin/sh", "seed=1,2,3": "seed=1"}
    # A sweep is tried at one of its points.
    run = [replaced.get(each, each) for each in run]
    assert front.main(CONF, [*run, "cluster.dry_run=true"]) == 0


def make(folder: Path, path: str) -> None:
    if path == "beside.jsonl":
        exec((folder / "beside.py").read_text(), {"__name__": "__main__"})
        return
    model_folder(folder / path, model_type="llama")


async def test_the_printed_server_has_a_tool(reader, monkeypatch):
    """The policy calls the tool once and answers; math-verify judges the answer right."""
    # The page's reader has activated the environment, so `python` is the one that runs this test.
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    reader("environments.md")
    (run,) = [r for r in printed.commands("environments.md") if "env=mcp" in r]
    tree = compose_tree(*run)["env"]
    env = envs.build(config.Env(**tree))
    start = await env.reset(0)
    assert [tool["function"]["name"] for tool in start.tools] == ["multiply"]
    step = await env.step(Action("", ToolCall("multiply", {"a": 17, "b": 23})))
    last = await env.step(Action(f"It is {step.observation}."))
    await env.close()
    assert (step.observation, step.invalid) == ("391", False)
    assert (last.reward, last.done, last.success) == (1.0, True, True)


def test_the_printed_tests_tell_right_answers_from_wrong_ones(reader):
    folder = reader("rewards.md")
    row = json.loads((folder / "tasks.jsonl").read_text().splitlines()[0])
    (run,) = [r for r in printed.commands("rewards.md") if "reward=command" in r]
    reward = compose_tree(*run)["reward"]
    scorer = scorers.build(reward["name"], reward["args"])

    def scored(code: str) -> float:
        said = Said(policy=True, text=f"So:\n```python\n{code}\n```")
        ended = episode(task=row, transcript=[said])
        return asyncio.run(scorer.score(ended, 60.0)).reward

    assert scored("def f(x): return 2 * x") == 1.0
    assert scored("def f(x): return x") == 0.0
