"""Step times, KV capacity and weight transfer, computed from published peak rates and a model's
shape.

The model is a roofline (Williams et al., 2009). `Efficiency` adds the numbers that datasheets don't
give: one set for all devices, models and policies. The influential ones with "ours" as their source
have a row in the sensitivity table (docs/simulator.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from rose.config.model import ModelShape
from rose.parts.simulator.spec import Gpu, Link, Model, StepTime, Trainer

BF16 = 2  # bytes
GB, GIB, TB = 1e9, 2**30, 1e12

H100 = "NVIDIA H100 datasheet, SXM5: half of the rate with sparsity"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 989.4e12, 3.35 * TB, 80 * GB, H100),
        Gpu("H800", 989.4e12, 3.35 * TB, 80 * GB, f"{H100}; only NVLink and FP64 differ"),
        Gpu("H200", 989.4e12, 4.8 * TB, 141 * GB, "NVIDIA H200 datasheet, SXM"),
        Gpu("H20", 148e12, 4.0 * TB, 96 * GB, "resellers; NVIDIA has no public datasheet"),
        Gpu("A100", 312e12, 2.039 * TB, 80 * GB, "NVIDIA A100 datasheet, SXM 80GB"),
        Gpu("A800", 312e12, 2.039 * TB, 80 * GB, "NVIDIA A100 datasheet; only NVLink differs"),
        Gpu("L40S", 362.05e12, 0.864 * TB, 48 * GB, "NVIDIA L40S datasheet, without sparsity"),
        # The DGX B200 has 8 GPUs: 36 PFLOP/s dense FP8, 64 TB/s, 1,440 GB.
        Gpu("B200", 2250e12, 8.0 * TB, 180 * GB, "NVIDIA DGX B200 datasheet"),
    )
}
NVLINK = {  # bytes/s, both directions together, from datasheets
    "H100": 900 * GB,
    "H800": 400 * GB,  # H800: DeepSeek-V3 (arXiv 2412.19437): 160 GB/s reached of 200 each way
    "H200": 900 * GB,
    "H20": 900 * GB,
    "A100": 600 * GB,
    "A800": 400 * GB,
    "L40S": 64 * GB,  # PCIe 4.0 x16
    "B200": 1800 * GB,
}
# Bytes/s from the host over PCIe x16: 64 GB/s in generation 5 and 32 GB/s in generation 4
# (PCI-SIG). The datasheets name the generation.
PCIE = dict.fromkeys(("H100", "H800", "H200", "H20", "B200"), 64 * GB)
PCIE |= dict.fromkeys(("A100", "A800", "L40S"), 32 * GB)

# copies of the models' public config.json, as in conf/model
QWEN3 = partial(ModelShape, type="qwen3", head_dim=128, vocab=151936, tied_embeddings=False)
QWEN2 = partial(ModelShape, type="qwen2", head_dim=128, vocab=152064, tied_embeddings=False)
SHAPES = {
    "qwen3_8b": QWEN3(layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8),
    "qwen3_32b": QWEN3(layers=64, hidden=5120, intermediate=25600, heads=64, kv_heads=8),
    "qwen2_5_7b": QWEN2(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4),
    "qwen2_5_32b": QWEN2(layers=64, hidden=5120, intermediate=27648, heads=40, kv_heads=8),
}


@dataclass(frozen=True)
class Efficiency:
    """The shares of the peak rates that software reaches, and its fixed costs."""

    # Share of the FLOP/s, in matrix products and prefill attention. Ours; of the H100's peak
    # FlashAttention-3 reaches 0.75 (arXiv 2407.08608), and training 0.38 to 0.43 (Llama 3, arXiv
    # 2407.21783, table 4).
    compute: float = 0.55
    # Share of the HBM bytes/s. This share and step_s give vLLM's 75 tokens/s of Llama-3.1-8B alone
    # on an A100 40GB: 0.77 of its bandwidth (johnmusgrave.com/p/vllm-throughput-latency-sweep-on).
    # The split between them is ours.
    memory: float = 0.85
    # Share of one direction's bytes/s. Ours; DeepSeek-V3 (arXiv 2412.19437) reaches 160 of 200 GB/s
    # on the H800.
    nvlink: float = 0.75
    step_s: float = 1.5e-3  # seconds per engine step for launch, scheduling and sampling
    sequence_s: float = 5e-6  # seconds per sequence in a step, for sampling and output; ours
    # Latency of one all-reduce within a node, seconds. vLLM's own all-reduce takes 8.5 to 12 us for
    # up to 32 KiB on 2 to 8 H100, without the CUDA graphs that engines use
    # (github.com/sgl-project/sglang/pull/2904). This latency with `nvlink` gives vLLM's best on 4
    # and 6 H100 from 0.5 to 4 MiB within 25%. For 0.5 MiB on 2 H100 it gives 11.6 us, and vLLM
    # takes 7 (github.com/vllm-project/vllm/pull/24111, 24532).
    all_reduce_s: float = 1e-5
    # Share of the device's memory that vLLM may use: its default gpu_memory_utilization.
    kv_memory: float = 0.9
    # Bytes per device of that memory for activations and CUDA graphs. Ours; vLLM's profile run at
    # 8,192 tokens a step.
    activations_bytes: float = 3 * GIB


EFFICIENCY = Efficiency()
# ours; Llama 3 reaches 0.38 to 0.43 in pretraining. RL batches are smaller, with uneven lengths.
MFU = 0.35
# Forward passes besides those of an update (sim.trainer.forward_passes): ROSE's trainer has none at
# one update a step.
PASSES = 0
# Bytes of a dense version / bytes of our codec's differences, at a learning rate of 1e-6.
# docs/benchmarks.md, "publish to flipped" (scripts/bench_sync.py, SmolLM2-135M): 268.97 MB against
# 1.79 MB on the link.
DELTA_RATIO = 151.0
# Bytes of a dense version / bytes of a full snapshot from an earlier codec (CHANGELOG.md). The
# current codec reaches 1 / 0.694, so that a worker that joins without the model on its disk reads
# 4% more than here.
FULL_RATIO = 1 / 0.669
# Bytes of the model that a core encodes per second. docs/benchmarks.md: publishing 269 MB
# (SmolLM2-135M) takes about 1 s of CPU.
ENCODE_BYTES_S = 0.27 * GB
ENCODE_CORES = 8  # cores per trainer rank; ours
# Bytes/s of a version that a device applies. docs/benchmarks.md: an engine on a CPU pauses for 26
# ms to apply 269 MB.
APPLY_BYTES_S = 10.3 * GB


def wake_s(shape: ModelShape, gpu: Gpu, tensor_parallel: int) -> float:
    """Return the seconds that an engine needs to wake up: to copy its weights from the host to its
    devices. Each device has its own PCIe link, used at the same share of the peak as NVLink. ROSE
    (arXiv 2605.06534) wakes Qwen3-32B up within 5 s, all included."""
    return BF16 * shape.parameters / tensor_parallel / (PCIE[gpu.name] * EFFICIENCY.nvlink)


def gpu(name: str) -> Gpu:
    """Return the GPU of this name. Raises `ValueError` if its rates are unknown."""
    if name not in GPUS:
        raise ValueError(
            f"GPU {name!r}: no peak rates are known; known are {', '.join(GPUS)} "
            "(rose/parts/simulator/hardware.py)"
        )
    return GPUS[name]


def model(name: str, shape: ModelShape) -> Model:
    """Return the model in bf16. Untied input embeddings don't count as active parameters."""
    return Model(
        name,
        float(shape.parameters),
        float(shape.active_parameters) - shape.vocab * shape.hidden * (not shape.tied_embeddings),
        shape.layers,
        float(shape.kv_bytes_per_token),
    )


