"""env=verifiers against the library itself, in a virtual environment of its own, and two outside
environments of it (verifiers_envs/), the policy's turns coming from a script."""

import ast
import asyncio
import json
import random
from pathlib import Path

import pytest

from rose.agent import envs
from rose.agent.guard import EnvironmentFailure
from rose.config import ConfigError
from rose.parts.adapters.envs.verifiers import PLAYER
from rose.parts.adapters.gateway import players
from rose.processes import adopt_orphans
from rose.protocol import unpack_tokens
from tests.agent.scripted import Script
from tests.made import environment
from tests.processes import ran

from .conftest import open_gateway, played

DEADLINE_S = 300.0
pytestmark = pytest.mark.slow
ADD = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 1, "b": 12}}\n</tool_call>'


def env_of(**args):
    return environment("verifiers", **args)


@pytest.fixture
def outside(verifiers_python, monkeypatch):
    """The two environments' `env.args`, which are found as a user's would be."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "verifiers_envs"))
    return {"python": verifiers_python, "environment": ["PYTHONPATH"]}


def made_of(sample):
    """The tokens of a sample that the policy made."""
    tokens = unpack_tokens(sample.tokens).tolist()
    return [token for token, own in zip(tokens, sample.mask, strict=True) if own]


@pytest.fixture
def play(chats, tokenizer):
    """play(env.args, rounds of [(seed, texts of the policy)], **limits) -> the trajectories or
    failures of each round, whose episodes ran at once."""

    def go(args, *rounds, **changed):
        made = envs.build(env_of(**args))

        async def one(gateway, seed, texts):
            policy, within = Script(tokenizer, *texts), {"step_timeout_s": DEADLINE_S} | changed
            given = (gateway, made, chats["tiny"], policy, f"g{seed}", seed)
            try:
                trajectory = await played(*given, **within)
            except EnvironmentFailure as failure:
                return failure
            # what the policy made is trained once, token by token, and nothing else is
            said = [t for r in policy.results for t in unpack_tokens(r.tokens).tolist()]
            assert [t for s in trajectory.samples() for t in made_of(s)] == said
            return trajectory

        async def run():
            adopt_orphans()
            async with open_gateway() as gateway:
                at_once = ((one(gateway, *each) for each in episodes) for episodes in rounds)
                return [await asyncio.gather(*episodes) for episodes in at_once]

        return asyncio.run(asyncio.wait_for(run(), DEADLINE_S))

    return go


@pytest.mark.parametrize("renderer", [None, {"name": "default", "tool_parser": "qwen3"}])
def test_turns_tools_and_rewards_are_the_librarys(play, outside, renderer):
    sums = outside | {"id": "rose_sums", "renderer": renderer}
    sums |= {"args": {"first": 12, "rows": 1, "tools": True}}
    sums |= {"held_out": {"first": 40, "split": "test"}}
    episodes = [(2, [ADD, "13"]), (4, ["14"]), (3, ["41"]), (6, [ADD])]
    [(right, wrong, held_out, long)] = play(sums, episodes, max_turns=3)
    assert (right.reward, right.success, right.turns) == (1.25, True, 2)
    assert right.stats["verifiers/calls"] == 1 and right.stats["verifiers/right"] == 1
    assert (wrong.reward, wrong.success) == (0.25, False)
    assert (held_out.reward, held_out.success) == (1.25, True), "the held-out task"
    assert (long.reward, long.truncated, long.turns) == (0.25, True, 3)


def test_the_environment_may_be_the_user_of_an_endless_taskset(play, outside):
    guess = outside | {"id": "publisher/rose-guess@1.0", "most_tasks": 50}
    [several] = play(guess, [(seed, ["1", "2", "3"]) for seed in range(8)])
    assert all(t.reward == 1.0 and not t.branches for t in several)
    assert len({t.turns for t in several}) > 1


ANSWERS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("rose_chat", sys.argv[1])
player = sys.modules["rose_chat"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(player)
print([task.data.answer for task in player.Player(json.loads(sys.stdin.readline())).train])
"""


def answers(args) -> list[str]:
    """Of the tasks that train, in the player's order."""
    made = envs.build(env_of(**args))
    program = [made.command[0], "-c", ANSWERS, str(PLAYER)]
    done = ran(program, input=f"{made.settings}\n", check=True, timeout=DEADLINE_S)
    return ast.literal_eval(done.stdout)


def test_episodes_that_fail_are_no_episodes_of_reward_0(play, outside, monkeypatch):
    monkeypatch.setattr(players, "CANCEL_S", 5.0)
    sums = {"id": "rose_sums", "args": {"first": 2, "rows": 8}, "held_out": {"first": 50}}
    places = answers(outside | sums)
    raising, hanging, blocking, exiting = (
        next(s for s in range(0, 1000, 2) if places[random.Random(s).randrange(8)] == answer)
        for answer in ("3", "5", "7", "9")
    )
    (raised, hung, fine, exited), [blocked], [later] = play(
        outside | sums,
        [(raising, ["3"]), (hanging, ["5"]), (1, ["no"]), (exiting, ["9"])],
        [(blocking, ["7"])],
        [(3, ["no"])],
        step_timeout_s=20.0,
    )
    assert "RuntimeError: nobody can judge 3" in raised.cause
    assert "SystemExit: 4" in exited.cause
    assert "neither called nor ended within env.step_timeout_s=20 s" in hung.cause
    assert "neither called nor ended within" in blocked.cause
    assert fine.reward == 0.25, "other episodes go on"
    assert later.reward == 0.25, "the process that hung was replaced"


def test_an_episode_that_is_cancelled_at_once_is_answered(outside):
    made = envs.build(env_of(**outside, id="rose_sums"))
    place = {"url": "http://127.0.0.1:9", "key": "k", "tokenizer": "none"}
    orders = [{"name": "a", "seed": 2, **place}, {"cancel": "a"}]
    lines = [made.settings, *map(json.dumps, orders), ""]
    done = ran(made.command, input="\n".join(lines), check=True, timeout=DEADLINE_S)
    assert json.loads(done.stdout.splitlines()[1])["name"] == "a"


def test_what_the_library_refuses_is_refused_before_a_run(outside):
    def refused(match, **args):
        with pytest.raises(ConfigError, match=match):
            envs.check(env_of(**(outside | {"id": "rose_sums"} | args)))

    refused("env.args.id='nope': no such environment is installed", id="nope")
    refused("env.args.args=.*can't be loaded: ConnectionError: couldn't", args={"needs": "the hub"})
