"""Choose `trainer.kernels` and `trainer.gradient_checkpointing` where a configuration leaves them
null, and give the reason.

Neither key changes results, apart from rounding. So the fastest value is chosen that no other key
excludes. Left out: measured speeds (docs/gpu.md), and torch.compile, which was faster than Liger's
kernels but takes minutes to start.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from rose.config import Config, ConfigError, ModelShape
from rose.launch import exclusions, memory
from rose.trainer import compilers

# Largest share of a GPU's memory that the estimate may take without recomputation. Measured peaks
# were up to 1.06 times the estimates (docs/results).
FITS = 0.85
# A GPU with less than this share of `cluster.gpu_memory_gib` is another model than configured.
# Drivers report a little less memory than makers do.
LEAST_MEMORY = 0.95


def made(c: Config, shape: ModelShape | None) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with both keys chosen, and a sentence on each choice. `shape`: None
    if the model isn't known yet."""
    reasons = []
    for key, choose in CHOICES.items():
        if getattr(c.trainer, key) is None:
            value, because = choose(c, shape)
            c = _with_key(c, key, value)
            given = value if isinstance(value, str) else json.dumps(value)
            reasons.append(f"trainer.{key}={given}: {because}")
    return c, tuple(reasons)


def _with_key(c: Config, key: str, value: Any) -> Config:
    """Return the configuration with another value of the trainer's `key`."""
    trainer = msgspec.structs.replace(c.trainer, **{key: value})
    return msgspec.structs.replace(c, trainer=trainer)


def _choose_kernels(c: Config, shape: ModelShape | None) -> tuple[str, str]:
    """Return (trainer.kernels, reason)."""
    kind = shape.type if shape is not None else ""
    if not c.cluster.gpus:
        return "none", "Triton's need GPUs"
    if other := exclusions.refusal(_with_key(c, "kernels", "liger"), shape, exclusions.KERNELS):
        return "none", f"Liger's are not used together with {other}"
    if kind not in compilers.LIGER_TYPES:
        return "none", f"Liger has none for models of the type {kind or 'unknown'}"
    if c.cluster.contained:
        return "none", "whether the container has Liger is not known; if so, trainer.kernels=liger"
    if package := compilers.missing():
        return "none", f"{package} isn't installed here: pip install 'rose-rl[liger]'"
    if c.cluster.kind == "local" and (lacking := compilers.no_compiler(on_gpu=True)):
        return "none", lacking
    return "liger", "fused norms, rotary positions and MLPs"


def _choose_checkpointing(c: Config, shape: ModelShape | None) -> tuple[bool, str]:
    """Return (trainer.gradient_checkpointing, reason)."""
    limit = c.cluster.gpu_memory_gib
    if c.trainer.offload_activations:
        return True, "trainer.offload_activations=true keeps the layers' inputs in host memory"
    if not c.cluster.gpus or limit is None or shape is None:
        return True, "how much memory there is, or how much the model needs, is not known"
    needed, limit = _without_checkpointing(c, shape, limit)
    fits = needed <= FITS * limit
    most = "" if fits else f", and at most {FITS:.0%} may be planned"
    return not fits, f"without it the trainer needs {needed:.1f} of {limit:g} GiB{most}"


def _without_checkpointing(c: Config, shape: ModelShape, card_gib: float) -> tuple[float, float]:
    """Return (GiB that the trainer needs without gradient checkpointing, GiB of a GPU with
    `card_gib` that it can have)."""
    without = _with_key(c, "gradient_checkpointing", False)
    needed = memory.trainer(without, shape).total
    return needed, card_gib - (memory.ASLEEP_GIB if c.trainer_sleeps else 0)


def check_card(c: Config, shape: ModelShape, trainer: int, found_gib: float) -> None:
    """Raise `ConfigError` if a trainer's GPU has less memory than `cluster.gpu_memory_gib`, and too
    little to train without gradient checkpointing."""
    given = c.cluster.gpu_memory_gib
    if c.trainer.gradient_checkpointing is not False or not given:
        return
    needed, limit = _without_checkpointing(c, shape, found_gib)
    if found_gib < LEAST_MEMORY * given and needed > FITS * limit:
        raise ConfigError(
            f"cluster.gpu_memory_gib={given:g}, but the GPU of trainer {trainer} has "
            f"{found_gib:.0f} GiB, and without trainer.gradient_checkpointing the trainer needs "
            f"{needed:.1f}: set cluster.gpu_memory_gib={found_gib:.0f}"
        )


# Kernels are chosen first, since the memory depends on them.
CHOICES = {"kernels": _choose_kernels, "gradient_checkpointing": _choose_checkpointing}
