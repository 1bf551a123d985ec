"""The checks of the trainer's speed on one device, for gpu_check.py: a step as a user gets it beside
one without fused operations and beside a plain transformers loop, and the two operations whose kind
the trainer chooses, attention over rows and the head.

All rates are useful operations a second: what a forward and a backward pass need, without what is
computed again.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tests.gpu import trainer
from tests.gpu.frame import Check, Report
from tests.gpu.model import folder
from tests.gpu.trainer import LIKE, Training, _flops, _shape, _work, batch, settings, spawn

GIB = 2**30
AIM = 0.3  # least share of the matrix product's rate
KERNELS = 25  # most kernels of a profile that are shown
# What a user of one card had before the launcher chose.
BEFORE = ("trainer.compile=false", "trainer.kernels=none", "trainer.gradient_checkpointing=true")
ROUNDS = 10  # timed repetitions of an operation
NEW_LENGTHS = 3  # lengths that an attention backend meets for the first time


class Steps(Training):
    stage: int  # ZeRO's
    trees: bool  # whether the trainer prepares for prefix trees, too; only rows are timed
    matrix: int  # side of the square matrices that are multiplied
    plain_rows: int  # rows of a micro-batch of the plain loop
    beside: bool  # whether the two others are timed, too
    profiled: bool  # whether the kernels of a micro-batch and of the optimizer are listed
    cudnn: bool  # whether SDPA takes cuDNN's attention where it can


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


GPU = Steps(
    **msgspec.structs.asdict(trainer.GPU),
    stage=2,
    trees=True,
    matrix=8192,
    plain_rows=8,
    beside=True,
    profiled=False,
    cudnn=False,
)
CPU = Steps(
    **msgspec.structs.asdict(trainer.CPU),
    stage=2,
    trees=True,
    matrix=256,
    plain_rows=3,
    beside=True,
    profiled=True,
    cudnn=False,
)


def _timed(work: Callable[[], object], cuda: bool, rounds: int = ROUNDS) -> float:
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


# --------------------------------------------------------------------------- a step


def speed(report: Report) -> None:
    shape, sizes = _shape(report), report.sizes
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
    report.share(
        "ROSE: useful operations",
        useful,
        "TFLOP/s",
        bound,
        AIM,
        "the matrix product's rate, recomputation not counted",
        "which kernels take the time: --set speed.profiled=true",
    )
    if report.gpus:
        report.figure(
            "ROSE: memory at the peak",
            ours["peak_gib"],
            "GiB",
            most=1.1 * ours["estimate_gib"],
            source=f"rose.launch.memory says {ours['estimate_gib']:.1f}",
            remedy="trainer.gradient_checkpointing=true until the estimate is right",
        )
    if not sizes.beside:
        return
    (before,) = spawn(report, _ours, 1, *BEFORE)
    (plain,) = spawn(report, _plain, 1)
    for name, other in (("unfused, recomputing", before), ("transformers", plain)):
        report.figure(f"{name}: step", other["step_s"], "s")
        other = other["step_s"]
        report.figure(f"{name}: useful operations", useful * ours["step_s"] / other, "TFLOP/s")
        report.figure(f"ROSE is as fast as {name}", other / ours["step_s"], "times")
    for name in ("grad_norm", "entropy"):
        report.figure(
            f"unfused, {name} differs by",
            abs(ours[name] - before[name]) / max(abs(before[name]), 1e-12),
            most=LIKE,
            remedy=f"{' '.join(BEFORE)} until it is mended: the default computes something else",
        )


def _ours(report: Report, rank: int, world: int, port: int, *overrides: str) -> dict:
    """Time steps of a trainer of one rank, with what the launcher chooses for it."""
    import torch
    import torch.nn.attention

    from rose import protocol
    from rose.comm.address import local_place
    from rose.launch import choices, memory
    from rose.observe.recorder import NullRecorder
    from rose.trainer.batching import Padded, plan_micro_batches
    from rose.trainer.trainer import Trainer

    sizes, shape = report.sizes, _shape(report)
    rows = batch(sizes, shape.vocab)
    config = settings(
        report,
        sizes,
        world,
        sizes.shared + sizes.own,
        len(rows),
        f"trainer.micro_batch_tokens={sizes.micro_batch_tokens}",
        f"trainer.zero_stage={sizes.stage}",
        f"trainer.share_prefixes={str(sizes.trees).lower()}",
        *overrides,
    )
    config, chosen = choices.made(config, shape)
    if sizes.cudnn:
        first = int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
        others = [kind for kind in torch._C._get_sdp_priority_order() if kind != first]
        torch._C._set_sdp_priority_order([first, *others])
    began = time.monotonic()
    made = Trainer(config, rank, world, local_place(port), folder(report), NullRecorder())
    cuda = made.device.type == "cuda"
    out: dict[str, Any] = {"start_s": time.monotonic() - began, "chosen": chosen}
    out["estimate_gib"] = memory.trainer(config, shape).total
    summary = protocol.BatchSummary(
        [t.reward for t in rows.values()],
        [int(t.group[1:]) for t in rows.values()],
        [t.response_tokens for t in rows.values()],
        [False] * len(rows),
    )
    packing = Padded([len(protocol.unpack_tokens(t.tokens)) for t in rows.values()])
    plan = plan_micro_batches(packing, world, sizes.micro_batch_tokens, 1)[rank]
    numbers = itertools.count(1)

    def step(plan: list[list[list[int]]]) -> dict[str, float]:
        mine = {row: rows[row] for micro in plan[0] for row in micro}
        return made.train(protocol.TrainStep(next(numbers), summary, plan, False, 1), mine)

    out |= step(plan) | _work(plan[0], packing, sizes)
    seconds = []
    for _ in range(sizes.timed):
        began = time.monotonic()
        metrics = step(plan)
        seconds.append((time.monotonic() - began, metrics["seconds_optimizer"]))
        report.say(f"a step took {seconds[-1][0]:.3f} s")
    out["step_s"], out["optimizer_s"] = min(seconds)
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    out["peak_gib"] = memory.RUNTIME_GIB + peak
    if sizes.profiled and not overrides:
        with _profiles(made.engine, report.say, cuda):
            step([[plan[0][0]]])
    made.close()
    side = torch.randn(sizes.matrix, sizes.matrix, dtype=torch.bfloat16, device=made.device)
    out["matrix"] = 2 * sizes.matrix**3 / _timed(lambda: side @ side, cuda)
    return out


@contextmanager
def _profiles(engine, say: Callable[[str], None], cuda: bool) -> Iterator[None]:
    """List the kernels by the device's time: those before the engine's update, and the update's."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    passes, optimizer = (profile(activities=kinds) for _ in range(2))
    update = engine.update

    def updated(*args):
        if cuda:
            torch.cuda.synchronize()
        passes.stop()
        with optimizer:
            found = update(*args)
            if cuda:
                torch.cuda.synchronize()
        return found

    engine.update = updated
    passes.start()
    try:
        yield
    finally:
        del engine.update
    for name, found in (("forward and backward", passes), ("optimizer", optimizer)):
        say(f"{name} of one micro-batch, by the device's time:\n{_listed(found, cuda)}")


