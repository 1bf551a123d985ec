"""Agents on a real engine: what is recorded is what the policy made, token by token, and its
log-probabilities are those of transformers."""

import asyncio
from pathlib import Path

import anthropic
import msgspec
import numpy as np
import openai
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from rose import config, models
from rose.agent.chat import ChatFormat
from rose.parts.adapters.envs.verifiers import Verifiers
from rose.parts.adapters.gateway.session import Session
from rose.protocol import (
    Sampling,
    TurnResult,
    pack_floats,
    pack_tokens,
    unpack_floats,
    unpack_tokens,
)
from tests.agent.scripted import limits
from tests.conftest import compose_tree

from .conftest import START, TOOL, open_gateway, played

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[4]
CONTEXT = 768
NEW = 24
QUESTION = {"role": "user", "content": "F F\nP G"}


class Policy:
    """Turns from a real engine, as a worker would make them."""

    def __init__(self, engine):
        self.engine = engine

    async def __call__(self, request):
        tokens, logprobs, versions = [], [], []
        async for chunk in self.engine.generate(request.turn, request.tokens, request.sampling):
            tokens += chunk.tokens
            logprobs += chunk.logprobs
            versions += [chunk.version] * len(chunk.tokens)
        packed = (pack_tokens(tokens), pack_floats(logprobs), pack_tokens(versions))
        return TurnResult(request.turn, *packed, chunk.finish)


def read(name, kind):
    return msgspec.convert(yaml.safe_load((REPOSITORY / "conf" / name).read_text()), kind)


@pytest.fixture(scope="module")
def world():
    """(loop, chat, policy, the same model in transformers)."""
    from rose.engine.vllm_engine import Engine

    model = msgspec.structs.replace(read("model/tiny.yaml", config.Model), max_context=CONTEXT)
    folder = models.resolve(model)
    rollout = msgspec.convert(compose_tree()["rollout"], config.Rollout)
    small = msgspec.structs.replace(rollout, kv_cache_gib=0.05)
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(Engine.start(folder, small, model))
    reference = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    yield loop, ChatFormat(folder), Policy(engine), reference
    loop.run_until_complete(engine.shutdown())
    loop.close()


@torch.no_grad()
def check(reference, branches):
    """Every recorded log-probability, against one forward pass over the whole branch."""
    made = 0
    for branch in branches:
        tokens = torch.tensor(unpack_tokens(branch.tokens).astype(np.int64))[None]
        logits = reference(tokens[:, :-1]).logits[0].float().log_softmax(-1)
        expected = logits.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        mask = np.frombuffer(branch.mask, np.uint8)[1:] == 1
        recorded = unpack_floats(branch.logprobs)[1:]
        np.testing.assert_allclose(recorded[mask], expected[mask], atol=1e-5)
        assert not recorded[~mask].any()
        made += int(mask.sum())
    assert made > 10
    return made


def go(world, use):
    """use(url, key), with a session of its own -> the session."""
    loop, chat, policy, _ = world

    async def run():
        within = limits(max_new_tokens=NEW, max_turns=12)
        session = Session(START, chat, policy, within, CONTEXT, Sampling(1))
        async with open_gateway() as gateway:
            gateway.admit(session)
            try:
                await use(gateway.url, session.key)
                return session
            finally:
                gateway.dismiss(session)

    return loop.run_until_complete(run())


def test_several_turns_edits_sub_agents_and_calls_at_once_are_exact(world):
    async def use(url, key):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            create, history = client.chat.completions.create, [QUESTION]
            for turn in range(4):
                done = await create(model="m", messages=history, tools=[TOOL], temperature=0.0)
                said = done.choices[0].message
                history.append(said.model_dump(exclude_none=True))
                told = {"role": "tool", "content": f"P F\nF {turn}"}
                results = [told | {"tool_call_id": call.id} for call in said.tool_calls or ()]
                history += results or [{"role": "user", "content": "on"}]
            await create(model="m", messages=[history[0], *history[3:]], tools=[TOOL])
            at_once = {"model": "m", "messages": [QUESTION], "tools": [TOOL]}
            await asyncio.gather(*(create(**at_once, seed=i) for i in range(6)))
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
            asked = [{"role": "user", "content": "help"}]
            await client.messages.create(model="m", max_tokens=20, messages=asked)

    session = go(world, use)
    branches = session.history.branches()
    assert session.turns == 12 and len(branches) == 9
    check(world[3], branches)


@pytest.mark.parametrize("renderer", [None, {"name": "default"}])
def test_an_environment_of_verifiers_is_exact(world, verifiers_python, monkeypatch, renderer):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "verifiers_envs"))
    guess = Verifiers(
        verifiers_python, "rose_guess", most_tasks=50, renderer=renderer, environment=["PYTHONPATH"]
    )
    loop, chat, policy, reference = world

    async def three():
        async with open_gateway() as gateway:
            given = (gateway, guess, chat, policy)
            within = {"max_context": CONTEXT, "max_new_tokens": NEW, "step_timeout_s": 300.0}
            episodes = (played(*given, f"g1.{i}", 2 * i, **within) for i in range(3))
            return await asyncio.gather(*episodes)

    trajectories = loop.run_until_complete(three())
    assert max(t.turns for t in trajectories) > 1
    check(reference, [s for t in trajectories for s in t.samples()])


def test_a_framework_from_pypi_runs_as_it_is(world):
    """smolagents' agent that calls tools, with its own prompts, templates and retries."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def move(direction: str) -> str:
        """Move one cell.

        Args:
            direction: where to
        """
        return f"moved {direction}"

    async def use(url, key):
        model = OpenAIServerModel("m", api_base=f"{url}/v1", api_key=key)
        update = {f"update_plan_{which}_messages": "" for which in ("pre", "post")}
        prompts = {"system_prompt": "Play.", "planning": {"initial_plan": ""} | update}
        prompts["managed_agent"] = {"task": "", "report": ""}
        prompts["final_answer"] = {"pre_messages": "", "post_messages": ""}
        given = {"instructions": "", "max_steps": 3, "verbosity_level": 0}
        agent = ToolCallingAgent([move], model, prompt_templates=prompts, **given)
        await asyncio.to_thread(agent.run, QUESTION["content"])

    session = go(world, use)
    assert session.turns >= 3
    check(world[3], session.history.branches())
