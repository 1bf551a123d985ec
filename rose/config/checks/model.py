"""Checks of a configuration against the model's shape."""

from __future__ import annotations

from rose.config.errors import ConfigError
from rose.config.model import ModelShape
from rose.config.tree import Config


def check_model(c: Config, shape: ModelShape) -> None:
    """Check the keys whose limits depend on the model's shape. Raises `ConfigError`."""
    lora = c.trainer.lora
    if c.trainer.router_replay and not shape.experts:
        raise ConfigError(
            f"trainer.router_replay=true: model {c.model.name} is dense and has no router; "
            "trainer.router_replay=false"
        )
    for target in lora.targets if lora else ():
        if lora.rank > (least := min(shape.projections[target])):
            raise ConfigError(
                f"trainer.lora.rank={lora.rank}: at most {least}, the smaller side of {target} in "
                f"model {c.model.name}"
            )
    _check_heads("trainer.sequence_parallel", c.trainer.sequence_parallel, c, shape)
    if c.rollout.replay is not None:
        return  # no engines, which the following checks are about
    tp = c.rollout.tensor_parallel
    _check_heads("rollout.tensor_parallel", tp, c, shape)
    by_expert = bool(shape.experts) and c.rollout.engine_args.get("enable_expert_parallel", False)
    width, what = shape.intermediate, "intermediate size"
    if shape.experts:
        width, what = shape.expert_intermediate, "intermediate size of an expert,"
    if by_expert:
        width, what = shape.experts, "number of experts (enable_expert_parallel),"
    if width % tp:
        raise ConfigError(
            f"rollout.tensor_parallel={tp}: must divide the {what} {width}, of model {c.model.name}"
        )
    if c.cluster.gpus == 0 and tp > 1:
        raise ConfigError(f"rollout.tensor_parallel={tp}: needs GPUs, and cluster.gpus=0")


def _check_heads(key: str, parts: int, c: Config, shape: ModelShape) -> None:
    """Raise `ConfigError` unless `parts` ranks can have equal shares of the attention heads."""
    if shape.heads % parts:
        raise ConfigError(
            f"{key}={parts}: must divide the {shape.heads} attention heads of model {c.model.name}"
        )
    if max(shape.kv_heads, parts) % min(shape.kv_heads, parts):
        raise ConfigError(
            f"{key}={parts}: must divide, or be a multiple of, the {shape.kv_heads} "
            f"key-value heads of model {c.model.name}"
        )
