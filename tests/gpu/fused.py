"""The checks of options that make a trainer's step cheaper, for gpu_check.py: compiled layers
(trainer.compile), Liger's kernels (trainer.kernels=liger), and a second copy of ZeRO-3's weights
within a node (trainer.hpz).

Each option is compared with a trainer without it, on the same batches.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from tests.gpu.frame import Report, check
from tests.gpu.trainer import LIKE, Batch, Training, spawn, started

# Least speed relative to the step without the option. Below it the option gains nothing.
NO_SLOWER = 0.95
HPZ = 2  # ranks in a group that holds a copy
EXACT = 1e-5  # largest relative difference in float32


class Steps(Training):
    ranks: int


GPU = Steps("bfloat16", 8, 8, 1024, 1024, 16384, True, 3, 1)
CPU = Steps("float32", 2, 3, 24, 24, 256, True, 1, 1)
GPU_HPZ = msgspec.structs.replace(GPU, ranks=4)
CPU_HPZ = msgspec.structs.replace(CPU, ranks=4)


def _compile(stage: int):
    """Return the check of compiled layers with this stage of ZeRO."""
    without, name = "trainer.compile=false", f"compiled, ZeRO-{stage}"
    what = f"torch.compile of layers and head, ZeRO-{stage}: the same as without, start, speed"
    words = "the log has the compiler's words. A compiler: apt-get install g++"

    def work(report: Report) -> None:
        _compare(report, name, "trainer.compile=true", without, stage)

    work.__name__ = f"compile_zero{stage}"
    return check(what, f"{without}; {words}", {"cuda": GPU, "cpu": CPU})(work)


compile_zero2, compile_zero3 = _compile(2), _compile(3)


@check(
    "Liger's norms, rotary positions and MLPs: the same gradients as without, speed",
    "trainer.kernels=none; pip install 'liger-kernel==0.8.*' beside the torch that is there",
    {"cuda": GPU, "cpu": CPU},
    on_cpu=False,
)
def liger(report: Report) -> None:
    for package in ("liger_kernel", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed: pip install 'rose-rl[liger]'")
    if not report.gpus:
        pytest.skip("Triton's kernels need a GPU")
    _compare(report, "Liger", "trainer.kernels=liger", "trainer.kernels=none")


@check(
    "ZeRO-3 with a second copy of the weights in groups of 2 ranks: the same gradients, speed",
    "trainer.hpz=null; a hang: NCCL_DEBUG=INFO",
    {"cuda": GPU_HPZ, "cpu": CPU_HPZ},
    400.0,
    least_gpus=4,
)
def hpz(report: Report) -> None:
    with_it, without = f"trainer.hpz={HPZ}", "trainer.hpz=null"
    _compare(report, "second copy", with_it, without, stage=3, floor=0.0)


def _compare(
    report: Report, name: str, override: str, without: str, stage: int = 2, floor: float = NO_SLOWER
) -> None:
    """Compare steps with `override` and without: the gradients must be the same, and the speed at
    least `floor` times that without."""
    ranks, zero = report.sizes.ranks, f"trainer.zero_stage={stage}"
    plain = spawn(report, _steps, ranks, zero)
    other = spawn(report, _steps, ranks, zero, override)
    report.figure(f"{name}: start", max(r["start_s"] for r in other), "s")
    most = EXACT if report.sizes.dtype == "float32" else LIKE
    for kind in ("rows", "trees"):
        exact, found = ([rank[kind] for rank in run] for run in (plain, other))
        remedy = f"{without} until it is mended: it computes something else here"
        for value, differs in _differences(exact, found).items():
            words = f"{name}, {kind}: {value} differs by"
            report.figure(words, differs, most=most, remedy=remedy)
        seconds = [max(min(r[kind]["seconds"]) for r in run) for run in (plain, other)]
        expected = {"least": floor if report.gpus else None}
        expected |= {"source": "the same batches in the same call"}
        expected |= {"remedy": f"{without}: it costs more than it saves here"}
        words = f"{name}, {kind}: speed of that without"
        report.figure(words, seconds[0] / seconds[1], "times", **expected)


def _differences(exact: list[dict], found: list[dict]) -> dict[str, float]:
    """Return how far the steps of one kind differ. Log-probabilities of all ranks: the mean
    difference in nats. Gradient: it is projected on random directions, one per parameter, and the
    length of the projections' difference is relative to that of the projections. Gradient norm and
    entropy: relative differences."""
    out = {
        name: abs(found[0][name] - exact[0][name]) / max(abs(exact[0][name]), 1e-12)
        for name in ("grad_norm", "entropy")
    }
    apart = [np.subtract(f["logprobs"], e["logprobs"]) for e, f in zip(exact, found, strict=True)]
    out["log-probability"] = float(np.mean(np.abs(np.concatenate(apart))))
    ours, theirs = (np.array(ranks[0]["projections"]) for ranks in (found, exact))
    out["gradient"] = float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-12))
    return out


@contextmanager
def _looked_at(made, out: dict) -> Iterator[None]:
    """Record a step in `out`: this rank's first log-probabilities, and a projection of each
    parameter's whole gradient on a random direction that is the same in every process."""
    import torch
    from deepspeed.utils import safe_get_full_grad

    update, logprobs = made.engine._update, []

    def projection(number: int, gradient) -> float:
        dice = torch.Generator(gradient.device).manual_seed(number)
        direction = torch.randn(gradient.shape, generator=dice, device=gradient.device)
        return float((gradient.float() * direction).sum())

    def updated(stepped):
        weights = made.engine.policy.named_weights()
        gradients = (safe_get_full_grad(p) for _, p in weights)
        out["projections"] = [projection(n, g) for n, g in enumerate(gradients)]
        return update(stepped)

    hook = made.engine.policy.register_forward_hook(
        lambda policy, given, found: logprobs.append(found[0].detach()) if not logprobs else None
    )
    made.engine._update = updated
    try:
        yield
    finally:
        hook.remove()
        del made.engine._update
    out["logprobs"] = logprobs[0].flatten().tolist()


def _steps(report: Report, rank: int, world: int, port: int, *overrides: str) -> dict:
    """Run and time steps on padded rows and on prefix trees of the same batch."""
    sizes, batch = report.sizes, Batch(report, rank, world)
    checkpointing = f"trainer.gradient_checkpointing={str(sizes.checkpointing).lower()}"
    config = batch.config(checkpointing, *overrides)
    began = time.monotonic()
    made = started(report, config, rank, world, port)
    out = {"start_s": time.monotonic() - began}
    for kind, trees in (("rows", False), ("trees", True)):
        out[kind] = {}
        _, plan = batch.packed(trees)
        with _looked_at(made, out[kind]):
            metrics, _ = batch.train(made, plan, trees)
        out[kind] |= {name: metrics[name] for name in ("grad_norm", "entropy")}
        timed = range(sizes.timed)
        out[kind]["seconds"] = [batch.train(made, plan, trees)[1] for _ in timed]
    made.close()
    return out
