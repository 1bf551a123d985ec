"""A policy without an engine: it says what the test wants, as tokens of the real tokenizer."""

import io

import pytest
from rich.console import Console

from rose import protocol as p
from tests.agent.conftest import chats, save_tokenizer, tokenizer  # noqa: F401


class Scripted:
    """Says `texts`, one a turn, then the last again; with the end-of-turn token behind each."""

    label = "after 6 training steps"

    def __init__(self, chat, *texts: str) -> None:
        self.chat, self.texts, self.asked = chat, list(texts), []

    async def turn(self, request, on_tokens):
        self.asked.append(request)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        tokens = [*self.chat._encode(text), min(self.chat.eos_ids)]
        on_tokens(tokens[:-1])
        zeros = p.pack_floats([0.0] * len(tokens))
        versions = p.pack_tokens([6] * len(tokens))
        return p.TurnResult(
            request.turn, p.pack_tokens(tokens), zeros, versions, p.FinishReason.STOP
        )


@pytest.fixture
def chat(chats):  # noqa: F811
    return chats["tiny"]


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def printed(console):
    """printed() -> what stands on the console."""
    return console.file.getvalue
