"""Fused operations for the policy: torch.compile (`trainer.compile`), or Liger's Triton kernels
(`trainer.kernels=liger`).

Compiled are the decoder's layers, one by one, and a chunk of the head. Layers are alike, so that
one's code is all layers'; lengths are symbols in it, so that no row of another length is compiled
again. What is compiled apart, as torch has it, are a single row and several, a prefix tree, and
passes without a gradient; an adapter's reference once more. Under ZeRO-3 a layer's weights are
gathered whole, before it begins and before its backward pass, and its gradients reduced behind
that: DeepSpeed's hooks stay outside of what is compiled. So does attention over a prefix tree: its
table of blocks or stretches differs from tree to tree, and on GPUs it is compiled by itself.

Liger's are norms, rotary positions and the gated MLP's product. The head stays ours: Liger's
product with cross entropy works in the same way, in chunks that are computed again in the backward
pass, but gives no entropy, for which all logits would have to be computed once more.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rose.processes import cores
from rose.trainer import compilers
from rose.trainer.model import Policy
from rose.trainer.prefix_tree import PrefixTree, build_from_rows

SILU = ("silu", "swish")  # as a config.json calls it
MOST_FORMS = 16  # of one function that are compiled; more run uncompiled
MOST_WORKERS = 32  # processes that compile for one rank; torch's own limit, whatever the ranks
SLOW_S = 60.0  # after so long it is said once more what is being waited for
# shared and own tokens of the rows that everything is compiled for: 3 rows, 13 and 23 tokens
PROBE = ((7, 6), (7, 6), (7, 4))

Pass = Callable[[Tensor, Tensor, Tensor, PrefixTree | None], object]  # as `Policy.forward`


class CannotCompile(RuntimeError):
    """torch.compile fails here, or there is no compiler for what it writes."""


def share_cores(neighbours: int) -> None:
    """Whatever torch compiles here from now on is compiled by a rank's share of the cores of a host
    with so many ranks, unless the user has set torch's own variable. Before anything is."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # which few runs need

        config.compile_threads = min(MOST_WORKERS, max(1, cores() // neighbours))


def gather_whole_layers(policy: Policy) -> None:
    """Under ZeRO-3 a layer's weights are gathered before it begins, not each as it is reached:
    DeepSpeed's hooks within a layer would break its code into pieces. Before DeepSpeed gets the
    model. Raises as `compile_layers`."""
    from deepspeed.utils import set_z3_leaf_module

    for layer in _layers(policy):
        set_z3_leaf_module(layer, True)


def compile_layers(policy: Policy) -> None:
    """`policy`'s layers and head are compiled at their next call. Raises `CannotCompile` for a
    model without such layers."""
    layers = _layers(policy)
    # The variable TORCH_COMPILE_DISABLE is for the other processes of a run on CPUs.
    torch._dynamo.config.disable = False
    torch._dynamo.config.recompile_limit = MOST_FORMS
    torch.fx.experimental._config.use_duck_shape = (
        False  # lengths that are alike once aren't always
    )
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_explained)
    for layer in layers:  # not `layer.compile`: ZeRO-3's hooks stay outside
        layer.forward = torch.compile(layer.forward, dynamic=True)
    policy.head.chunk = torch.compile(policy.head.chunk, dynamic=True)
    policy.compiled = True
    policy.hf.get_input_embeddings().register_forward_hook(_like_other_layers)


def _layers(policy: Policy) -> nn.ModuleList:
    layers = getattr(policy.hf.base_model, "layers", None)
    if layers is None:
        raise CannotCompile(
            f"trainer.compile=True: a {type(policy.hf).__name__} has no base_model.layers, which "
            "are what is compiled; trainer.compile=false"
        )
    return layers


def _like_other_layers(module: nn.Module, inputs: object, states: Tensor) -> Tensor:
    """The first layer's input has a gradient where the others' have: below an adapter the
    embeddings are frozen, and transformers, which makes up for that with gradient checkpointing,
    does so without a gradient, too. It is more than a form less to compile: of a module whose input
    has none torch calls the backward hooks, by which ZeRO-3 takes a layer's gradients, before these
    are there."""
    return states.requires_grad_() if torch.is_grad_enabled() else states.detach()


def try_compiled(passes: Sequence[Pass], device: torch.device, trees: bool) -> None:
    """Compile all that steps need, by small rows, before the first step: each of `passes` on rows
    padded and alone, and in prefix trees where there are such. Raises `CannotCompile`."""
    if found := compilers.why_none(device.type == "cuda"):
        raise CannotCompile(found)
    with _announced(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for rows, tree in _probes(trees):
            inputs = torch.from_numpy(rows)
            mask = torch.ones(inputs.shape)
            try:
                for each in passes:
                    each(inputs, inputs, mask, tree)
            except Exception as error:  # of the compilers, which have no common base
                said = str(error).strip().partition("\n")[0]
                raise CannotCompile(
                    f"trainer.compile=True: {type(error).__name__}: {said}; trainer.compile=false"
                ) from error


def _explained(record: logging.LogRecord) -> bool:
    """Torch's warning that a function has too many forms says nothing of the run. A step goes on
    then: what it computes is the same."""
    if str(record.msg).startswith("torch._dynamo hit config."):
        print(
            f"trainer.compile=true: a function has {MOST_FORMS} compiled forms (torch's warning "
            "says which); further forms of it run uncompiled from now on, and slower; if steps "
            "take too long, trainer.compile=false",
            flush=True,
        )
    return True


def _probes(trees: bool) -> Iterator[tuple[np.ndarray, PrefixTree | None]]:
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


def _rotates_whole_heads(config: Any) -> bool:
    """Liger's kernel rotates all of a head's dimensions; some Phi-3 models rotate a part."""
    return (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) == 1


def use_liger(policy: Policy) -> None:
    """Liger's kernels in place of the model's own; one of `compilers.LIGER_TYPES`."""
    from liger_kernel.transformers import monkey_patch  # needs Triton

    config, module = policy.hf.config, sys.modules[type(policy.hf).__module__]
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    monkey_patch._apply_liger_kernel_to_instance(
        policy.hf,
        rope=_rotates_whole_heads(config),
        rms_norm=True,
        # of a mixture it would take the place of rose/trainer/mixture.py's experts; it is SiLU's,
        # and asks nobody whether the model's is another
        swiglu=not getattr(config, "num_experts", 0) and config.hidden_act in SILU,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
    # A reference is read after this. Liger's own classes, which it puts in the place of the model's
    # for that, have no biases, so those of the folder would be left out.
    vars(module).update(classes)
