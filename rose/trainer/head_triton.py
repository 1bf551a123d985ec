"""The head of `rose.trainer.model` on a GPU: Triton kernels read each logit once for a token's
log-probability and entropy, and once more to overwrite it by its gradient.

cuBLAS computes the logits. Let x be a token's logits over the temperature, Z = sum exp(x) and p =
exp(x - log Z). Then the log-probability is x[target] - log Z, and the entropy log Z - sum p x. The
gradient of the log-probability is (onehot - p) over the temperature. All sums are float32.
`rose.trainer.model.Head.forward` computes the same with torch's operations on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row that a program reads at once
WARPS = 8
LOWEST = -1e30  # start of a running maximum; -infinity would give NaN in differences


@triton.jit
def _sums(
    logits,
    targets,
    logprobs,
    entropies,
    log_sums,
    width,
    temperature,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's log-probability, entropy and log Z. Each lane keeps the `largest` of its
    logits, `total`, the sum of e = exp(x - largest), and `moment`, the sum of e (x - largest)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + lanes < width
        x = tl.load(logits + begin + lanes, mask=inside, other=LOWEST).to(tl.float32) / temperature
        higher = tl.maximum(largest, x)
        shrunk = tl.exp(largest - higher)
        own = tl.exp(x - higher)
        moment = shrunk * (moment + total * (largest - higher)) + own * (x - higher)
        total = shrunk * total + own
        largest = higher
    top = tl.max(largest, 0)
    shrunk = tl.exp(largest - top)
    moment = tl.sum(shrunk * (moment + total * (largest - top)), 0)
    total = tl.sum(shrunk * total, 0)
    log_total = tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - top - log_total)
    tl.store(entropies + row, log_total - moment / total)
    tl.store(log_sums + row, top + log_total)


@triton.jit
def _gradients(logits, targets, log_sums, gradients, width, temperature, BLOCK: tl.constexpr):
    """Replace a block of a row's logits by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * width
    x = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32) / temperature
    p = tl.exp(x - tl.load(log_sums + row))
    hit = tl.where(at == tl.load(targets + row), 1.0, 0.0)
    gradient = tl.load(gradients + row) / temperature * (hit - p)
    tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < width)


class LogProbabilities(torch.autograd.Function):
    """Log-probabilities of the targets (N,), float32, and the summed entropy, (), without gradient.
    Takes hidden (N, H), weight (V, H), bias (V,) or None, targets, temperature, rows of a chunk.

    A single chunk's logits are kept for the backward pass; those of several are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        numbers = torch.empty(3, count, device=hidden.device)
        logits = None
        for begin in range(0, count, chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            logits = None  # memory of the last chunk, which this one can use
            logits = F.linear(hidden[rows], weight, bias)
            _sums[(len(logits),)](
                logits,
                targets[rows],
                *(each[rows] for each in numbers),
                logits.shape[1],
                float(temperature),
                LOWEST,
                BLOCK,
                num_warps=WARPS,
            )
        kept = logits if count <= chunk_rows else None
        ctx.save_for_backward(hidden, weight, bias, targets, numbers[2], kept)
        ctx.temperature, ctx.chunk_rows = float(temperature), chunk_rows
        entropy = numbers[1].sum()
        ctx.mark_non_differentiable(entropy)
        return numbers[0], entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradients: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, kept = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(each) if needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        gradients = gradients.float().contiguous()
        for begin in range(0, len(hidden), ctx.chunk_rows):
            rows = slice(begin, begin + ctx.chunk_rows)
            given, logits = hidden[rows], None
            logits = F.linear(given, weight, bias) if kept is None else kept
            width = logits.shape[1]
            _gradients[(len(logits), triton.cdiv(width, BLOCK))](
                logits,
                targets[rows],
                log_sums[rows],
                gradients[rows],
                width,
                ctx.temperature,
                BLOCK,
                num_warps=WARPS,
            )
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight.addmm_(logits.T, given)
            if of_bias is not None:
                of_bias += logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None
