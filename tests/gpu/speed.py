"""The checks of the trainer's speed on one device, for gpu_check.py: a step as a user gets it, beside
one without fused operations and beside a plain transformers loop.

All rates are useful operations a second: what a forward and a backward pass need, without what is
computed again.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tests.gpu import trainer
from tests.gpu.frame import GIB, Report, check, settle, timed
from tests.gpu.model import folder, shape_of
from tests.gpu.trainer import LIKE, Batch, Training, _flops, _work, joined, spawn

AIM = 0.3  # least share of the matrix product's rate
ROUNDS = 10  # products of matrices that are timed
# What the launcher would choose without Liger and without memory.
BEFORE = ("trainer.kernels=none", "trainer.gradient_checkpointing=true")


class Steps(Training):
    matrix: int  # side of the square matrices that are multiplied
    plain_rows: int  # rows of a micro-batch of the plain loop
    stage: int = 2  # ZeRO's
    trees: bool = True  # a step of prefix trees, too
    beside: bool = True  # timing of the two others, too


GPU = Steps(**msgspec.structs.asdict(trainer.GPU), matrix=8192, plain_rows=8)
CPU = Steps(**msgspec.structs.asdict(trainer.CPU), matrix=256, plain_rows=3)


@check(
    "a trainer's step as a user gets it, beside one without fused operations and a plain transformers loop",
    "out of memory: trainer.gradient_checkpointing=true",
    {"cuda": GPU, "cpu": CPU},
)
def speed(report: Report) -> None:
    shape, sizes = shape_of(report), report.sizes
    (ours,) = spawn(report, _ours, 1)
    rate = ours["matrix"] / 1e12
    report.figure("bfloat16 matrix product", rate, "TFLOP/s")
    for choice in ours["chosen"]:
        report.say(choice)
    report.figure("ROSE: start", ours["start_s"], "s")
    report.figure("ROSE: optimizer", ours["optimizer_s"], "s")
    bound = rate if report.gpus else None
    useful = _flops(shape, [ours]) / ours["step_s"] / 1e12
    report.figure("ROSE: step", ours["step_s"], "s")
    report.figure("ROSE: computed tokens", ours["tokens"] / ours["step_s"], "token/s")
    words = "the matrix product's rate, recomputation not counted"
    report.share("ROSE: useful operations", useful, "TFLOP/s", bound, AIM, words)
    if sizes.trees:
        report.figure("ROSE: step of prefix trees", ours["trees_s"], "s")
        apart = abs(ours["of_trees"] / ours["grad_norm"] - 1)
        remedy = "rows attend by cuDNN's kernels, trees by flex attention: one of them is wrong"
        report.figure("trees and rows, grad_norm differs by", apart, most=LIKE, remedy=remedy)
    if report.gpus:
        peak, estimate = ours["peak_gib"], ours["estimate_gib"]
        expected = {"most": 1.1 * estimate, "source": f"rose.launch.memory says {estimate:.1f}"}
        remedy = "trainer.gradient_checkpointing=true until the estimate is right"
        report.figure("ROSE: memory at the peak", peak, "GiB", **expected, remedy=remedy)
    if not sizes.beside:
        return
    (before,) = spawn(report, _ours, 1, *BEFORE)
    (plain,) = spawn(report, _plain, 1)
    for name, other in (("unfused, recomputing", before), ("transformers", plain)):
        report.figure(f"{name}: step", other["step_s"], "s")
        other = other["step_s"]
        report.figure(f"{name}: useful operations", useful * ours["step_s"] / other, "TFLOP/s")
        report.figure(f"ROSE is as fast as {name}", other / ours["step_s"], "times")
    remedy = f"{' '.join(BEFORE)} until it is mended: the default computes something else"
    for name in ("grad_norm", "entropy"):
        apart = abs(ours[name] - before[name]) / max(abs(before[name]), 1e-12)
        report.figure(f"unfused, {name} differs by", apart, most=LIKE, remedy=remedy)


def _ours(report: Report, rank: int, world: int, port: int, *overrides: str) -> dict:
    """Time steps of a trainer of one rank, with what the launcher chooses for it."""
    import torch

    from rose.launch import choices, memory

    sizes, shape, batch = report.sizes, shape_of(report), Batch(report, rank, world)
    share = f"trainer.share_prefixes={str(sizes.trees).lower()}"
    config = batch.config(f"trainer.zero_stage={sizes.stage}", share, *overrides)
    config, chosen = choices.made(config, shape)
    began = time.monotonic()
    made = joined(report, config, rank, world, port)
    cuda = made.device.type == "cuda"
    out: dict[str, Any] = {"start_s": time.monotonic() - began, "chosen": chosen}
    out["estimate_gib"] = memory.trainer(config, shape).total
    packing, plan = batch.packed()
    out |= batch.train(made, plan)[0] | _work(plan[0], packing, sizes)
    steps = [batch.train(made, plan) for _ in range(sizes.timed)]
    seconds = [(took, metrics["seconds_optimizer"]) for metrics, took in steps]
    out["step_s"], out["optimizer_s"] = min(seconds)
    if sizes.trees:
        _, shared = batch.packed(trees=True)
        out["of_trees"] = batch.train(made, shared, trees=True)[0]["grad_norm"]
        out["trees_s"] = batch.train(made, shared, trees=True)[1]
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    out["peak_gib"] = memory.RUNTIME_GIB + peak
    made.close()
    side = torch.randn(sizes.matrix, sizes.matrix, dtype=torch.bfloat16, device=made.device)
    out["matrix"] = 2 * sizes.matrix**3 / timed(lambda: side @ side, made.device, ROUNDS)
    return out


def _plain(report: Report, rank: int, world: int, port: int) -> dict:
    """Time steps of a loop as transformers' users write it: weights and AdamW in bfloat16, SDPA,
    gradient checkpointing, and the loss of the model from all logits of a micro-batch."""
    import torch
    from transformers import AutoModelForCausalLM

    from rose import protocol

    sizes, device = report.sizes, torch.device(report.setup.device)
    model = AutoModelForCausalLM.from_pretrained(
        folder(report), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = [
        torch.from_numpy(protocol.unpack_tokens(t.tokens).astype("int64"))
        for t in trainer.random_rows(sizes, shape_of(report).vocab).values()
    ]
    seconds = []
    for _ in range(sizes.timed + 1):
        began = time.monotonic()
        for micro in torch.stack(rows).split(sizes.plain_rows):
            tokens = micro.to(device)
            labels = tokens.clone()
            labels[:, : sizes.shared] = -100  # the prompt
            loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
            (loss * len(micro) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        settle(device)
        seconds.append(time.monotonic() - began)
        report.say(f"a step of the plain loop took {seconds[-1]:.3f} s")
    return {"step_s": min(seconds[1:])}
