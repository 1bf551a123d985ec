"""A gateway on a free port, whose turns come from a script."""

import time
from contextlib import asynccontextmanager

import msgspec
import pytest

from rose.parts.adapters.gateway.run import run_agent
from rose.parts.adapters.gateway.server import Gateway
from rose.parts.adapters.gateway.session import Session
from rose.protocol import Phase, Sampling, StartTrajectory
from tests.agent.scripted import Script, limits
from tests.foreign import python_of
from tests.made import tool

START = StartTrajectory("g1.2", "g1", Phase.TRAIN, "agent", 8, None)
USER = {"role": "user", "content": "go"}
CALL = '<tool_call>\n{"name": "move", "arguments": {"direction": "left"}}\n</tool_call>'
TOOL = tool("move", direction="string")


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
        rest = (limits(**changed), max_context, Sampling(1, temperature=0.7))
        self.session = Session(START, chat, policy, *rest)
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
    async def opened(*texts, closed=True, max_context=2000, **changed):
        async with open_gateway() as gateway:
            policy = Script(tokenizer, *texts, closed=closed)
            yield World(gateway, chats["tiny"], policy, max_context, **changed)

    return opened


@pytest.fixture(scope="session")
def verifiers_python():
    """Of a virtual environment with the package verifiers."""
    return str(python_of("verifiers"))