def shape(name: str) -> ModelShape:
    """Return the shape of the model of this name. Raises `ValueError` for an unknown name."""
    if name not in SHAPES:
        raise ValueError(
            f"model {name!r}: no shape is known; known are {', '.join(SHAPES)} "
            "(rose/parts/simulator/hardware.py)"
        )
    return SHAPES[name]


def step_time(
    shape: ModelShape,
    gpu: Gpu,
    tensor_parallel: int,
    sequences: int,
    efficiency: Efficiency = EFFICIENCY,
) -> StepTime:
    """Return the coefficients of an engine step in bf16 on `tensor_parallel` such GPUs, for up to
    `sequences` decodes at once.

    - c0: the time to read the weights once, the fixed costs of a step, and the all-reduces'
      latency (two all-reduces a layer, which do not overlap with compute).
    - c1: a prompt token's matrix products and its bytes in the all-reduces.
    - c2: a prompt token's attention to one token before it.
    - c3: the time that each decode adds: its bytes in the all-reduces, its sampling and output, and
      matrix products. The products of D decodes take as long as reading the weights (already in
      c0), or longer if D is large. A step time must be linear in D, so c3 is the slope of the line
      through the true times of 0 and `sequences` decodes. The line is nowhere below the true times.
    - c4: the time to read the KV of one token of context.

    Raises `ValueError` if `tensor_parallel` doesn't divide the heads.
    """
    _check_degree(shape, tensor_parallel)
    flops = tensor_parallel * gpu.flops * efficiency.compute
    hbm = tensor_parallel * gpu.hbm_bytes_s * efficiency.memory
    active = model("", shape).active_parameters
    reduces = 2 * shape.layers if tensor_parallel > 1 else 0
    # A ring all-reduce moves 2 (t - 1) / t of the bytes through each device, in one direction.
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
    """Return the tokens of KV cache that fit beside the weights and the `others_bytes` of a second
    model on the same devices. Raises `ValueError` if none fit."""
    _check_degree(shape, tensor_parallel)
    usable = tensor_parallel * (
        gpu.memory_bytes * efficiency.kv_memory - efficiency.activations_bytes
    )
    left = usable - BF16 * shape.parameters - others_bytes
    tokens = math.floor(left / shape.kv_bytes_per_token)
    if tokens < 1:
        raise ValueError(
            f"{BF16 * shape.parameters / GB:.1f} GB of weights and {others_bytes / GB:.1f} GB "
            f"besides leave no KV cache on {tensor_parallel} x {gpu.name}; raise tensor_parallel"
        )
    return tokens


