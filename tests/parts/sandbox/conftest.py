"""One event loop, and so one keeper, for a module; and the fixtures of tests/agent, on whose loop and
templates the tests of env=terminal rest."""

import asyncio

import pytest

from rose.parts.sandbox import probe
from tests.agent.conftest import chats, save_tokenizer, tokenizer  # noqa: F401


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner
        runner.run(_close())


async def _close():
    probe.close()
