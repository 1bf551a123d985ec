"""The worked example of docs/environments.md is what a reader types in: it must run as it
stands."""

import asyncio
import re
from pathlib import Path

import pytest
import yaml

from rose import config
from rose.agent import envs
from rose.agent.envs.base import Action, ToolCall
from rose.config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
TEXT = (REPOSITORY / "docs" / "environments.md").read_text()
PACKAGE = REPOSITORY / "tests" / "outside" / "rose_guess"


@pytest.fixture
def example(monkeypatch):
    """The example's configuration; its package is on the path."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    raw = yaml.safe_load(block("yaml"))
    yield config.Env(**(raw | {"name": "rose_guess.game:GuessNumber"}))


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", TEXT, re.S)[1]


def test_the_example_is_the_package_that_the_tests_install():
    assert block("toml") == (PACKAGE / "pyproject.toml").read_text()
    assert block("python") == (PACKAGE / "rose_guess" / "game.py").read_text()
    conf = PACKAGE / "rose_guess" / "conf"
    assert block("yaml") == (conf / "env" / "guess_number.yaml").read_text()


def test_the_example_is_found_checked_and_played(example):
    envs.check(example)
    env = envs.build(example)

    async def bisect():
        await env.reset(4)
        low, high = 1, 100
        for _ in range(example.max_turns):
            step = await env.step(Action("", ToolCall("guess", {"number": (low + high) // 2})))
            if step.done:
                return step
            low, high = (
                ((low + high) // 2 + 1, high)
                if step.observation == "higher"
                else (low, (low + high) // 2 - 1)
            )

    step = asyncio.run(bisect())
    assert (step.reward, step.success) == (1.0, True)


def test_the_example_says_what_is_wrong_with_a_call_or_an_argument(example):
    env = envs.build(example)
    asyncio.run(env.reset(1))
    for call in (None, ToolCall("fly", {}), ToolCall("guess", {"number": "5"})):
        assert asyncio.run(env.step(Action("", call))).invalid
    with pytest.raises(ConfigError, match=r"env\.args\.largest=1: "):
        envs.check(
            config.Env(
                **(
                    {key: getattr(example, key) for key in example.__struct_fields__}
                    | {"args": {"largest": 1}}
                )
            )
        )


def test_the_table_lists_every_environment():
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.M)) == set(envs.names())