def _check_degree(shape: ModelShape, tensor_parallel: int) -> None:
    if tensor_parallel < 1 or shape.heads % tensor_parallel:
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: must divide the model's {shape.heads} attention "
            "heads"
        )


def trainer(
    shape: ModelShape,
    gpu: Gpu,
    gpus: int,
    recompute: bool,
    mfu: float = MFU,
    passes: float = PASSES,
) -> Trainer:
    """Return a trainer on `gpus` GPUs. A forward pass costs 2 FLOP per parameter and token, and 4 x
    layers x width FLOP of attention per pair of a token and an earlier token. The backward pass
    costs twice as much. Recomputed activations and `passes` are further forward passes."""
    forwards = 3 + recompute + passes
    # AdamW in bf16 and float32 moves 28 bytes a parameter, divided among the ranks (ZeRO).
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
    """Return a pool's link. Versions are sent as our codec's differences (`sparse`) or dense."""
    dense = float(BF16 * shape.parameters)
    return Link(
        latency_s=latency_s,
        bytes_s=bytes_s,
        version_bytes=dense / DELTA_RATIO if sparse else dense,
        relay=relay,
        apply_s=dense / tensor_parallel / APPLY_BYTES_S,
        full_bytes=dense / FULL_RATIO if sparse else dense,
    )
