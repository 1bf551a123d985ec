"""How much memory each role needs on one device, item by item, in GiB. Pure.

P parameters, N trainer ranks, b bytes per element of the role's dtype, T = trainer.micro_batch_tokens.

Trainer (ZeRO, arXiv 1910.02054; a share is 1/N from the stage named on):
- weights: b P, shared from stage 3
- gradients: b P, shared from stage 2
- optimizer: Adam's two fp32 moments, 8 P, and, when b = 2, the fp32 master weights, 4 P; shared from stage 1;
  0 with offload_optimizer (it is then in host memory)
- gathered parameters: stage 3 only, at most 1e9 at a time (DeepSpeed's stage3_max_live_parameters)
- activations: with e = 4 h + 2 heads d + 2 kv_heads d + 4 i elements kept per token and layer (the two norms'
  inputs and outputs, q, k, v, attention output, the gated MLP's four; attention matrices are never stored):
  b T e layers, or with gradient_checkpointing b T (h layers + e) (arXiv 2205.05198, section 5, for this block)
- logits: T vocab (b + 8): as computed, then in fp32, and their gradient
Rollout (vLLM), per device of a tensor-parallel group of size tp:
- weights: b P / tp
- activations of max_batched_tokens: b T' (2 h + 3 i / tp) and fp32 logits of max_sequences / tp
- KV cache: kv_cache_gib, or what is left of gpu_memory_utilization; a key-value head is held by at least
  one device, so tp > kv_heads replicates
Left out: allocator fragmentation (a few percent) and NCCL buffers; RUNTIME_GIB stands for CUDA's context.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.config import Config, ModelShape

GIB = 2**30
RUNTIME_GIB = 1.0  # CUDA context and libraries, per process on a GPU
ASLEEP_GIB = 1.5  # that a process keeps on a GPU in the other's turn: CUDA's context, NCCL, an engine's graphs
LIVE_PARAMETERS = 10**9  # DeepSpeed's default stage3_max_live_parameters
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Estimate:
    """GiB on one device by item; `firm` is the part that no batch size changes."""

    items: dict[str, float]
    firm: float
    kv_tokens: int = 0  # rollout: tokens that the KV cache of one engine holds

    @property
    def total(self) -> float:
        return sum(self.items.values())


def trainer(c: Config, shape: ModelShape) -> Estimate:
    t, p, size = c.trainer, shape.parameters, BYTES[c.trainer.dtype]
    share = {stage: (t.ranks if t.zero_stage >= stage else 1) for stage in (1, 2, 3)}
    state = 8 * p + (4 * p if size == 2 else 0)
    items = {
        "weights": size * p / share[3],
        "gradients": size * p / share[2],
        "optimizer": 0.0 if t.offload_optimizer else state / share[1],
        "gathered parameters": size * min(p, LIVE_PARAMETERS) if t.zero_stage == 3 else 0.0,
        "activations": _activations(c, shape, size),
        "logits": float(t.micro_batch_tokens * shape.vocab * (size + 8)),
    }
    firm = (items["weights"] + items["gradients"] + items["optimizer"]) / GIB
    return Estimate(_gib(c, items), firm)


def rollout(c: Config, shape: ModelShape) -> Estimate:
    r, size = c.rollout, BYTES[c.model.dtype]
    tp = r.tensor_parallel
    work = size * r.max_batched_tokens * (2 * shape.hidden + 3 * shape.intermediate // tp)
    logits = 4 * r.max_sequences * shape.vocab // tp
    items = _gib(c, {"weights": size * shape.parameters / tp, "activations": float(work + logits)})
    firm = items["weights"]
    if r.kv_cache_gib is not None:
        cache = r.kv_cache_gib
    elif c.cluster.gpus and c.cluster.gpu_memory_gib:
        cache = max(0.0, c.cluster.gpu_memory_gib * r.gpu_memory_utilization - sum(items.values()))
    else:
        cache = 0.0  # unknown: no budget is named
    items["KV cache"] = cache
    per_token = shape.kv_bytes_per_token * size // 2 // shape.kv_heads * -(-shape.kv_heads // tp)
    return Estimate(items, firm, int(cache * GIB / per_token))


def waiting_gib(c: Config, trainer: Estimate, rollout: Estimate) -> tuple[float, float]:
    """Of all ranks together, in host memory where devices are shared: the trainer's states in the engines' turn, and
    the engines' weights in the trainer's; on CPUs these never move."""
    engines = c.rollout.workers * c.rollout.tensor_parallel if c.cluster.gpus else 0
    return c.trainer.ranks * trainer.firm, engines * rollout.items["weights"]


def _activations(c: Config, shape: ModelShape, size: int) -> float:
    elements = (4 * shape.hidden + 2 * shape.head_dim * (shape.heads + shape.kv_heads) + 4 * shape.intermediate)
    kept = shape.hidden * shape.layers + elements if c.trainer.gradient_checkpointing else elements * shape.layers
    return float(size * c.trainer.micro_batch_tokens * kept)


def _gib(c: Config, items: dict[str, float]) -> dict[str, float]:
    in_gib = {name: nbytes / GIB for name, nbytes in items.items() if nbytes}
    if c.cluster.gpus:
        in_gib["runtime"] = RUNTIME_GIB
    return in_gib
