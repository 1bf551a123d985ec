"""The check of the head for gpu_check.py: its passes by torch's operations and by its kernels.

Rates are useful operations a second: what a forward and a backward pass need, without what is
computed again.
"""

from __future__ import annotations

import msgspec

from tests.gpu.frame import GIB, Report, check, timed

ROUNDS = 10  # timed repetitions of both passes


class Logits(msgspec.Struct):
    tokens: int
    hidden: int
    vocabulary: int
    dtype: str


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
        took = timed(passes, device, ROUNDS)
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
