"""What engines of both kinds have in common."""

from types import SimpleNamespace

import pytest

from rose.engine.plugin import refuse_drafts
from rose.parts.lending.vllm.member import vllm_scheduler

pytestmark = pytest.mark.slow  # imports vLLM


def test_an_engine_on_a_cpu_that_would_decode_drafts_does_not_start():
    """Its model may ask for them, too, so that no name of an argument tells."""
    refuse_drafts(SimpleNamespace(speculative_config=None))
    drafting = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle3"))
    for start in (refuse_drafts, lambda config: vllm_scheduler(object, config)):
        with pytest.raises(ValueError, match="eagle3: vLLM 0.32 on CPUs samples wrong tokens"):
            start(drafting)
