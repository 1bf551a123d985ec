"""The checks of two operations whose kind the trainer chooses, for gpu_check.py: attention over rows
and the head.

Rates are useful operations a second: what a forward and a backward pass need, without what is
computed again.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable

import msgspec

from tests.gpu.frame import Report, check

GIB = 2**30
ROUNDS = 10  # timed repetitions of an operation
NEW_LENGTHS = 3  # lengths that an attention backend meets for the first time


class Attended(msgspec.Struct):
    rows: list[list[int]]  # (rows, their length)
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str


class Logits(msgspec.Struct):
    tokens: int
    hidden: int
    vocabulary: int
    dtype: str


def timed(work: Callable[[], object], cuda: bool, rounds: int = ROUNDS) -> float:
    """Return the mean seconds of a call, after two that aren't counted."""
    import torch

    for _ in range(2):
        work()
    if not cuda:
        began = time.perf_counter()
        for _ in range(rounds):
            work()
        return (time.perf_counter() - began) / rounds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / rounds


@check(
    "causal attention over rows by each of torch's kernels, and what a new length costs",
    "the log has torch's reason",
    {
        "cuda": Attended([[8, 2048], [2, 8192], [1, 32768]], 16, 8, 128, "bfloat16"),
        "cpu": Attended([[2, 32]], 4, 2, 16, "bfloat16"),
    },
    120.0,
    needs_model=False,
)
def attention(report: Report) -> None:
    """Time causal attention, forward and backward, by each way that torch has for it."""
    import torch

    from rose.trainer import tree_attention

    sizes = report.sizes
    device, dtype = torch.device(report.setup.device), getattr(torch, sizes.dtype)
    width = sizes.heads * sizes.head_dim
    if report.gpus:
        form = (sizes.heads, sizes.kv_heads, sizes.head_dim, dtype)
        works = tree_attention.cudnn_works(torch.device("cuda", 0), *form)
        report.figure("cuDNN's values and gradients are torch's", works)
    for count, length in sizes.rows:
        for name, attend in _ways(report).items():
            values = _heads(sizes, count, length, device, dtype)

            def passes(attend=attend, values=values) -> None:
                out = attend(*values)
                torch.autograd.grad(out, values, out)

            try:
                took = timed(passes, report.gpus)
                began = time.perf_counter()
                for less in range(1, NEW_LENGTHS + 1):
                    values = _heads(sizes, count, length - less, device, dtype)
                    passes(values=values)
                    if report.gpus:
                        torch.cuda.synchronize()
                new = (time.perf_counter() - began) / NEW_LENGTHS
            except (RuntimeError, ImportError, TypeError, ValueError) as error:
                report.say(f"{name}, {count} x {length}: {str(error).strip().splitlines()[0]}")
                continue
            useful = 12.0 * count * length**2 / 2 * width
            where = f"{name}, {count} rows of {length:,}"
            report.figure(where, useful / took / 1e12, "TFLOP/s")
            report.figure(f"{where}: a new length takes", 1e3 * (new - took), "ms more")


def _heads(sizes: Attended, rows: int, length: int, device, dtype) -> list:
    """Return queries, keys and values as a layer's, (rows, heads, length, head_dim)."""
    import torch

    shapes = ((rows, length, n, sizes.head_dim) for n in (sizes.heads, *[sizes.kv_heads] * 2))
    made = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return [each.transpose(1, 2).requires_grad_() for each in made]


def _ways(report: Report) -> dict[str, Callable]:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: SDPBackend) -> Callable:
        def attend(query, key, value):
            causal = {"is_causal": True, "enable_gqa": True}
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, **causal)

        return attend

    def in_one_sequence(query, key, value):
        from torch.nn.attention.varlen import varlen_attn

        rows, _, length, _ = query.shape
        ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
        flat = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        takes = inspect.signature(varlen_attn).parameters
        causal = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
        grouped = {"enable_gqa": True} if "enable_gqa" in takes else {}
        out = varlen_attn(*flat, ends, ends, length, length, **causal, **grouped)
        return out.unflatten(0, (rows, length)).transpose(1, 2)

    if not report.gpus:
        return {"math": by(SDPBackend.MATH)}
    return {
        "flash": by(SDPBackend.FLASH_ATTENTION),
        "cuDNN": by(SDPBackend.CUDNN_ATTENTION),
        "varlen": in_one_sequence,
    }


