"""REINFORCE with the mean reward of the batch as its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rose.api import Summary, TokenBatch


@dataclass(frozen=True)
class Plain:
    scale: float = 1.0

    recompute_proximal: ClassVar[bool] = False
    corrects_mismatch: ClassVar[bool] = False

    def advantages(self, summary: Summary) -> Tensor:
        return self.scale * (summary.rewards - summary.rewards.mean())

    def token_weights(self, summary: Summary) -> Tensor:
        return torch.full_like(summary.rewards, 1 / summary.response_tokens.sum().clamp(min=1))

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -batch.advantages[:, None] * batch.logprobs * batch.mask, {}
