"""Advantages and weights of a batch that grows by whole groups (`trainer.stream`).

The gradient of finished groups is computed while other groups of the step still run, before the
batch's size and number of tokens are known. An advantage needs its group only. A weight that is
normalised over the batch (1 / trajectories, 1 / tokens, 1 / trees) needs the whole batch, but only
for a factor that all rows share: with each group that arrives, all weights shrink alike. So the
rows of every round get weights in the same unit: that of the weights which the algorithm gives to
the first round's groups alone. The sum of gradients then has this unit, and `scale` turns it into
the whole batch's gradient, once, before it is clipped and applied. In float32 it is the gradient of
a batch that arrives at once, up to the order of the sum. Each round checks the numbers, and rejects
an algorithm whose weights change otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.trainer.algorithms.base import Algorithm, Summary

ROUNDING = 1e-5  # relative tolerance; float32 sums over a batch in two orders differ by less


class Growing:
    """The advantages and weights of one training step. A batch that arrives in one round has the
    algorithm's own numbers, bit for bit, and a scale of 1."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.scale = 1.0  # factor from the sum of gradients to the gradient of the batch so far
        # a row with a non-zero weight, and its weight in the first round
        self._unit: tuple[tuple[int, ...], float] | None = None
        self._before: tuple[Tensor, Tensor] | None = None

    def extend(self, summary: Summary) -> tuple[Tensor, Tensor]:
        """Return (advantages, weights in the unit of the first round), each (N,) or (N, turns), of
        the groups so far. `summary` has the groups of the last call, then new ones.

        Raises `ValueError` if the last call's numbers change by more than a common factor."""
        advantages = self._algorithm.advantages(summary).float()
        weights = self._algorithm.token_weights(summary).float()
        spoke = summary.response_tokens > 0  # rows that have a gradient
        if self._unit is None:
            if len(found := (_first(weights) * spoke).nonzero()):
                row = int(found[0])
                self._unit = row, float(_first(weights)[row])
        else:
            row, first = self._unit
            self.scale = float(_first(weights)[row]) / first
            weights = (weights.double() / self.scale).float()
        if self._before is not None:
            self._check(self._before, (advantages, weights), spoke)
        self._before = advantages, weights
        return advantages, weights

    def _check(
        self, before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor], spoke: Tensor
    ) -> None:
        """Raise `ValueError` if numbers of the groups in `before` changed by more than rounding,
        in rows that have response tokens."""
        for what, old, new in zip(("advantages", "weights"), before, now, strict=True):
            if old.dim() < new.dim():  # no per-turn numbers in the first groups
                new = _first(new)
            kept = spoke[: len(old)]
            old, new = old[kept], new[tuple(slice(n) for n in old.shape)][kept]
            most = float(old.abs().max()) if old.numel() else 0.0
            if not torch.allclose(new, old, rtol=ROUNDING, atol=ROUNDING * most):
                raise ValueError(
                    f"{type(self._algorithm).__qualname__}: the {what} of groups that were trained "
                    "changed with the groups that came after them, by more than a common factor; "
                    "set trainer.stream=false"
                )


def _first(values: Tensor) -> Tensor:
    """Return each row's first value, (N,), from (N,) or (N, turns)."""
    return values if values.dim() == 1 else values[:, 0]
