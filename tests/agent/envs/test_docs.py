"""The worked example of docs/environments.md is what a reader types in: it must run as it
stands."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
import yaml

from rose import config
from rose.agent import envs
from rose.agent.envs.base import Action, ToolCall
from rose.config import ConfigError

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text()


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The example's files, added to rose.agent.envs; gives its configuration."""
    (tmp_path / "guess_number.py").write_text(re.search(r"```python\n(.*?)```", TEXT, re.S)[1])
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    yield config.Env(**yaml.safe_load(re.search(r"```yaml\n(.*?)```", TEXT, re.S)[1]))
    sys.modules.pop("rose.agent.envs.guess_number", None)


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
