"""The cost of a token and of a pair of tokens in a layer, measured on the training device.

Matrix products and attention kernels of the model's own sizes are timed, forward and backward, on
random numbers. Norms, rotary positions and activations, some tenths of a token's cost, are left
out. So prefix trees, which save tokens, seem a little less useful than they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rose.config import ModelShape
from rose.protocol import Costs
from rose.trainer import tree_attention
from rose.trainer.batching import PARTLY, flops
from rose.trainer.prefix_tree import build_from_rows

TOKENS = 4096  # most tokens of a measurement; enough to fill a GPU
ROUNDS = 4  # repetitions of a measurement; the first is not counted
BRANCHES = 6  # rows of the measured tree, which share half of its tokens, like a group's prompt


def measure(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    flex: bool,
    recomputed: bool,
) -> Costs:
    """Measure `Costs` in seconds, for micro-batches of `tokens`. `flex`: trees use flex attention,
    else a dense mask. With `recomputed` (gradient checkpointing) layers run forward twice. It takes
    about a second and some hundred MiB on a GPU. The global random generator stays as it was."""
    numbers = torch.Generator(device).manual_seed(0)

    def seconds(function: Callable[..., Tensor], *sizes: tuple[int, ...]) -> float:
        inputs = [
            torch.randn(size, generator=numbers, device=device).to(dtype).requires_grad_()
            for size in sizes
        ]
        rounds = [_seconds(function, inputs, recomputed, device) for _ in range(ROUNDS)]
        return statistics.median(rounds[1:])

    length = max(4 * BRANCHES, min(tokens, TOKENS))
    sizes = (length, shape.hidden), (shape.mlp_width, shape.hidden)
    product = seconds(nn.functional.linear, *sizes)
    part = length // 2
    plain = build_from_rows([part] * BRANCHES, [part // BRANCHES] * BRANCHES).to(device)
    tree, mask = tree_attention.attended(plain, flex)
    causal = seconds(_attention_under(shape, None), *_qkv_shapes(shape, length))
    masked = seconds(_attention_under(shape, mask), *_qkv_shapes(shape, len(tree.tokens)))
    size = len(plain.tokens)
    pairs = float((plain.depths + 1 + PARTLY).sum()) if flex else float(size**2)
    per_flop = product / (2.0 * length * shape.hidden * shape.mlp_width)
    return Costs(flops(shape).token * per_flop, causal / (length**2 / 2), masked / pairs, not flex)


def _qkv_shapes(shape: ModelShape, length: int) -> list[tuple[int, ...]]:
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [(1, count, length, shape.head_dim) for count in counts]


def _attention_under(shape: ModelShape, mask: object) -> Callable[..., Tensor]:
    """Return the model's attention with `mask`, as a function of query, key and value."""
    layer = nn.Module()
    layer.num_key_value_groups = shape.heads // shape.kv_heads
    return lambda query, key, value: tree_attention.attention(layer, query, key, value, mask)[0]


def _seconds(
    function: Callable[..., Tensor], inputs: list[Tensor], recomputed: bool, device: torch.device
) -> float:
    """Time one forward and backward pass, in seconds."""
    _synchronize(device)
    began = time.perf_counter()
    values = checkpoint(function, *inputs, use_reentrant=False) if recomputed else function(*inputs)
    values.backward(torch.ones_like(values))
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
