"""Fused operations for the policy: torch.compile (`trainer.compile`), or Liger's Triton kernels
(`trainer.kernels=liger`).

torch.compile compiles the decoder's layers, one by one, and on a CPU the head's chunks. All layers
share the same compiled code. Lengths are symbols in it, so rows of another length need no new
compilation. torch compiles separately for a single row, several rows, a prefix tree, passes without
a gradient, and an adapter's reference. Two things stay outside of the compiled code:

1. DeepSpeed's hooks. Under ZeRO-3 they gather all weights of a layer before its forward and its
   backward pass, and reduce the gradients after its backward pass.
2. Attention over a prefix tree, whose table of blocks or stretches differs from tree to tree. On
   GPUs it is compiled by itself.

Liger has kernels for norms, rotary positions and the gated MLP's product. The head has its own
kernels (rose/trainer/head_triton.py), since Liger's fused cross entropy returns no entropy: all
logits would have to be computed a second time.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rose.processes import cores
from rose.trainer import compilers
from rose.trainer.model import Policy
from rose.trainer.prefix_tree import PrefixTree, build_from_rows

SILU = ("silu", "swish")  # names of SiLU in a config.json
MOST_FORMS = 16  # most compiled forms of one function; further ones run uncompiled
MOST_WORKERS = 32  # most compiler processes of a rank; torch's own limit
SLOW_S = 60.0  # seconds of compilation until a message says that it is still running
# (shared, own) tokens of the 3 rows that are computed at the start, for compilation
PROBE = ((7, 6), (7, 6), (7, 4))

Pass = Callable[[Tensor, Tensor, Tensor, PrefixTree | None], object]  # signature of a forward pass


class CannotCompile(RuntimeError):
    """torch.compile fails here, or this host has no compiler for the code that it generates."""


def share_cores(neighbours: int) -> None:
    """Limit torch's compilation to a rank's share of the cores of a host with `neighbours` ranks,
    unless the user has set torch's own variable. Call it before torch compiles anything."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # a slow import that few runs need

        config.compile_threads = min(MOST_WORKERS, max(1, cores() // neighbours))


def gather_whole_layers(policy: Policy) -> None:
    """Make ZeRO-3 gather all weights of a layer before the layer begins. By default DeepSpeed's
    hooks gather each weight where it is used, and would break the layer's compiled code into
    pieces. Call it before DeepSpeed gets the model. Raises what `compile_layers` raises."""
    from deepspeed.utils import set_z3_leaf_module

    for layer in _layers(policy):
        set_z3_leaf_module(layer, True)


def compile_layers(policy: Policy) -> None:
    """Make torch compile `policy`'s layers and head at their next call. Raises `CannotCompile` for
    a model without `base_model.layers`."""
    layers = _layers(policy)
    # A run on CPUs sets TORCH_COMPILE_DISABLE for all its processes; undo it in the trainer.
    torch._dynamo.config.disable = False
    torch._dynamo.config.recompile_limit = MOST_FORMS
    # By default torch assumes that lengths equal in one call are equal in all calls.
    torch.fx.experimental._config.use_duck_shape = False
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_explain_limit)
    # `layer.compile` would compile ZeRO-3's hooks, too.
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    policy.head.chunk = torch.compile(policy.head.chunk, dynamic=True)
    policy.compiled = True
    policy.hf.get_input_embeddings().register_forward_hook(_match_other_layers)


def _layers(policy: Policy) -> nn.ModuleList:
    """Return the decoder's layers. Raises `CannotCompile` if they aren't `base_model.layers`."""
    layers = getattr(policy.hf.base_model, "layers", None)
    if layers is None:
        raise CannotCompile(
            f"trainer.compile=True: a {type(policy.hf).__name__} has no base_model.layers, which "
            "trainer.compile compiles; set trainer.compile=false"
        )
    return layers


def _match_other_layers(module: nn.Module, inputs: object, states: Tensor) -> Tensor:
    """Hook that makes the first layer's input require a gradient exactly if other layers' do.

    Below an adapter the embeddings are frozen, so their output requires no gradient. With gradient
    checkpointing transformers makes it require one, but in passes without a gradient, too. Equal
    inputs save a compiled form. And ZeRO-3 reads a layer's gradients in torch's backward hooks. If
    a layer's input requires no gradient, torch calls them before the gradients exist."""
    return states.requires_grad_() if torch.is_grad_enabled() else states.detach()


def try_compiled(passes: Sequence[Pass], device: torch.device, trees: bool) -> None:
    """Compile all that steps need before the first step. For that, run each of `passes` on small
    rows: several padded rows, one row and, with `trees`, a prefix tree. Raises `CannotCompile`."""
    if found := compilers.why_not_compile(device.type == "cuda"):
        raise CannotCompile(found)
    with _announced(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for rows, tree in _probes(trees):
            inputs = torch.from_numpy(rows)
            mask = torch.ones(inputs.shape)
            try:
                for each in passes:
                    each(inputs, inputs, mask, tree)
            except Exception as error:  # the compilers' errors, which have no common base class
                said = str(error).strip().partition("\n")[0]
                raise CannotCompile(
                    f"trainer.compile=True: {type(error).__name__}: {said}; trainer.compile=false"
                ) from error


def _explain_limit(record: logging.LogRecord) -> bool:
    """Logging filter: at torch's warning that a function has too many forms, first print what it
    means for the run. Results stay the same."""
    if str(record.msg).startswith("torch._dynamo hit config."):
        print(
            f"trainer.compile=true: a function has {MOST_FORMS} compiled forms (torch's warning "
            "says which); further forms of it run uncompiled from now on, and slower; if steps "
            "take too long, trainer.compile=false",
            flush=True,
        )
    return True


def _probes(trees: bool) -> Iterator[tuple[np.ndarray, PrefixTree | None]]:
    """Yield the rows that `try_compiled` computes, (B, T) int64, and their prefix tree or None."""
    lengths = [sum(row) for row in PROBE]
    rows = np.zeros((len(PROBE), max(lengths)), np.int64)
    yield rows, None
    yield rows[:1], None
    if trees:
        yield rows, build_from_rows(*zip(*PROBE, strict=True))


@contextmanager
def _announced() -> Iterator[None]:
    """Print when compilation begins, when it has taken `SLOW_S` seconds, and when it ends."""
    began = time.monotonic()

    def say() -> None:
        print(
            f"still compiling after {SLOW_S:.0f} s (trainer.compile=true; the start may take "
            "cluster.start_timeout_s in all, and compiled code is kept for the next start)",
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
    """Replace the model's kernels by Liger's. Its type must be one of `compilers.LIGER_TYPES`."""
    from liger_kernel.transformers import monkey_patch  # needs Triton

    config, module = policy.hf.config, sys.modules[type(policy.hf).__module__]
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    rope = getattr(config, "rope_parameters", None) or {}
    monkey_patch._apply_liger_kernel_to_instance(
        policy.hf,
        # Liger's kernel rotates all of a head's dimensions; some Phi-3 models rotate a part.
        rope=rope.get("partial_rotary_factor", 1.0) == 1,
        rms_norm=True,
        # In a mixture, Liger's MLP would replace the experts of rose/trainer/mixture.py. And it
        # computes SiLU even if the model has another activation.
        swiglu=not getattr(config, "num_experts", 0) and config.hidden_act in SILU,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
    # Liger also replaces the classes in the model's module by classes without biases. A reference
    # that is loaded later would lose the folder's biases, so restore the classes.
    vars(module).update(classes)
