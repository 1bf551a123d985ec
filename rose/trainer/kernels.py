"""Fused operations for the policy: torch.compile (`trainer.compile`), or Liger's Triton kernels
(`trainer.kernels=liger`).

Compiled are the decoder's layers, one by one, and a chunk of the head. Layers are alike, so that
one's code is all layers'; lengths are symbols in it, so that no row of another length is compiled
again. What is compiled apart, as torch has it, are a single row and several, a prefix tree, and
passes without a gradient. Attention over a prefix tree stays outside: its table of blocks or
stretches differs from tree to tree, and on GPUs it is compiled by itself.

Liger's are norms, rotary positions and the gated MLP's product. The head stays ours: Liger's
product with cross entropy works in the same way, in chunks that are computed again in the backward
pass, but gives no entropy, for which all logits would have to be computed once more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rose.trainer import compilers
from rose.trainer.model import Policy
from rose.trainer.prefix_tree import build_from_rows

MOST_FORMS = 16  # of one function that are compiled; more run uncompiled, with a warning of torch's
SLOW_S = 60.0  # after so long it is said once more what is being waited for
# shared and own tokens of the rows that everything is compiled for: 3 rows, 13 and 23 tokens
PROBE = ((7, 6), (7, 6), (7, 4))


class CannotCompile(RuntimeError):
    """torch.compile fails here, or there is no compiler for what it writes."""


def compile_layers(policy: Policy) -> None:
    """`policy`'s layers and head are compiled at their next call."""
    # The variable TORCH_COMPILE_DISABLE is for the other processes of a run on CPUs.
    torch._dynamo.config.disable = False
    torch._dynamo.config.recompile_limit = MOST_FORMS
    torch.fx.experimental._config.use_duck_shape = (
        False  # lengths that are alike once aren't always
    )
    for layer in policy.hf.base_model.layers:
        layer.compile(dynamic=True)
    policy.head.chunk = torch.compile(policy.head.chunk, dynamic=True)
    policy.compiled = True


def try_compiled(policy: Policy, device: torch.device, trees: bool, without_gradient: bool) -> None:
    """Compile all that steps need, by small rows, before the first step: padded and alone, and in
    prefix trees where there are such. No gradient is kept. Raises `CannotCompile`."""
    if found := compilers.why_none(device.type == "cuda"):
        raise CannotCompile(found)
    trained = [p for p in policy.parameters() if p.requires_grad]
    with _announced():
        for rows, tree in _probes(trees):
            inputs = torch.from_numpy(rows).to(device)
            mask = torch.ones(inputs.shape, device=device)
            known = tree and tree.to(device)
            try:
                logprobs, _ = policy(inputs, inputs, mask, known)
                torch.autograd.grad(logprobs.sum(), trained, allow_unused=True)
                if without_gradient:
                    with torch.no_grad():
                        policy(inputs, inputs, mask, known)
            except Exception as error:  # of the compilers, which have no common base
                first = str(error).strip().partition("\n")[0]
                raise CannotCompile(
                    f"trainer.compile=True: {type(error).__name__}: {first}; trainer.compile=false"
                ) from error


def _probes(trees: bool) -> Iterator[tuple[np.ndarray, object]]:
    """((B, T) int64, their tree or null)."""
    lengths = [sum(row) for row in PROBE]
    rows = np.zeros((len(PROBE), max(lengths)), np.int64)
    yield rows, None
    yield rows[:1], None
    if trees:
        yield rows, build_from_rows(*zip(*PROBE, strict=True))


@contextmanager
def _announced() -> Iterator[None]:
    began = time.monotonic()

    def say() -> None:
        print(
            f"still compiling after {SLOW_S:.0f} s (trainer.compile=true; the start may take "
            "cluster.start_timeout_s in all, and what is compiled is kept for the next one)",
            flush=True,
        )

    print("compiling the model's layers (trainer.compile=true)", flush=True)
    timer = threading.Timer(SLOW_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)


def use_liger(policy: Policy) -> None:
    """Liger's kernels in place of the model's own; one of `compilers.LIGER_TYPES`."""
    from liger_kernel.transformers import monkey_patch  # needs Triton

    monkey_patch._apply_liger_kernel_to_instance(
        policy.hf,
        rope=True,
        rms_norm=True,
        # of a mixture it would take the place of rose/trainer/mixture.py's experts
        swiglu=not getattr(policy.hf.config, "num_experts", 0),
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
