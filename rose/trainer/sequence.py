"""Long rows over several trainer ranks: DeepSpeed's Ulysses (arXiv 2309.14509), in the form that
ALST (arXiv 2506.13996) has for Hugging Face models.

N neighbouring ranks compute the same rows. In all layers but attention, each has an Nth of every
sequence. In attention, an all-to-all first gives it the whole sequence for an Nth of the heads, and
a second one reverses that. The ranks then gather the log-probabilities of all parts, so that each
computes the loss of whole rows, but differentiates it through its own part. The gradients of the N
ranks add up to the gradient of a rank that computes alone. ZeRO sums gradients over all ranks
anyway, so it need not know the group.

Not used: DeepSpeed's adapter of data loaders, and its tiled loss (the head has its own chunks). Not
supported: layers that attend to less than the whole context.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rose.comm.address import MEET_S, RendezvousError
from rose.trainer import tree_attention

# Our name in transformers' registry of attention functions. transformers makes no mask for it.
NAME = "rose_sequence"


class SequenceGroup:
    """The group of this rank and its neighbours, `size` in all. All ranks must create it together
    and connect within `MEET_S` seconds, else `RendezvousError`. After that, a collective that takes
    more than `timeout_s` seconds fails."""

    def __init__(self, size: int, device: torch.device, timeout_s: float):
        rank = torch.distributed.get_rank()
        self.size, self.index = size, rank % size
        try:
            self._group, _ = torch.distributed.new_subgroups(
                size, timeout=timedelta(seconds=MEET_S)
            )
            # NCCL connects at the first collective, which would otherwise be in a step.
            torch.distributed.all_reduce(torch.ones(1, device=device), group=self._group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except (RuntimeError, ValueError) as error:  # torch.distributed's errors
            first = rank - self.index
            raise RendezvousError(
                f"trainer rank {rank} on {socket.gethostname()}: ranks {first} to "
                f"{first + size - 1}, which share each row (trainer.sequence_parallel={size}), did "
                f"not connect within {MEET_S:g} s: {error}"
            ) from error
        limit = timedelta(seconds=timeout_s)
        torch.distributed.distributed_c10d._set_pg_timeout(limit, self._group)
        self._ulysses: dict[tuple[int, ...], nn.Module] = {}  # keys: arguments of `_make`
        AttentionInterface.register(NAME, self._attention)

    def part(self, *whole: Tensor) -> tuple[int, list[Tensor]]:
        """Cut this rank's part out of tensors (..., L). `size` must divide L, or the last values go
        to no rank. Returns (its begin in L, the parts)."""
        length = whole[0].shape[-1] // self.size
        begin = self.index * length
        return begin, [x[..., begin : begin + length].contiguous() for x in whole]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group. The gradient of this rank's values is that of the sum."""
        return _Sum.apply(values, self._group)

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention, with transformers' signature: query (B, heads, L / size, d), key and
        value (B, kv_heads, L / size, d), a mask of L tokens. Returns (B, L / size, heads * d)."""
        batch, heads, _, size = query.shape
        form = batch, heads, key.shape[1], size
        if form not in self._ulysses:
            self._ulysses[form] = self._make(*form)
        return self._ulysses[form](module, query, key, value, attention_mask, **kwargs)

    def _make(self, batch: int, heads: int, kv_heads: int, size: int) -> nn.Module:
        """Build DeepSpeed's attention module for these sizes."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        return UlyssesSPAttentionHF(
            attn=tree_attention.attention,
            batch_size=batch,
            attn_head_count=heads,
            attn_head_size=size,
            kv_head_count=kv_heads,
            num_hidden_layers=1,  # read only in a debugging mode of DeepSpeed
            process_group=self._group,
            seq_length_is_variable=True,
        )


class _Sum(torch.autograd.Function):
    """Sum over a group. The backward pass returns the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        total = values.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank differentiates the same loss, so a sum over ranks would count it `size` times.
        return gradient, None
