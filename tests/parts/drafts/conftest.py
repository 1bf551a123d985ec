"""The fixtures of tests/engine and of its drafts."""

from tests.engine.conftest import loop, model_config, rollout, wait  # noqa: F401
from tests.engine.test_drafts import engine_with, folder  # noqa: F401
