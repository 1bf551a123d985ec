"""The types of `algorithm`, `trainer` and `transfer`."""

from __future__ import annotations

from typing import Any, Literal

from rose.config.common import Count, Fraction, Natural, NotNegative, Positive, Section
from rose.config.model import ModelShape


class Algorithm(Section):
    """`name` is one of `rose.trainer.algorithms.algorithms()`; `args` are its constructor's."""

    name: str
    args: dict[str, Any]
    # importance sampling between engine and trainer (rose/trainer/importance.py); null: off
    importance_cap: Positive | None
    dynamic_sampling: bool  # drop groups whose rewards are all equal and sample others (DAPO)
    kl_coef: NotNegative  # coefficient of the KL penalty to the model folder's weights
    # Algorithms of other packages may leave out the keys below.
    # true: the penalty has the gradient of KL(policy || reference)
    kl_correction: bool = True
    # importance weights below this or above the cap become 0; null: weights above become the cap
    importance_floor: NotNegative | None = None
    importance_level: Literal["token", "sequence"] = "token"


class Optimizer(Section):
    lr: Positive
    betas: list[float]
    eps: Positive
    weight_decay: NotNegative
    warmup_steps: Natural  # updates
    grad_clip: Positive
    # learning rate from warm-up to the last update of trainer.steps (rose/trainer/schedule.py)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_share: Fraction = 0.0  # share of lr at the end of linear and cosine


# Each projection of a layer, in vLLM's order, and vLLM's layer that fuses it with others. For LoRA,
# vLLM wraps the fused layer as a whole.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}


SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # MaxLoRARanks of vLLM 0.32


class Lora(Section):
    """An adapter (arXiv 2106.09685). Each matrix W of the `targets` of all layers gets A (rank,
    columns) and B (rows, rank). W x becomes W x + scale B A x. W is frozen."""

    rank: Count
    alpha: Positive
    targets: list[str]  # keys of `FUSED`

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def slot_rank(self) -> int:
        """Rank for which an engine allocates the adapter: `rank`, rounded up to one of
        `SLOT_RANKS`. rose/config/checks rejects a larger rank."""
        return next(rank for rank in SLOT_RANKS if rank >= self.rank)

    @property
    def layers(self) -> list[str]:
        """Names of the vLLM layers that contain targets."""
        return sorted({FUSED[target] for target in self.targets})

    def parameters(self, shape: ModelShape) -> int:
        """Return the number of elements of the adapter."""
        return self._elements(shape, self.targets, self.rank)

    def slot_parameters(self, shape: ModelShape) -> int:
        """Return the number of elements that an engine allocates for the adapter."""
        held = [name for name, layer in FUSED.items() if layer in self.layers]
        return self._elements(shape, held, self.slot_rank)

    def _elements(self, shape: ModelShape, projections: list[str], rank: int) -> int:
        return shape.layers * rank * sum(sum(shape.projections[name]) for name in projections)


class Trainer(Section):
    ranks: Count
    steps: Count
    batch_size: Count  # trajectories per training step
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    dtype: Literal["float32", "bfloat16"]
    # type in which ranks sum their gradients; the sum is kept and applied in float32
    reduce_dtype: Literal["float32", "bfloat16"]
    optimizer: Optimizer
    updates_per_step: Count  # optimizer updates per batch (PPO mini-batches)
    # tokens of one forward pass, padding included; with share_prefixes, shared tokens count once
    micro_batch_tokens: Count
    share_prefixes: bool  # true: compute the common beginning of rows once where it is cheaper
    # true: the backward pass computes layers again, so that their results aren't kept; null:
    # rose/launch/choices.py decides by the estimated memory
    gradient_checkpointing: bool | None
    step_timeout_s: Positive  # limit of a training step or a checkpoint on all ranks
    checkpoint_every: Count
    checkpoint_keep: Count
    export_every: Natural  # steps between two model folders in exports/; 0: none
    export_keep: Count  # newest folders of exports/ that stay
    # null: on CPUs the number that `rose.config.from_dict` computes, else the libraries' choice
    threads: Count | None
    lora: Lora | None  # null: all weights are trained
    stream: bool  # true: compute gradients of finished groups while others still run
    router_replay: bool  # true: route tokens to the experts that the engine recorded
    sequence_parallel: Count  # ranks that compute a row together
    offload_activations: bool  # true: the layers' inputs wait in host memory
    compile: bool  # torch.compile of layers, and of the head on CPUs
    # liger: Triton kernels of the package liger-kernel for norms, rotary positions and MLPs; null:
    # rose/launch/choices.py decides
    kernels: Literal["none", "liger"] | None
    # Each group of this many neighbouring ranks keeps a second copy of all weights. The backward
    # pass gathers from it (hpZ of ZeRO++, arXiv 2306.10209). node: a node's ranks; null: no copy.
    hpz: Count | Literal["node"] | None

    @property
    def replicas(self) -> int:
        """Number of parts into which a batch's rows are divided."""
        return self.ranks // self.sequence_parallel


class Transfer(Section):
    """The transfer of policy versions from the trainer to the engines (docs/format.md)."""

    full_every: Count  # most versions from one full snapshot to the next
    keep_versions: Count  # newest versions that stay in the store, for slow readers
    # further degrees, besides rollout.tensor_parallel, of servers that read only their part
    tensor_parallel: list[Count]
    broadcast: Literal["auto", "mpi", "nccl", "none"]  # way to dedicated ranks; auto: mpi
    # When new weights arrive, running requests recompute or keep their KV cache, or finish first.
    # null: ROSE decides. With asynchronous batching they keep it, because recomputing would cost a
    # prefill of every context per version. Otherwise they recompute it.
    in_flight: Literal["recompute", "keep", "finish"] | None
    # http://host:port of the relay from which this process reads versions; null: the shared folder
    relay: str | None
    relay_token_file: str | None
    # Threads that encode or decode. null: as many as trainer.threads or rollout.threads, or else
    # rose.processes.usable_threads.
    threads: Count | None
    # Memory of a node for versions broadcast to its dedicated ranks. Other data comes from files.
    mirror_gib: Positive
    stage_gib: NotNegative  # memory of an engine rank for whole blocks computed before the pause
    # Most memory of a GPU for a version's changes, if it is free. Further changes stay on the host,
    # which makes the pause longer.
    stage_device_gib: Positive
    verify_every: Count  # versions within which each live block is read back and compared
    load_timeout_s: Positive
