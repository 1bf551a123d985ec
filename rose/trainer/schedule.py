"""The learning rate of each optimizer update: a pure function of its number, so that a run which
stopped and goes on has the rates of one that did not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import get_scheduler

from rose.config import Trainer

NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def learning_rates(trainer: Trainer) -> Callable[[int], float]:
    """Update number, from 0 -> its learning rate.

    Linear warm-up over `warmup_steps` updates, then transformers' schedule of that name until the
    last update of trainer.steps; what lies above `final_share` of the rate is what falls. Update n
    takes the schedule's step n + 1, of one more than there are: neither its first rate, 0, nor its
    last, 0 again, is wasted on a batch.
    """
    o, updates = trainer.optimizer, trainer.steps * trainer.updates_per_step
    nothing = torch.optim.SGD([torch.zeros(1)])
    [factor] = get_scheduler(NAMES[o.schedule], nothing, o.warmup_steps, updates + 1).lr_lambdas

    def rate(update: int) -> float:
        share = factor(update + 1)
        warm = update + 1 >= o.warmup_steps
        return o.lr * (o.final_share + (1 - o.final_share) * share if warm else share)

    return rate