@check(
    "the head's passes by torch's operations and by its kernels, beside float64",
    "a head that is wrong: report it with the log",
    {"cuda": Logits(8192, 1024, 151936, "bfloat16"), "cpu": Logits(96, 32, 500, "bfloat16")},
    120.0,
    needs_model=False,
)
def head(report: Report) -> None:
    """Time the head's passes by torch's operations and by its kernels, computing chunks again or
    keeping them, and compare each with float64."""
    import torch

    from rose.trainer.batching import LOGIT_ELEMENTS_GPU, LOGIT_ELEMENTS_KEPT
    from rose.trainer.model import Head

    sizes = report.sizes
    device, dtype = torch.device(report.setup.device), getattr(torch, sizes.dtype)
    torch.manual_seed(0)
    output = torch.nn.Linear(sizes.hidden, sizes.vocabulary, False, device, dtype)
    torch.nn.init.normal_(output.weight, std=2 * sizes.hidden**-0.5)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype)
    hidden.requires_grad_()
    targets = torch.randint(0, sizes.vocabulary, (sizes.tokens,), device=device)
    weights = torch.randn(sizes.tokens, device=device)
    small, half = 2**28, min(LOGIT_ELEMENTS_GPU, sizes.tokens * sizes.vocabulary // 2)
    ways = [("torch, recomputed", small, "plain")]
    if report.gpus:
        ways += [("Triton, recomputed", half, "fused"), ("Triton", LOGIT_ELEMENTS_KEPT, "fused")]
    for name, elements, way in ways:
        made = Head(output, elements)
        made.temperature = 1.3
        compute = getattr(made, way)

        def passes(compute=compute):
            logprobs, entropy = compute(hidden, targets)
            gradients = torch.autograd.grad((logprobs * weights).sum(), (hidden, output.weight))
            return logprobs.detach(), entropy, *gradients

        found = passes()
        if report.gpus:
            torch.cuda.reset_peak_memory_stats()
        took = timed(passes, report.gpus)
        useful = 6.0 * sizes.tokens * sizes.hidden * sizes.vocabulary
        report.figure(f"{name}: both passes", 1e3 * took, "ms")
        report.figure(f"{name}: useful operations", useful / took / 1e12, "TFLOP/s")
        if report.gpus:
            peak = torch.cuda.max_memory_allocated() / GIB
            report.figure(f"{name}: memory at the peak", peak, "GiB")
        _compare(report, name, found, output.weight, hidden, targets, weights)


def _compare(report: Report, name: str, found, weight, hidden, targets, weights) -> None:
    """Compare a sample of rows with float64, from logits as the product rounds them."""
    import torch

    rows = slice(0, 64)
    given = hidden[rows].detach()
    logits = (given @ weight.T).double() / 1.3
    logp = logits.log_softmax(-1)
    logprobs = logp.gather(1, targets[rows, None])[:, 0]
    of_logits = torch.nn.functional.one_hot(targets[rows], len(weight)) - logp.exp()
    gradient = (of_logits * weights[rows, None] / 1.3) @ weight.double()
    apart = (found[0][rows] - logprobs).abs().max()
    report.figure(f"{name}: log-probability off by", float(apart), "nats", most=1e-4)
    apart = (found[2][rows].double() - gradient).norm() / gradient.norm()
    report.figure(f"{name}: gradient off by", float(apart), most=0.01)
    # of one token of the vocabulary, over all rows
    of_weight = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for begin in range(0, len(hidden), 1024):
        part = slice(begin, begin + 1024)
        scaled = (hidden[part].detach() @ weight.T).float() / 1.3
        p = (scaled[:, 7] - scaled.logsumexp(-1)).exp()
        of_token = ((targets[part] == 7).float() - p) * weights[part] / 1.3
        of_weight += of_token.double() @ hidden[part].detach().double()
    apart = (found[3][7].double() - of_weight).norm() / of_weight.norm()
    report.figure(f"{name}: gradient of a row of the matrix off by", float(apart), most=0.02)
    report.figure(f"{name}: mean entropy", float(found[1]) / len(hidden), "nats")
