"""The fixtures of tests/agent, on whose loop and templates the tests of env=terminal rest."""

from tests.agent.conftest import chats, save_tokenizer, tokenizer  # noqa: F401
