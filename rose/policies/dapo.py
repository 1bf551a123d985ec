"""DAPO (arXiv 2503.14476): dynamic sampling with over-sampling, as ROLL implements it."""

from __future__ import annotations

from rose.policies.batches import check
from rose.policies.verl import Synchronous


class Dapo(Synchronous):
    """Run `oversample` times the wanted groups at once, train on the first accepted ones, and drop
    the others (DAPO, arXiv 2503.14476, section 3.2, with ROLL's redundant prompts).

    With `algorithm.dynamic_sampling`, groups whose rewards are all equal are refused. Each is
    replaced at once, so that `oversample` batches stay accepted or running; `max_admitted` works as
    in `synchronous`. Dropped groups tend to be long ones, a bias that the paper accepts;
    `tail_batching` tries them again. DAPO gives no value for `oversample`. veRL's recipe generates
    3 batches for one and waits for all; 1.25 is RollPacker's (section 4.1). Live runs support all
    of it; engines abort the turns of dropped groups at once.
    """

    def __init__(self, oversample: float, max_admitted: float) -> None:
        check(max_admitted, oversample=oversample)
        self.oversample = oversample
        super().__init__(max_admitted)
