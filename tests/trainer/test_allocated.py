"""The estimates of dry runs against what DeepSpeed allocates, counted tensor by tensor on the
CPU."""

import pytest

from tests.trainer import allocated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "vocab", "more", "mixture"),
    [
        (3, 2048, (), {}),
        (3, 256, (), {}),
        (2, 2048, (), {}),
        (1, 2048, ("trainer.dtype=float32", "trainer.gradient_checkpointing=false"), {}),
        (3, 2048, (), allocated.MIXTURE),
    ],
)
def test_a_trainer_rank_allocates_what_is_estimated(stage, vocab, more, mixture):
    """With a large vocabulary the logits need most, with a small one the layers."""
    keys = [f"trainer.zero_stage={stage}", *more]
    found = allocated.measure(256, keys, {"vocab": vocab} | mixture)
    assert found.keys() == {"forward and backward", "update", "between steps"}
    for moment, (estimated, counted) in found.items():
        assert estimated == pytest.approx(counted, rel=0.15), (moment, found)
