"""Check what the docs say of environments, and that the package of docs/environments.md is what
tests/outside installs."""

import asyncio
import re
from pathlib import Path

import printed
import pytest

from rose import config
from rose.agent import envs
from rose.agent.envs.base import Action, ToolCall
from rose.config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = REPOSITORY / "tests" / "outside" / "rose_dark"


def dark(size: int = 4, holes: int = 3) -> config.Env:
    return config.Env("rose_dark.lake:DarkLake", {"size": size, "holes": holes}, 10, 16, 10.0, 1)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGE))


def test_the_example_is_the_package_that_the_tests_install():
    """Whose pyproject.toml has an algorithm and a policy besides."""
    shown = {
        k: v for k, v in printed.files("environments.md").items() if k.startswith("rose_dark/")
    }
    assert len(shown) == 3
    for path, content in shown.items():
        assert (PACKAGE.parent / path).read_text().startswith(content)


def test_the_example_is_found_checked_and_played():
    """Whoever turns to the goal when it is beside, and else walks over ice, finds it."""
    envs.check(dark(holes=0))
    env = envs.build(dark(size=2, holes=0))

    async def play(seed):
        seen = (await env.reset(seed)).messages[-1]["content"]
        for _ in range(3):
            moves = {kind: move for move, kind in re.findall(r"(\w+) (\w+)", seen)}
            call = ToolCall("move", {"direction": moves.get("G", moves.get("F"))})
            step = await env.step(Action("", call))
            if step.done:
                return step
            seen = step.observation

    for seed in range(8):
        step = asyncio.run(play(seed))
        assert (step.reward, step.success) == (1.0, True)


def test_the_example_says_what_is_wrong_with_a_call_or_an_argument():
    env = envs.build(dark())
    asyncio.run(env.reset(1))
    for call in (None, ToolCall("fly", {}), ToolCall("move", {"direction": ["up"]})):
        assert asyncio.run(env.step(Action("", call))).invalid
    with pytest.raises(ConfigError, match=r"env\.args\.size=1, holes=3: "):
        envs.check(dark(size=1))


def test_the_table_lists_every_environment():
    text = (REPOSITORY / "docs" / "environments.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == set(envs.names())
