"""The types of `algorithm`, `trainer` and `transfer`."""

from __future__ import annotations

from typing import Any, Literal

from rose.config.common import Count, Fraction, Natural, NotNegative, Positive, Section
from rose.config.model import ModelShape


class Algorithm(Section):
    """`name` is a file of rose/trainer/algorithms; `args` are its constructor's."""

    name: str
    args: dict[str, Any]
    # importance sampling between engine and trainer (rose/trainer/importance.py); null: off
    importance_cap: Positive | None
    dynamic_sampling: bool  # drop groups whose rewards are all equal and sample others (DAPO)
    kl_coef: NotNegative  # of the KL penalty to the model folder's own weights; 0: no reference
    # Gives the penalty the gradient of KL(policy || reference). Runs that were stored without this
    # key can go on: `rose.config.stored` takes the default.
    kl_correction: bool = True
    # weights below this, and above the cap, are 0; null: those above the cap are cut to it
    importance_floor: NotNegative | None = None
    importance_level: Literal["token", "sequence"] = "token"


class Optimizer(Section):
    lr: Positive
    betas: list[float]
    eps: Positive
    weight_decay: NotNegative
    warmup_steps: Natural  # updates
    grad_clip: Positive
    # after warm-up, to the last update of trainer.steps (rose/trainer/schedule.py)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_share: Fraction = 0.0  # of lr, at the end of linear and cosine


# projections of a layer, in vLLM's order -> vLLM's layer that has them, wrapped as a whole
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}


SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM 0.32 (its MaxLoRARanks)


class Lora(Section):
    """An adapter (arXiv 2106.09685): beside each matrix W of the `targets` of all layers stand A
    (rank, columns) and B (rows, rank), and W x becomes W x + scale B A x. W is frozen."""

    rank: Count
    alpha: Positive
    targets: list[str]  # of `FUSED`

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def slot_rank(self) -> int:
        """That of an engine's memory for the adapter. Raises `StopIteration` above vLLM's
        largest, which checks/ refuses."""
        return next(rank for rank in SLOT_RANKS if rank >= self.rank)

    @property
    def layers(self) -> list[str]:
        """vLLM's layers that have targets."""
        return sorted({FUSED[target] for target in self.targets})

    def parameters(self, shape: ModelShape) -> int:
        """Elements of the adapter."""
        return self._elements(shape, self.targets, self.rank)

    def slot_parameters(self, shape: ModelShape) -> int:
        """Elements of an engine's memory for it."""
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
    # in which ranks add up their gradients; kept and applied in float32
    reduce_dtype: Literal["float32", "bfloat16"]
    optimizer: Optimizer
    updates_per_step: Count  # optimizer updates per batch (PPO mini-batches)
    micro_batch_tokens: (
        Count  # of one forward pass: padded ones, or distinct ones when prefixes are shared
    )
    share_prefixes: (
        bool  # compute what rows have in common at their beginning once, where that is cheaper
    )
    gradient_checkpointing: bool
    step_timeout_s: Positive  # one training step, or one checkpoint, of every rank
    checkpoint_every: Count
    checkpoint_keep: Count
    export_every: Natural  # steps from one model's folder in exports/ to the next; 0: none
    export_keep: Count  # of these folders, the newest
    # null: on CPUs what `rose.config.from_dict` finds, else the libraries' choice
    threads: Count | None
    lora: Lora | None = None  # null: all weights; absent in what earlier releases stored
    # compute gradients of the step's finished groups while others still run; absent in what
    # earlier releases stored
    stream: bool = False
    # of a mixture: the engine's experts for each token, recorded with it; absent as above
    router_replay: bool = False
    # both absent there, too: ranks that compute a row together; the layers' inputs in host memory
    sequence_parallel: Count = 1
    offload_activations: bool = False
    # torch.compile of layers and head; Triton kernels of the package liger-kernel for norms, rotary
    # positions and the MLP's product; absent as above
    compile: bool = False
    kernels: Literal["none", "liger"] = "none"
    # neighbours that keep all weights a second time among them, and gather there in the backward
    # pass (hpZ of ZeRO++, arXiv 2306.10209); node: each node's; null: none; absent as above
    hpz: Count | Literal["node"] | None = None
    # dedicated engines on whose devices a replica trains while the trainer does; absent there, too
    elastic_replicas: Natural = 0

    @property
    def replicas(self) -> int:
        """Parts into which a batch's rows are dealt."""
        return self.ranks // self.sequence_parallel


class Transfer(Section):
    """How policy versions get from the trainer to the engines (docs/format.md)."""

    full_every: (
        Count  # versions from one that needs no base to the next; between them are differences
    )
    keep_versions: Count  # that readers may still be on their way to
    # degrees of servers, rollout.tensor_parallel aside, that read only their part
    tensor_parallel: list[Count]
    broadcast: Literal["auto", "mpi", "nccl", "none"]  # to dedicated ranks; auto: mpi
    # What requests do that run when new weights come. Null only until the tree is checked: keep
    # with asynchronous batching, as making every context's KV cache anew costs a prefill of all of
    # them per version; else recompute.
    in_flight: Literal["recompute", "keep", "finish"] | None
    # http://host:port of a relay that this process reads versions from; null: the shared folder
    relay: str | None
    relay_token_file: str | None
    threads: (
        Count | None
        # that encode or decode; null: the trainer's or the engine's, or
        # rose.processes.usable_threads
    )
    # of a node's memory for what is broadcast to its dedicated ranks; what is more, they read from
    # files
    mirror_gib: Positive
    stage_gib: (
        NotNegative  # of blocks that change so much that they are staged whole, per engine rank
    )
    # of a GPU for what a version changes, at most, and within what is free; more waits on the
    stage_device_gib: Positive
    # host and makes the pause longer
    verify_every: Count  # versions within which each live block is read back and compared whole
    load_timeout_s: Positive
