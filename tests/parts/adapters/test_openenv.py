"""env=openenv against a server of openenv-core, in a virtual environment of its own."""

import asyncio
import os
from pathlib import Path

import pytest

from rose.agent import envs
from rose.agent.envs.base import Action, ToolCall
from rose.parts.adapters.envs import openenv
from tests.foreign import python_of
from tests.made import environment

from .conftest import served

SERVER = Path(__file__).parent / "servers" / "openenv_server.py"
DEADLINE_S = 120.0


def env_of(**args):
    return environment("openenv", **args)


@pytest.fixture(scope="module")
def url():
    """Of a server that runs."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with served(python_of("openenv"), SERVER, env=bare) as port:
        yield f"http://127.0.0.1:{port}"


def guess(number):
    return Action("", ToolCall("act", {"number": number}))


@pytest.mark.slow
async def test_an_episode_is_played_over_the_servers_protocol(url):
    async def bisect(env, seed):
        start, low, high = await env.reset(seed), 1, 20
        while True:
            middle = (low + high) // 2
            step = await env.step(guess(middle))
            if step.done:
                await env.close()
                return start, middle, step
            low, high = (middle + 1, high) if "higher" in step.observation else (low, middle - 1)

    seeds = (4, 4, 6, 8, 10)
    games = [bisect(envs.build(env_of(url=url, prompt="Guess.")), seed) for seed in seeds]
    games = await asyncio.wait_for(asyncio.gather(*games), DEADLINE_S)
    start, number, step = games[0]
    assert start.messages == [{"role": "user", "content": "Guess.\n\nA number from 1 to 20."}]
    (tool,) = start.tools
    assert tool["function"]["description"] == "Guess the number from 1 to 20."
    assert tool["function"]["parameters"]["required"] == ["number"]
    assert list(tool["function"]["parameters"]["properties"]) == ["number"]
    assert (step.reward, step.success, number) == (1.0, True, games[1][1])
    assert len({number for _, number, _ in games}) > 1


@pytest.mark.slow
async def test_a_malformed_action_is_told_and_a_broken_environment_fails(url):
    env = envs.build(env_of(url=url, reset={"most": 3}))
    assert "from 1 to 3" in (await env.reset(2)).messages[0]["content"]
    bad = [guess("x\ud800"), Action("", ToolCall("act", {})), Action("", ToolCall("fly", {}))]
    told = [await env.step(action) for action in bad]
    with pytest.raises(RuntimeError, match="step failed: broken"):
        await env.step(guess(666))
    await env.close()
    await env.close()
    assert all(step.invalid and not step.done for step in told)
    assert "number" in told[1].observation and "Call one of act" in told[2].observation


@pytest.mark.slow
def test_the_look_at_launch_goes_to_no_proxy_as_episodes_do(url, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    openenv._schema.cache_clear()
    envs.check(env_of(url=url))