def _listed(found, cuda: bool) -> str:
    """Return the kernels that take most time: milliseconds, share, calls, name."""
    device = "CUDA" if cuda else "CPU"
    took = "self_device_time_total" if cuda else "self_cpu_time_total"
    kernels = [e for e in found.key_averages() if e.device_type.name == device]
    total = sum(getattr(e, took) for e in kernels) or 1.0
    lines = [f"{total / 1e3:9.2f} ms in all, {sum(e.count for e in kernels)} kernels"]
    for e in sorted(kernels, key=lambda e: -getattr(e, took))[:KERNELS]:
        ms = getattr(e, took) / 1e3
        lines.append(f"{ms:9.2f} {1e5 * ms / total:5.1f}% {e.count:5} {e.key[:80]}")
    return "\n".join(lines)


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
        for t in batch(sizes, _shape(report).vocab).values()
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
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
        report.say(f"a step of the plain loop took {seconds[-1]:.3f} s")
    return {"step_s": min(seconds[1:])}


# --------------------------------------------------------------------------- attention


def attention(report: Report) -> None:
    """Time causal attention, forward and backward, by each way that torch has for it."""
    import torch

    sizes = report.sizes
    device, dtype = torch.device(report.setup.device), getattr(torch, sizes.dtype)
    width = sizes.heads * sizes.head_dim
    for count, length in sizes.rows:
        for name, attend in _ways(report).items():
            values = _heads(sizes, count, length, device, dtype)

            def passes(attend=attend, values=values) -> None:
                out = attend(*values)
                torch.autograd.grad(out, values, out)

            try:
                took = _timed(passes, report.gpus)
                began = time.perf_counter()
                for less in range(1, NEW_LENGTHS + 1):
                    values = _heads(sizes, count, length - less, device, dtype)
                    passes(values=values)
                    if report.gpus:
                        torch.cuda.synchronize()
                new = (time.perf_counter() - began) / NEW_LENGTHS
            except (RuntimeError, ImportError, TypeError) as error:
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
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )

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


# --------------------------------------------------------------------------- head


def head(report: Report) -> None:
    """Time the head's passes as eager operations and compiled, computing chunks again or keeping
    them, and compare each with float64."""
    import torch

    from rose.trainer import kernels
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
    recomputed = min(LOGIT_ELEMENTS_GPU, sizes.tokens * sizes.vocabulary // 3)
    for name, elements in (
        ("eager, recomputed", recomputed),
        ("compiled, recomputed", recomputed),
        ("compiled, kept", LOGIT_ELEMENTS_KEPT),
    ):
        made = Head(output, elements)
        made.temperature = 1.3
        if name.startswith("compiled"):
            kernels.compile_head(made)

        def passes(made=made):
            logprobs, entropy = made(hidden, targets)
            gradients = torch.autograd.grad((logprobs * weights).sum(), (hidden, output.weight))
            return logprobs.detach(), entropy, *gradients

        found = passes()
        if report.gpus:
            torch.cuda.reset_peak_memory_stats()
        took = _timed(passes, report.gpus)
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
    report.figure(f"{name}: mean entropy", float(found[1]) / len(hidden), "nats")


CHECKS = (
    Check(
        "speed",
        "a trainer's step as a user gets it, beside one without fused operations and a plain transformers loop",
        speed,
        {"cuda": GPU, "cpu": CPU},
        240.0,
        "trainer.compile=false; out of memory: trainer.gradient_checkpointing=true",
    ),
    Check(
        "attention",
        "causal attention over rows by each of torch's kernels, and what a new length costs",
        attention,
        {
            "cuda": Attended([[8, 2048], [2, 8192], [1, 32768]], 16, 8, 128, "bfloat16"),
            "cpu": Attended([[2, 32]], 4, 2, 16, "bfloat16"),
        },
        120.0,
        "the log has torch's reason",
        needs_model=False,
    ),
    Check(
        "head",
        "the head's passes, eager and compiled, beside float64",
        head,
        {"cuda": Logits(8192, 1024, 151936, "bfloat16"), "cpu": Logits(96, 32, 500, "bfloat16")},
        120.0,
        "trainer.compile=false",
        needs_model=False,
    ),
)
