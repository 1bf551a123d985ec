"""An environment host runs each trajectory under the limits of its own environment."""

import asyncio

import pytest

from rose import protocol as p
from rose.agent.host import ENDING_DELAY_S, REPORT_DELAY_S
from tests.agent.hosted import Hosted
from tests.made import result


def start(domain="calculator"):
    return p.StartTrajectory("g0.0", "g0", p.Phase.TRAIN, domain, 8, None)


async def hosted(config, chat, domain, tokens):
    """Return a host's messages about one trajectory, whose turns are as many of these tokens as asked."""

    def made(request):
        tokens_of = tokens[: request.sampling.max_new_tokens]
        return result(request.turn, tokens_of, finish=p.FinishReason.LENGTH)

    return await Hosted(config, chat).play(start(domain), made)


@pytest.mark.parametrize("domain, turns, new", [("frozen_lake", 3, 16), ("calculator", 2, 24)])
async def test_turns_and_tokens_are_limited(make_config, chats, tokenizer, domain, turns, new):
    config = make_config(
        "env=games env.members.frozen_lake.max_turns=3 env.members.calculator.max_turns=2",
        "env.members.calculator.max_new_tokens=24 model.max_context=4096",
        "trainer.micro_batch_tokens=4096",
    )
    words = tokenizer.encode("a word " * 40, add_special_tokens=False)
    *requests, last = await hosted(config, chats["tiny"], domain, words)
    assert [(m.domain, m.sampling.max_new_tokens) for m in requests] == [(domain, new)] * turns
    assert last.trajectory.domain == domain and last.trajectory.turns == turns
    assert last.trajectory.truncated


async def test_a_turns_result_that_arrives_twice_is_taken_once(make_config, chats, tokenizer):
    """As when the word of a lost engine arrives beside that of the one that took over: the step is
    carried out, and its reward paid, once."""
    config = make_config("env.args.shaping=0.5", "env.args.hole_probability=0.0")
    text = '<tool_call>{"name": "move", "arguments": {"direction": "right"}}</tool_call>'
    right = tokenizer.encode(text, add_special_tokens=False)
    host = Hosted(config, chats["tiny"])
    host.handle(start("frozen_lake"))
    while isinstance(asked := await host.next(), p.TurnRequest):
        made = result(asked.turn, right, finish=p.FinishReason.LENGTH, migrations=1)
        host.handle(made)
        host.handle(made)
        await asyncio.sleep(0)
        host.handle(made)
    found = asked.trajectory
    # three moves gain a sixth of the way each, the wall stops the others
    assert found.turns == len(found.turn_rewards) == len(found.turn_tokens) == 10
    assert found.turn_rewards == pytest.approx([0.5 / 6] * 3 + [0.0] * 7)
    assert found.reward == pytest.approx(0.25)


async def test_a_failure_names_the_members_key(make_config, chats):
    config = make_config("env=games model.max_context=65 env.members.calculator.max_new_tokens=8")
    [failed] = await hosted(config, chats["tiny"], "calculator", [])
    assert failed.domain == "calculator" and "env.members.calculator.args smaller" in failed.error


@pytest.mark.parametrize("ending", [False, True])
async def test_deaths_with_a_job_are_no_failure(make_config, chats, monkeypatch, ending):
    config, slept = make_config("env=games", "model.max_context=65"), []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    host = Hosted(config, chats["tiny"])
    if ending:
        host.host.on_sigterm()
    host.handle(start())
    assert isinstance(await host.next(), p.TrajectoryFailed)
    assert slept == [REPORT_DELAY_S, ENDING_DELAY_S][: 1 + ending]
