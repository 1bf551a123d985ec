"""env=verifiers against the library itself, in a virtual environment of its own, and two outside
environments of it (verifiers_envs/), the policy's turns coming from a script."""

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import pytest
import yaml

from rose import config
from rose.agent import envs
from rose.agent.gateway import players
from rose.agent.gateway.run import run_agent
from rose.agent.gateway.server import Gateway
from rose.agent.loop import EnvironmentFailure
from rose.config import ConfigError
from rose.processes import adopt_orphans
from rose.protocol import Sampling, unpack_tokens

from .conftest import REPOSITORY, START, Policy, limits

DEADLINE_S = 300.0
ADD = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 1, "b": 12}}\n</tool_call>'


def env_of(**args):
    raw = yaml.safe_load((REPOSITORY / "conf" / "env" / "verifiers.yaml").read_text())
    return config.Env(**(raw | {"args": raw["args"] | args}))


def test_what_can_not_be_a_verifiers_environment_is_refused(tmp_path):
    def refused(match, **args):
        with pytest.raises(ConfigError, match=match):
            envs.check(env_of(**({"python": sys.executable, "id": "x"} | args)))

    refused("env.args.python='/no/python': no such program", python="/no/python")
    refused("env.args.id='': the name", id="")
    refused("env.args.held_out=1.5: a share", held_out=1.5)
    refused("env.args.args=3: a map", args=3)
    refused("env.args.most_tasks=0: an integer", most_tasks=0)
    refused("env.args.python='.*': No package metadata was found for verifiers")
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'unknown option -P' >&2; exit 2\n")
    old.chmod(0o755)
    refused("a Python from 3.11 with verifiers 0.4; it ended with code 2: unknown", python=str(old))


@pytest.fixture
def outside(verifiers_python, monkeypatch):
    """The two environments' `env.args`, which are found as a user's would be."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "verifiers_envs"))
    return {"python": verifiers_python, "environment": ["PYTHONPATH"]}


@pytest.fixture
def play(chats, tokenizer):
    """play(env.args, [(seed, texts of the policy)], **limits) -> its trajectories or failures, of
    episodes that ran at once."""

    def go(args, episodes, **changed):
        made = envs.build(env_of(**args))

        async def one(gateway, seed, texts):
            start = msgspec.structs.replace(START, id=f"g{seed}", env_seed=seed)
            policy = Policy(tokenizer, *texts)
            try:
                trajectory = await run_agent(
                    start, made, gateway, chats["tiny"], policy,
                    limits(**{"step_timeout_s": DEADLINE_S} | changed), "env", 2000, Sampling(1),
                    time.time,
                )  # fmt: skip
            except EnvironmentFailure as failure:
                return failure
            # what the policy made is trained once, token by token, and nothing else is
            made_tokens = [t for r in policy.results for t in unpack_tokens(r.tokens).tolist()]
            trained = [
                token
                for s in trajectory.samples()
                for token, own in zip(unpack_tokens(s.tokens).tolist(), s.mask, strict=True)
                if own
            ]
            assert trained == made_tokens
            return trajectory

        async def run():
            adopt_orphans()
            gateway = Gateway("tiny")
            await gateway.open("127.0.0.1")
            try:
                return await asyncio.gather(*(one(gateway, *e) for e in episodes))
            finally:
                await gateway.close()

        return asyncio.run(asyncio.wait_for(run(), DEADLINE_S))

    return go


@pytest.mark.slow
@pytest.mark.parametrize("renderer", [None, {"name": "default", "tool_parser": "qwen3"}])
def test_turns_tools_and_rewards_are_the_librarys(play, outside, renderer):
    sums = outside | {
        "id": "rose_sums",
        "renderer": renderer,
        "args": {"first": 12, "rows": 1, "tools": True},
        "held_out": {"first": 40, "split": "test"},
    }
    right, wrong, held_out, long = play(
        sums, [(2, [ADD, "13"]), (4, ["14"]), (3, ["41"]), (6, [ADD])], max_turns=3
    )
    assert (right.reward, right.success, right.turns) == (1.25, True, 2)
    assert (wrong.reward, wrong.success) == (0.25, False)
    assert (held_out.reward, held_out.success) == (1.25, True)
    assert right.stats["verifiers/calls"] == 1 and right.stats["verifiers/right"] == 1
    assert (long.reward, long.truncated, long.turns) == (0.25, True, 3)
    guess = outside | {"id": "publisher/rose-guess@1.0", "renderer": renderer, "most_tasks": 50}
    first, second = play(guess, [(2, ["1", "2", "3"]), (2, ["3", "2", "1"])])
    assert {first.turns, second.turns} == {1, 3} or first.turns == second.turns == 2
    assert first.reward == second.reward == 1.0


@pytest.mark.slow
def test_episodes_that_fail_are_no_episodes_of_reward_0(play, outside, monkeypatch):
    monkeypatch.setattr(players, "CANCEL_S", 5.0)

    def sums(first):
        other = {"first": 50, "rows": 1}
        return outside | {"id": "rose_sums", "args": {"first": first, "rows": 1}, "held_out": other}

    [raised, fine] = play(sums(2), [(2, ["3"]), (3, ["51"])])
    assert "RuntimeError: nobody can judge 3" in raised.cause and fine.reward == 1.25
    [hangs] = play(sums(4), [(2, ["5"])], step_timeout_s=3.0)
    assert "neither called nor ended within env.step_timeout_s=3 s" in hangs.cause
    blocked, other, after = play(sums(6), [(2, ["7"]), (3, ["a"]), (5, ["51"])], step_timeout_s=8.0)
    assert isinstance(blocked, EnvironmentFailure)


@pytest.mark.slow
def test_what_the_library_refuses_is_refused_before_a_run(outside):
    def refused(match, **args):
        with pytest.raises(ConfigError, match=match):
            envs.check(env_of(**(outside | {"id": "rose_sums"} | args)))

    refused("env.args.id='nope': no such environment is installed", id="nope")
    refused("env.args.args=.*colour", args={"colour": 1})
    refused("env.args.args=.*rose_sums has no tasks", args={"rows": 0})
    refused("env.args.args=.*can't be loaded: ConnectionError: couldn't", args={"needs": "the hub"})
    refused("env.args.held_out=0.1: of 1 tasks", args={"rows": 1})
