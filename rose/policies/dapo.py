"""DAPO (arXiv 2503.14476): dynamic sampling with over-sampling, as ROLL runs it."""

from __future__ import annotations

from rose.policies.batches import check
from rose.policies.verl import Synchronous


class Dapo(Synchronous):
    """`oversample` times the groups wanted run at once; the first accepted ones make the batch and
    the rest is dropped (DAPO, arXiv 2503.14476, section 3.2, as ROLL runs it: redundant prompts
    against the tail).

    With `algorithm.dynamic_sampling` groups whose rewards are all equal are refused, and each is
    replaced at once, so that `oversample` times the batch stays accepted or running; `max_admitted`
    as in `synchronous`. What is dropped is biased to long trajectories, which the paper accepts;
    `tail_batching` gives it back. DAPO itself names no factor and veRL's recipe generates 3 batches
    for one without ending early; 1.25 is RollPacker's (section 4.1). Live: nothing is missing;
    engines end the turns of dropped groups at once.
    """

    def __init__(self, oversample: float, max_admitted: float) -> None:
        check(max_admitted, oversample=oversample)
        self.oversample = oversample
        super().__init__(max_admitted)
