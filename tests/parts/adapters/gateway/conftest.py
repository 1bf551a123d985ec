"""A gateway on a free port, whose turns come from a script."""

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rose import config
from rose.parts.adapters.gateway.run import run_agent
from rose.parts.adapters.gateway.server import Gateway
from rose.parts.adapters.gateway.session import Session
from rose.protocol import FinishReason, Phase, Sampling, StartTrajectory
from tests.foreign import python_of
from tests.made import result, tool

REPOSITORY = Path(__file__).resolve().parents[4]
START = StartTrajectory("g1.2", "g1", Phase.TRAIN, "agent", 8, None)
USER = {"role": "user", "content": "go"}
CALL = '<tool_call>\n{"name": "move", "arguments": {"direction": "left"}}\n</tool_call>'
TOOL = tool("move", direction="string")


def limits(**changed) -> config.Env:
    plain = {"name": "agent", "args": {}, "max_turns": 8, "max_new_tokens": 64}
    return config.Env(**plain | {"step_timeout_s": 120.0, "max_failures_in_row": 1} | changed)


class Policy:
    """Turns from texts, in order, the last one again and again; a turn waits for `gate`."""

    def __init__(self, tokenizer, *texts, closed=True):
        self.tokenizer, self.texts, self.closed = tokenizer, texts, closed
        self.requests, self.results = [], []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, request):
        k = len(self.requests)
        self.requests.append(request)
        await self.gate.wait()
        text = self.texts[min(k, len(self.texts) - 1)]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        tokens += [self.tokenizer.eos_token_id] * self.closed
        tokens = tokens[: request.sampling.max_new_tokens]
        stop = tokens[-1] == self.tokenizer.eos_token_id
        finish = FinishReason.STOP if stop else FinishReason.LENGTH
        self.results.append(result(request.turn, tokens, -0.25 * (k + 1), k, finish))
        return self.results[-1]


@asynccontextmanager
async def open_gateway(**attributes):
    gateway = Gateway("tiny")
    vars(gateway).update(attributes)
    await gateway.open("127.0.0.1")
    try:
        yield gateway
    finally:
        await gateway.close()


async def played(gateway, agent, chat, policy, name=START.id, seed=START.env_seed, **changed):
    """An agent's trajectory; `changed`: of its limits, its key, its context and its scoring."""
    start = msgspec.structs.replace(START, id=name, env_seed=seed)
    plain = {"key": "env", "max_context": 2000, "scoring": None}
    key, context, scoring = (changed.pop(name, each) for name, each in plain.items())
    rest = (limits(**changed), key, context, Sampling(1), time.time, scoring)
    return await run_agent(start, agent, gateway, chat, policy, *rest)


class World:
    def __init__(self, gateway, chat, policy, max_context, **changed):
        self.gateway, self.policy, self.chat = gateway, policy, chat
        self.session = Session(
            START, chat, policy, limits(**changed), max_context, Sampling(1, temperature=0.7)
        )
        gateway.admit(self.session)
        self.url, self.key = gateway.url, self.session.key


def openai_client(world, **changed):
    import openai  # a second, which not every test needs

    return openai.AsyncOpenAI(
        **{"base_url": f"{world.url}/v1", "api_key": world.key, "max_retries": 0} | changed
    )


@pytest.fixture
def serve(chats, tokenizer):
    """serve(texts...) -> async context of a `World`."""

    @asynccontextmanager
    async def opened(*texts, chat=None, closed=True, max_context=2000, **changed):
        async with open_gateway() as gateway:
            policy = Policy(tokenizer, *texts, closed=closed)
            yield World(gateway, chat or chats["tiny"], policy, max_context, **changed)

    return opened


@pytest.fixture(scope="session")
def verifiers_python():
    """Of a virtual environment with the package verifiers."""
    return str(python_of("verifiers"))
