"""From published peak rates and a model's shape to what the simulator needs: step times, KV
capacity, weight transfer.

A roofline (Williams et al., 2009) with stated efficiencies: what the peaks don't say is in
`Efficiency`, one set for all devices, models and policies. The larger ones with "ours" as their
source have a row in the sensitivity table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose.config.model import ModelShape
from rose.sim.spec import Gpu, Link, Model, StepTime, Trainer

BF16 = 2  # bytes
GB, GIB, TB = 1e9, 2**30, 1e12

H100 = "NVIDIA H100 datasheet, SXM5: half of the rate with sparsity"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 989.4e12, 3.35 * TB, 80 * GB, H100),
        Gpu(
            "H800",
            989.4e12,
            3.35 * TB,
            80 * GB,
            f"{H100}; the H800 differs in NVLink and FP64 only",
        ),
        Gpu("H200", 989.4e12, 4.8 * TB, 141 * GB, "NVIDIA H200 datasheet, SXM"),
        Gpu(
            "H20",
            148e12,
            4.0 * TB,
            96 * GB,
            "as published by resellers (NVIDIA has no public datasheet of it)",
        ),
        Gpu("A100", 312e12, 2.039 * TB, 80 * GB, "NVIDIA A100 datasheet, SXM 80GB"),
        Gpu(
            "A800",
            312e12,
            2.039 * TB,
            80 * GB,
            "NVIDIA A100 datasheet; the A800 differs in NVLink only",
        ),
        Gpu("L40S", 362.05e12, 0.864 * TB, 48 * GB, "NVIDIA L40S datasheet, without sparsity"),
        Gpu(
            "B200",
            2250e12,
            8.0 * TB,
            180 * GB,
            "NVIDIA DGX B200 datasheet: 36 PFLOP/s dense FP8, 64 TB/s, 1,440 GB of 8",
        ),
    )
}
NVLINK = {  # bytes/s, both directions together, as datasheets give it
    "H100": 900 * GB,
    "H800": 400 * GB,  # H800: DeepSeek-V3 (arXiv 2412.19437): 160 GB/s reached of 200 each way
    "H200": 900 * GB,
    "H20": 900 * GB,
    "A100": 600 * GB,
    "A800": 400 * GB,
    "L40S": 64 * GB,  # PCIe 4.0 x16
    "B200": 1800 * GB,
}
# bytes/s from the host, x16, of generation 5 or 4 (PCI-SIG: 64 and 32 GB/s), which datasheets say
PCIE = {
    "H100": 64 * GB,
    "H800": 64 * GB,
    "H200": 64 * GB,
    "H20": 64 * GB,
    "B200": 64 * GB,
    "A100": 32 * GB,
    "A800": 32 * GB,
    "L40S": 32 * GB,
}

SHAPES = {  # of the public config.json of each; conf/model has the same
    "qwen3_8b": ModelShape(
        layers=36,
        hidden=4096,
        intermediate=12288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        tied_embeddings=False,
    ),
    "qwen3_32b": ModelShape(
        layers=64,
        hidden=5120,
        intermediate=25600,
        heads=64,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        tied_embeddings=False,
    ),
    "qwen2_5_7b": ModelShape(
        layers=28,
        hidden=3584,
        intermediate=18944,
        heads=28,
        kv_heads=4,
        head_dim=128,
        vocab=152064,
        tied_embeddings=False,
    ),
    "qwen2_5_32b": ModelShape(
        layers=64,
        hidden=5120,
        intermediate=27648,
        heads=40,
        kv_heads=8,
        head_dim=128,
        vocab=152064,
        tied_embeddings=False,
    ),
}


@dataclass(frozen=True)
class Efficiency:
    """What software reaches of the peaks; shares unless said otherwise."""

    compute: float  # of the FLOP/s, in matrix products and prefill attention
    memory: float  # of the HBM bytes/s
    nvlink: float  # of one direction's bytes/s
    step_s: float  # launch, scheduling and sampling of one step, seconds
    sequence_s: float  # of each sequence in a step, seconds
    all_reduce_s: float  # latency of one all-reduce within a node, seconds
    kv_memory: float  # of the device's memory that vLLM may use
    activations_bytes: float  # of it for activations and CUDA graphs, per device


EFFICIENCY = Efficiency(
    compute=0.55,
    memory=0.85,
    nvlink=0.75,
    step_s=1.5e-3,
    sequence_s=5e-6,
    all_reduce_s=1e-5,
    kv_memory=0.9,
    activations_bytes=3 * GIB,
)
EFFICIENCY_SOURCE = {
    "compute": "ours; of the H100's peak FlashAttention-3 reaches 0.75 (arXiv 2407.08608) and "
    "training 0.38 to 0.43 (Llama 3, arXiv 2407.21783, table 4)",
    "memory": "with step_s: vLLM's 75 tokens/s of Llama-3.1-8B alone on an A100 40GB, 0.77 of its "
    "bandwidth all in all (johnmusgrave.com/p/vllm-throughput-latency-sweep-on); how it divides "
    "is ours",
    "nvlink": "ours; DeepSeek-V3 (arXiv 2412.19437) reaches 160 of 200 GB/s on the H800",
    "step_s": "see memory",
    "sequence_s": "ours; sampling and output handling of a sequence",
    "all_reduce_s": "8.5 to 12 us, of vLLM's own up to 32 KiB over 2 to 8 H100, without the CUDA "
    "graphs that engines have (github.com/sgl-project/sglang/pull/2904); with `nvlink` the best of "
    "vLLM's over 4 and 6 H100 from 0.5 to 4 MiB within 25%, over 2 at 0.5 MiB 11.6 us, not 7 "
    "(github.com/vllm-project/vllm/pull/24111, 24532)",
    "kv_memory": "vLLM's default gpu_memory_utilization",
    "activations_bytes": "ours; vLLM's profile run at 8,192 tokens a step",
}
MFU = 0.35
MFU_SOURCE = (
    "ours; Llama 3 reaches 0.38 to 0.43 in pretraining, and RL batches are smaller and of uneven "
    "lengths"
)
PASSES = 0  # forward passes besides the update's: none, as our trainer (sim.trainer.forward_passes)
DELTA_RATIO = 151.0  # dense / ours at lr 1e-6: docs/benchmarks.md, "publish to flipped"
DELTA_SOURCE = (
    "docs/benchmarks.md (scripts/bench_sync.py, SmolLM2-135M at lr 1e-6): 268.97 against 1.79 MB "
    "on the link"
)
# dense / full version without a base, of the codec before (CHANGELOG.md); today's has 0.694, so
# what a joiner without the model on its disk reads is 4% more
FULL_RATIO = 1 / 0.669
# of the model, per core: docs/benchmarks.md, 269 MB (SmolLM2-135M) published in about 1 s of CPU
ENCODE_BYTES_S = 0.27 * GB
ENCODE_CORES = 8  # of each trainer rank; ours
# of the model, per device: docs/benchmarks.md, an engine on a CPU stands still for 26 ms per 269 MB
APPLY_BYTES_S = 10.3 * GB


def wake_s(shape: ModelShape, gpu: Gpu, tensor_parallel: int) -> float:
    """Seconds that weights take from the host to the devices of an engine that wakes up, each over
    its own PCIe at the share of the peak that NVLink reaches, too. ROSE (arXiv 2605.06534):
    Qwen3-32B within 5 s, all included."""
    return BF16 * shape.parameters / tensor_parallel / (PCIE[gpu.name] * EFFICIENCY.nvlink)


def gpu(name: str) -> Gpu:
    """Raises `ValueError` for one without published rates here."""
    if name not in GPUS:
        raise ValueError(
            f"GPU {name!r}: no peak rates are known; known are {', '.join(GPUS)} "
            "(rose/sim/hardware.py)"
        )
    return GPUS[name]


def model(name: str, shape: ModelShape) -> Model:
    """A decoder in bf16."""
    return Model(
        name,
        float(shape.parameters),
        float(shape.active_parameters) - shape.vocab * shape.hidden * (not shape.tied_embeddings),
        shape.layers,
        float(shape.kv_bytes_per_token),
    )


def shape(name: str) -> ModelShape:
    """Raises `ValueError` for an unknown name."""
    if name not in SHAPES:
        raise ValueError(
            f"model {name!r}: no shape is known; known are {', '.join(SHAPES)} "
            "(rose/sim/hardware.py)"
        )
    return SHAPES[name]


def step_time(
    shape: ModelShape,
    gpu: Gpu,
    tensor_parallel: int,
    sequences: int,
    efficiency: Efficiency = EFFICIENCY,
) -> StepTime:
    """Coefficients of an engine's step in bf16 on `tensor_parallel` such GPUs, for up to
    `sequences` decodes at once.

    c0: weights read once, and what a step costs anyway. c1, c2: a prompt token's matrix products,
    and its attention to each token before it. c4: the KV that decodes read. Each all-reduce (two a
    layer) has a latency, in c0, and its bytes, in c1 and c3; what comes next waits for it. The
    matrix products of D decodes take as long as the weights or longer; as the predictor's rule is
    linear in D, c3 has the chord of that from 0 to `sequences`, which is never below it. Raises
    `ValueError` if heads can't be divided.
    """
    _divisible(shape, tensor_parallel)
    flops = tensor_parallel * gpu.flops * efficiency.compute
    hbm = tensor_parallel * gpu.hbm_bytes_s * efficiency.memory
    active = model("", shape).active_parameters
    reduces = 2 * shape.layers if tensor_parallel > 1 else 0
    # a ring moves 2 (t - 1) / t of the bytes through each device, in one direction
    ring = 2 * (tensor_parallel - 1) / tensor_parallel * shape.hidden * BF16
    reduce_s = reduces * ring / (efficiency.nvlink * NVLINK[gpu.name] / 2)
    product_s = 2 * active / flops
    weights_s = BF16 * active / hbm
    return StepTime(
        c0=weights_s + efficiency.step_s + reduces * efficiency.all_reduce_s,
        c1=product_s + reduce_s,
        c2=4 * shape.layers * shape.heads * shape.head_dim / flops,
        c3=max(0.0, product_s - weights_s / sequences) + reduce_s + efficiency.sequence_s,
        c4=shape.kv_bytes_per_token / hbm,
    )


def kv_tokens(
    shape: ModelShape,
    gpu: Gpu,
    tensor_parallel: int,
    efficiency: Efficiency = EFFICIENCY,
    others_bytes: float = 0.0,
) -> int:
    """Tokens of KV cache that fit beside the weights (and `others_bytes`, of a second model on the
    same devices). Raises `ValueError` if none do."""
    _divisible(shape, tensor_parallel)
    usable = tensor_parallel * (
        gpu.memory_bytes * efficiency.kv_memory - efficiency.activations_bytes
    )
    left = usable - BF16 * shape.parameters - others_bytes
    tokens = math.floor(left / shape.kv_bytes_per_token)
    if tokens < 1:
        raise ValueError(
            f"{BF16 * shape.parameters / GB:.1f} GB of weights and {others_bytes / GB:.1f} GB "
            "besides "
            f"leave no KV cache on {tensor_parallel} x {gpu.name}; raise tensor_parallel"
        )
    return tokens


def _divisible(shape: ModelShape, tensor_parallel: int) -> None:
    if tensor_parallel < 1 or shape.heads % tensor_parallel:
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: must divide the model's {shape.heads} attention "
            "heads"
        )


# --------------------------------------------------------------------------- training and transfer


def trainer(
    shape: ModelShape,
    gpu: Gpu,
    gpus: int,
    recompute: bool,
    mfu: float = MFU,
    passes: float = PASSES,
) -> Trainer:
    """6 FLOP a parameter and token for the update, 2 more if activations are recomputed, 2 for each
    other forward pass; likewise of attention, 4 x layers x width for each pair of a token and one
    before it."""
    forwards = 3 + recompute + passes
    # AdamW in bf16 and float32 reads and writes 28 bytes a parameter, shared by the ranks (ZeRO)
    step_s = 28 * shape.parameters / (gpus * gpu.hbm_bytes_s * EFFICIENCY.memory)
    publish_s = BF16 * shape.parameters / gpus / (ENCODE_BYTES_S * ENCODE_CORES)
    return Trainer(
        gpus=gpus,
        gpu=gpu,
        mfu=mfu,
        flops_per_token=2 * model("", shape).active_parameters * forwards,
        flops_per_pair=4 * shape.layers * shape.heads * shape.head_dim * forwards,
        step_s=step_s,
        publish_s=publish_s,
    )


def link(
    shape: ModelShape,
    bytes_s: float,
    latency_s: float,
    sparse: bool,
    relay: bool,
    tensor_parallel: int = 1,
) -> Link:
    """The way of a version to a pool: as differences of our codec, or dense (`sparse` False)."""
    dense = float(BF16 * shape.parameters)
    return Link(
        latency_s=latency_s,
        bytes_s=bytes_s,
        version_bytes=dense / DELTA_RATIO if sparse else dense,
        relay=relay,
        apply_s=dense / tensor_parallel / APPLY_BYTES_S,
        full_bytes=dense / FULL_RATIO if sparse else dense,
    )
