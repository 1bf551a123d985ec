"""How engines decode is counted."""

from rose import protocol as p
from rose.coordinator.decoding import Decoding


def test_engines_steps_are_counted_from_heartbeats_over_restarts():
    decoding = Decoding()

    def load(incarnation: int, tokens: int, steps: int, drafted: int, accepted: int) -> None:
        decoding.count(
            p.WorkerLoad("a", incarnation, 1, 0, 0.0, tokens, 0, 0, steps, drafted, accepted)
        )

    load(1, 100, 50, 0, 0)
    assert decoding.row() == {"tokens_per_engine_step": 2.0}
    decoding.begin_step()
    load(1, 160, 70, 40, 20)
    load(2, 20, 20, 10, 0)
    expected = {"tokens_per_engine_step": 2.0, "drafted_tokens": 50, "accepted_tokens": 20}
    assert decoding.row() == expected
