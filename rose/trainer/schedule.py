"""The learning rate of each optimizer update: a pure function of the update's number, so that a
resumed run has the same rates as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import get_scheduler

from rose.config import Trainer

NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def learning_rates(trainer: Trainer) -> Callable[[int], float]:
    """Return a function from an update's number, counted from 0, to its learning rate.

    The rate rises linearly over `warmup_steps` updates. Then it follows transformers' schedule of
    the configured name until the last update of trainer.steps, scaled so that it falls to
    `final_share` of `lr`. Update n takes step n + 1 of a schedule that is one step longer than the
    run. So no batch is trained with the schedule's first rate or its last rate, which are 0."""
    o, updates = trainer.optimizer, trainer.steps * trainer.updates_per_step
    nothing = torch.optim.SGD([torch.zeros(1)])
    [factor] = get_scheduler(NAMES[o.schedule], nothing, o.warmup_steps, updates + 1).lr_lambdas

    def rate(update: int) -> float:
        share = factor(update + 1)
        warm = update + 1 >= o.warmup_steps
        return o.lr * (o.final_share + (1 - o.final_share) * share if warm else share)

    return rate
