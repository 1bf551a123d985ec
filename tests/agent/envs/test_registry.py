"""What holds for every environment, and how one is named in the configuration."""

import asyncio
import functools
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import yaml

from rose import config
from rose.agent import envs
from rose.agent.envs.base import Action, Step, ToolCall
from rose.config import ConfigError
from tests.agent.scripted import limits
from tests.made import environment

CONF = Path(__file__).resolve().parents[3] / "conf" / "env"
ODD_CALLS = [None, ToolCall("no_such_tool" * 20, {}), ToolCall("\ud800", {"x": "\ud800"})]
ODD_ARGUMENTS = [None, [], {}, "", "x", -1, 10**400, 1.5, True, [[]], ["left", {}], "9**9**9"]
ODD_ARGUMENTS += ["\ud800", "(" * 500]


def read(name: str, **args) -> config.Env:
    given = {"data": prompts()} if name in ("prompts", "mcp") else {}
    return environment(name, **given | args)


@functools.cache
def prompts() -> str:
    """A file of prompts."""
    path = Path(tempfile.mkdtemp()) / "sums.jsonl"
    rows = [{"prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ALONE = sorted(
    path.stem
    for path in CONF.glob("*.yaml")
    # agents are programs, and have no steps: tests/parts/adapters/gateway
    if path.stem not in ("agent", "verifiers") and "members" not in yaml.safe_load(path.read_text())
)


# those whose every episode takes a server have tests of their own
@pytest.fixture(params=[name for name in ALONE if name not in ("mcp", "openenv")])
def env_config(request):
    return read(request.param)


def test_every_environment_has_a_conf_file_and_every_conf_file_an_environment():
    assert {read(name).name for name in ALONE} == set(envs.names()) - {"agent", "verifiers"}


def test_a_seed_determines_the_episode(env_config):
    async def start(seed):
        env = envs.build(env_config)
        try:
            return await env.reset(seed)
        finally:
            await env.close()

    first, again = asyncio.run(start(5)), asyncio.run(start(5))
    assert first == again
    seeds = (0, 1, 2, 3, 2**31, 2**63 - 1)
    assert len({str(asyncio.run(start(seed)).messages) for seed in seeds}) > 1


async def test_closing_early_and_twice_is_safe(env_config):
    env = envs.build(env_config)
    await env.close()
    await env.close()


def test_the_conf_file_is_accepted_and_starts_with_function_schemas_and_chat(env_config):
    envs.check(env_config)
    start = asyncio.run(envs.build(env_config).reset(1))
    assert [message["role"] for message in start.messages] in (["system", "user"], ["user"])
    for tool in start.tools:
        assert tool["type"] == "function"
        function = tool["function"]
        assert function["name"] and function["description"]
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])


async def test_no_call_raises_and_what_cannot_be_done_is_said(env_config):
    """Each tool with each odd argument; the tools are the environment's own."""
    env = envs.build(env_config)
    tools = (await env.reset(1)).tools
    calls = ODD_CALLS + [
        ToolCall(tool["function"]["name"], {key: value})
        for tool in tools
        for key in (*tool["function"]["parameters"]["properties"], "other")
        for value in ODD_ARGUMENTS
    ]
    for call in calls:
        step = await env.step(Action(text="", call=call))
        assert isinstance(step, Step) and len(step.observation) < 1000
        if env.requires_tool and (call is None or call in ODD_CALLS or "other" in call.arguments):
            assert step.invalid and step.observation and not step.done and step.reward == 0
        if step.done:
            await env.reset(1)
    await env.close()


@pytest.mark.parametrize("name", ["frozen_lke", "base", "_arithmetic", "", "../x", "os"])
def test_only_environments_can_be_named(name):
    with pytest.raises(ConfigError, match="no such environment; there are .*frozen_lake"):
        envs.check(limits(name=name))


WRONG = {
    "calculator": "operations=0 operations=True largest='9' operators='+/' operators='' shaping=1",
    "reasoning": "task='chess' size=1 largest=1",
    "minigrid": "task='MiniGrid-Nowhere-v0' task='CartPole-v1' task=[] actions_per_turn=0 "
    "max_steps=0 shaping=-1",
    "frozen_lake": "shaping='much' size=1 size=4.0 hole_probability=0.9 hole_probability=True "
    "slippery='no' sise=5",
}


@pytest.mark.parametrize("name, wrong", [(n, w) for n, all in WRONG.items() for w in all.split()])
def test_a_bad_argument_is_named(name, wrong):
    with pytest.raises(ConfigError) as error:
        envs.check(read(name, **eval(f"dict({wrong})")))
    assert str(error.value).startswith(f"env.args.{wrong}: ")
    assert wrong != "sise=5" or "it knows size" in str(error.value)


def test_what_a_member_of_a_mixture_may_not_be_is_said_by_its_key():
    member = config.Member(weight=1.0, **(yaml.safe_load((CONF / "calculator.yaml").read_text())))
    envs.check(config.Mixture(name="mixture", members={"sums": member}))
    for wrong, words in (
        ({"name": "calculatr"}, r"env\.members\.sums\.name='calculatr': no such environment"),
        ({"args": {"largest": 0}}, r"env\.members\.sums\.args\.largest=0: an integer from 1"),
    ):
        broken = {"fine": member, "sums": msgspec.structs.replace(member, **wrong)}
        with pytest.raises(ConfigError, match=f"^{words}"):
            envs.check(config.Mixture(name="mixture", members=broken))


def plugin(monkeypatch, folder: Path, name: str, source: str) -> config.Env:
    monkeypatch.delitem(sys.modules, f"{envs.__name__}.{name}", raising=False)
    (folder / f"{name}.py").write_text(source)
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(folder)])
    monkeypatch.setattr(envs, "_modules", envs._modules.__wrapped__)  # uncached
    return limits(name=name)


PLAIN = """
class Odd:
    requires_tool = False
    async def reset(self, seed): pass
    async def step(self, action): pass
    async def close(self): pass
"""


def odd(more, words):
    """The file of a class with this line, and what is said of it."""
    return "odd", f"{PLAIN}    {more}\n", words


@pytest.mark.parametrize(
    "name, source, words",
    [
        ("needs_package", "import not_there", "needs the Python package 'not_there'"),
        ("needs_part", "import rose.parts.absent", "needs rose/parts/absent, which is missing"),
        ("no_class", "x = 1", "no_class.py must define the class NoClass"),
        ("bare", "class Bare:\n    def __init__(self, size): pass\n", r"env\.args\.size: missing"),
        odd("def requires_tool(self): return False", "its requires_tool is <bound meth.*not true"),
        odd("rewards_turns = 'yes'", "its rewards_turns is 'yes', not true or false"),
        odd("end = 10", "its end is 10, not a method"),
        odd("checkpoint = 'last.pt'", "its checkpoint is 'last.pt', not a method"),
        odd("several_calls = property(lambda self: 1 / 0)", "properties raised ZeroDivisionError"),
        odd("step = None", "its step is None, not a method"),
        odd("def __init__(self): raise SystemExit(2)", r"odd raised SystemExit\(2\)"),
        odd("rewards_turns = 1", ""),  # numbers may be flags
        odd("end = None", ""),
    ],
)
def test_a_file_that_is_no_environment_is_refused(monkeypatch, tmp_path, name, source, words):
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        envs.check(plugin(monkeypatch, tmp_path, name, source))
