"""Estimate how much memory each role needs on one device, item by item, in GiB. Pure.

P is the number of the model's parameters. A are trained: all, or trainer.lora's own, which come on
top of P. N is the number of trainer ranks, b the bytes per element of the role's dtype, h the
hidden size, i the width of the MLP, T = trainer.micro_batch_tokens / trainer.sequence_parallel.
Statements about DeepSpeed come from its code (0.19.8), and tests/trainer/test_allocated.py measures
them (without an adapter).

Trainer, throughout a step (ZeRO, arXiv 1910.02054; "shared from stage 2" means 1/N per rank from
there):
- weights: b P, shared from stage 3
- second weights (trainer.hpz=H ranks): b P / H more. Those of trained parameters exist from a
  step's first pass to its update, those of frozen parameters always
- gradients: 4 A, accumulated in fp32 (without ZeRO b A, in the dtype), shared from stage 2. They
  are freed after the update except at stage 3. With offload_optimizer they are on the host from
  stage 2 on
- optimizer: Adam's two fp32 moments, 8 A, and the fp32 master weights, 4 A, which ZeRO keeps for
  fp32 weights too; shared from stage 1; on the host with offload_optimizer
- reduction bucket: in trainer.reduce_dtype, min(A, 2e8) elements (deepspeed_engine.LARGEST_BUCKET);
  stage 3 keeps it
- reference of algorithm.kl_coef: b P, shared from stage 3; an adapter's reference is the base,
  which is counted already

Trainer, in addition at the worst moment of a pass:
- gathered parameters: at stage 3 with several ranks, at most 1e9 at a time (DeepSpeed's
  stage3_max_live_parameters). With trainer.compile one more layer, since a compiled layer is
  gathered whole. Without gradient_checkpointing also all experts of a mixture, since the backward
  pass keeps views of their weights
- activations for the backward pass: b T e per layer, for e elements per token. With
  gradient_checkpointing b T h per layer (arXiv 2205.05198, section 5, for this block), on the host
  with offload_activations. The e elements are the two norms' outputs and inputs (also in fp32), the
  inputs of Qwen3's norms of heads, q, k, v, the attention output, and four of the gated MLP;
  attention matrices are never stored. Compiled layers and Liger's keep a norm's inputs in the dtype
  only, and three of the MLP (counted in compiled code). A mixture has the MLP's four for each
  chosen expert, the expert's input and output, and the router's fp32 probabilities
- the largest of three:
  1. a layer that is recomputed, with the gradients of its MLP and the bucket being reduced; a
     compiled layer has the gradients of all its weights at once
  2. a chunk of logits (batching.logit_elements), on CPUs three times in fp32, on GPUs once in the
     dtype (head_triton.py), and the output matrix's gradient twice, since chunks' gradients are
     added up
  3. the gradient of the output matrix, or of a layer's experts if larger, in the dtype, and beside
     it, while it is reduced, its fp32 copy or the bucket
  An adapter doesn't train the output matrix. It keeps its own products, rank elements per token and
  target, and the output of one target
- reduced gradients: in float32, stage 1 sums micro-batches in the parameters' own gradients and
  copies a rank's share, 4 A / N

Trainer, at the update: a copy of the fp32 gradients of one of DeepSpeed's groups, at most 1e9 of
this rank's elements; none for float32 without ZeRO. The estimate takes the worse of pass and
update. Prefix trees need no more memory: their mask is a table of blocks (flex attention).

Rollout (vLLM), per device of a tensor-parallel group of size tp:
- weights: b P / tp. An adapter counts in full on each device, an upper bound, since tp divides one
  of its two matrices
- activations of a step's T' tokens (Rollout.step_tokens): b T' (2 h + 3 i / tp), with i and one
  more h for each chosen expert; logits of max_sequences, in the dtype, in fp32 and sorted
- CUDA graphs, unless enforce_eager
- KV cache: kv_cache_gib, or what is left of gpu_memory_utilization; each key-value head is on at
  least one device, so tp > kv_heads replicates
- outside of gpu_memory_utilization: with transfer.broadcast=nccl, the CUDA context of the rank's
  own process. With rollout/draft, logits that vLLM's profile run misses: those of drafted positions
  beyond each sequence's first, which the rejection sampler has twice in the dtype and three times
  in fp32

Left out: allocator fragmentation (a few percent) and NCCL buffers; RUNTIME_GIB stands for CUDA's
context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rose.config import Config, ModelShape
from rose.trainer.batching import logit_elements

GIB = 2**30
RUNTIME_GIB = 1.0  # CUDA context and libraries, per process on a GPU
GRAPHS_GIB = 0.5  # an engine's CUDA graphs; vLLM prints their true size when it starts
# GiB that a sleeping trainer or engine keeps on a shared GPU: CUDA's context, NCCL, CUDA graphs.
ASLEEP_GIB = 1.5
LIVE_PARAMETERS = 10**9  # DeepSpeed's default stage3_max_live_parameters
GROUP_PARAMETERS = 10**9  # DeepSpeed's default sub_group_size
BUCKET_ELEMENTS = 2 * 10**8  # rose/trainer/deepspeed_engine.py's LARGEST_BUCKET
BYTES = {"float32": 4, "bfloat16": 2}
# fp32 copies of a chunk of logits: log-probabilities, their exponentials, and gradient or product.
LOGIT_COPIES = 3

# Memory is set aside for updates that change at most this share of the values; 1 to 5 percent were
# measured. A changed value takes 6 bytes: a position of 4 and a difference of 2.
CHANGED = 0.15

Items = dict[str, float]


@dataclass(frozen=True)
class Estimate:
    """GiB on one device by item. `firm` is the part that doesn't depend on batch sizes. `outside`
    is the part that vLLM's gpu_memory_utilization doesn't include. `host` is the rank's host memory
    in GiB, without the memory that every Python process takes."""

    items: Items
    firm: float
    kv_tokens: int = 0  # tokens that the KV cache of one engine holds; 0 for a trainer
    host: Items = field(default_factory=dict)
    outside: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.items.values())


def trainer(c: Config, shape: ModelShape) -> Estimate:
    """Return the estimate for one trainer rank."""
    throughout = _throughout_a_step(c, shape)
    states = ("weights", "second weights", "gradients", "optimizer", "reference")
    worst = max(
        (_added_in_a_pass(c, shape), _added_at_the_update(c, shape)),
        key=lambda items: sum(items.values()),
    )
    size, share = BYTES[c.trainer.dtype], trained(c, shape) / c.trainer.ranks
    # A trainer that leaves its device to engines writes whole versions from a copy of its values.
    copies = not c.compares_updates or c.shares_devices
    host = {
        "last published version": size * share if copies else 0,
        "changes to publish": 0 if copies else CHANGED * 6 * share * c.trainer.updates_per_step,
        "offloaded optimizer": _offloaded(c, shape),
        "offloaded activations": _kept_on_host(c, shape) if c.trainer.offload_activations else 0,
        "experts merged as rank 0 reads them": _merged(c, shape),
    }
    return Estimate(
        _in_gib(c, throughout | worst),
        sum(throughout[name] for name in states) / GIB,
        host={name: nbytes / GIB for name, nbytes in host.items() if nbytes},
    )


def moments(c: Config, shape: ModelShape) -> Items:
    """Return the bytes on a trainer rank's device in a pass, at the update and between steps,
    without CUDA's context."""
    items = _throughout_a_step(c, shape)
    throughout = sum(items.values())
    freed = items["gradients"] if c.trainer.zero_stage < 3 else items["second weights"]
    if c.trainer.lora is not None:
        freed -= items["second weights"]
    return {
        "forward and backward": throughout + sum(_added_in_a_pass(c, shape).values()),
        "update": throughout + sum(_added_at_the_update(c, shape).values()),
        "between steps": throughout - freed,
    }


def _shared(c: Config, stage: int) -> int:
    """Return the number of ranks that share memory which ZeRO divides from `stage` on."""
    return c.trainer.ranks if c.trainer.zero_stage >= stage else 1


def trained(c: Config, shape: ModelShape) -> int:
    """Return the number of parameters that have a gradient."""
    return shape.parameters if c.trainer.lora is None else c.trainer.lora.parameters(shape)


def _throughout_a_step(c: Config, shape: ModelShape) -> Items:
    """Return the bytes that stay on the device from a step's first pass to its update."""
    t, p, size = c.trainer, trained(c, shape), BYTES[c.trainer.dtype]
    held = shape.parameters + (p if t.lora else 0)
    state = 8 * p + (4 * p if size == 2 or t.zero_stage else 0)
    gradients = (4 if t.zero_stage else size) * p / _shared(c, 2)
    return {
        "weights": size * held / _shared(c, 3),
        "second weights": size * held / t.hpz if t.hpz else 0.0,
        "gradients": 0.0 if t.offload_optimizer and t.zero_stage > 1 else gradients,
        "optimizer": 0.0 if t.offload_optimizer else state / _shared(c, 1),
        "reduction bucket": float(BYTES[t.reduce_dtype] * min(p, BUCKET_ELEMENTS))
        if t.zero_stage == 3
        else 0.0,
        "reference": size * p / _shared(c, 3) if c.algorithm.kl_coef and not t.lora else 0.0,
    }


def _offloaded(c: Config, shape: ModelShape) -> float:
    """Return the host's bytes for the optimizer's states and gradients. Stage 3 page-locks the fp32
    gradients twice, as a whole and by groups. Below stage 3 these are page-locked: in fp32 master
    weights and gradients; in the dtype weights, each parameter's sum of gradients, and room for the
    largest."""
    t = c.trainer
    if not t.offload_optimizer:
        return 0.0
    own = trained(c, shape) / _shared(c, 1)
    if t.zero_stage == 3:
        whole, rest = divmod(own, GROUP_PARAMETERS)
        groups = whole * _locked(c, 4 * GROUP_PARAMETERS) + _locked(c, 4 * rest)
        return 12 * own + _locked(c, 4 * own) + groups
    size = BYTES[t.dtype]
    flat = 8 * own + 2 * _locked(c, 4 * own) + _locked(c, size * own)
    sums = sum(times * _locked(c, size * each) for each, times in _matrices(c, shape))
    return flat + sums / _shared(c, 1) + _locked(c, size * _largest(c, shape))


def _matrices(c: Config, shape: ModelShape) -> Iterator[tuple[int, int]]:
    """Yield (elements, number of such parameters) for the trained parameters, without the norms."""
    lora, layers = c.trainer.lora, shape.layers
    if lora is not None:
        for side in (side for name in lora.targets for side in shape.projections[name]):
            yield lora.rank * side, layers
        return
    for name, (rows, columns) in shape.projections.items():
        fused = max(1, shape.experts) if name.startswith(("gate", "up", "down")) else 1
        yield rows * columns * fused, layers
    yield shape.vocab * shape.hidden, 1 if shape.tied_embeddings else 2


def _locked(c: Config, nbytes: float) -> int:
    """Return the bytes of a page-locked buffer: torch rounds up to a power of two
    (CachingHostAllocator.h). Without a GPU nothing is page-locked."""
    needed = math.ceil(nbytes)
    return 1 << (needed - 1).bit_length() if c.cluster.gpus and needed else needed


def _merged(c: Config, shape: ModelShape) -> int:
    """Return the bytes of host memory for all experts of the model, which are merged there under
    ZeRO-3 (rose/trainer/mixture.py)."""
    if c.trainer.zero_stage < 3:
        return 0
    return BYTES[c.model.dtype] * _of_experts(shape)


def _of_experts(shape: ModelShape) -> int:
    """Return the number of elements of all experts of the model."""
    return shape.layers * shape.experts * 3 * shape.hidden * shape.expert_intermediate


def _added_in_a_pass(c: Config, shape: ModelShape) -> Items:
    """Return the bytes added at the worst moment of a forward and backward pass."""
    t, size = c.trainer, BYTES[c.trainer.dtype]
    tokens, largest = _tokens(c), _largest(c, shape)
    bucket = 4 * min(trained(c, shape), BUCKET_ELEMENTS)
    layer = 0 if t.gradient_checkpointing is False else _elements(c, shape)
    logits = logit_elements(t, c.cluster.gpus > 0)
    chunk = min(tokens, max(1, logits // shape.vocab))
    each = size if c.cluster.gpus else 4 * LOGIT_COPIES  # bytes of a logit
    copies = (2 if chunk < tokens else 1) if t.lora is None else 0
    beside = max(shape.projections[name][0] for name in t.lora.targets) if t.lora else 0
    passing = 3 * shape.mlp_width + (2 + shape.experts_per_token) * shape.hidden + beside
    at_once = size * _of_a_layer(c, shape) if t.compile else 0
    work = {
        "a layer at work": size * tokens * (layer + passing) + bucket + at_once,
        "logits at work": each * chunk * shape.vocab + copies * size * shape.vocab * shape.hidden,
        "largest gradient": size * largest + (4 * largest if largest > BUCKET_ELEMENTS else bucket),
    }
    worst = max(work, key=work.__getitem__)
    live = LIVE_PARAMETERS + (_layer(shape) if t.compile else 0)
    # The backward pass keeps views of the experts' weights, so ZeRO-3 can't release them.
    kept = _of_experts(shape) if t.gradient_checkpointing is False else 0
    gathered = min(shape.parameters, live + kept) if t.zero_stage == 3 and t.ranks > 1 else 0
    reduced = 4 * trained(c, shape) / t.ranks if t.zero_stage == 1 and size == 4 else 0
    return {
        "gathered parameters": float(size * gathered),
        "reduced gradients": float(reduced),
        "activations": 0.0 if t.offload_activations else float(_kept(c, shape)),
        worst: float(work[worst]),
    }


def _largest(c: Config, shape: ModelShape) -> int:
    """Return the elements of the largest parameter that has a gradient."""
    lora = c.trainer.lora
    if lora is None:
        experts = shape.experts * 2 * shape.expert_intermediate
        return max(shape.vocab, experts) * shape.hidden
    return lora.rank * max(max(shape.projections[name]) for name in lora.targets)


def _layer(shape: ModelShape) -> int:
    """Return the elements of a layer's matrices, for a model without experts."""
    return sum(rows * columns for rows, columns in shape.projections.values())


def _of_a_layer(c: Config, shape: ModelShape) -> int:
    """Return the elements of a layer's parameters that have a gradient."""
    return trained(c, shape) // shape.layers if c.trainer.lora else _layer(shape)


def _tokens(c: Config) -> int:
    """Return one rank's tokens of a micro-batch."""
    return -(-c.trainer.micro_batch_tokens // c.trainer.sequence_parallel)


def _kept(c: Config, shape: ModelShape) -> int:
    """Return the bytes of activations that all layers keep for the backward pass."""
    recomputed = c.trainer.gradient_checkpointing is not False
    each = shape.hidden if recomputed else _elements(c, shape)
    return BYTES[c.trainer.dtype] * _tokens(c) * shape.layers * each


def _kept_on_host(c: Config, shape: ModelShape) -> int:
    """Return the bytes of host memory for offloaded activations: a page-locked buffer per layer."""
    return shape.layers * _locked(c, _kept(c, shape) // shape.layers)


def _elements(c: Config, shape: ModelShape) -> int:
    """Return the elements per token, in the dtype, that a layer keeps for the backward pass. Each
    rank that shares a row has at least one key-value head, for all of the row's tokens."""
    t = c.trainer
    fused = bool(t.compile) or t.kernels == "liger"
    of_input = 1 if fused else 1 + 4 // BYTES[t.dtype]  # elements for each of a norm's inputs
    norms = 2 * shape.hidden * (of_input + 1)
    if not shape.type or shape.type.startswith("qwen3"):  # norms of each head's queries and keys
        norms += shape.head_dim * (shape.heads + shape.kv_heads) * of_input
    attention = 2 * shape.head_dim * (shape.heads + max(shape.kv_heads, t.sequence_parallel))
    routed = 2 * shape.hidden * shape.experts_per_token + 4 // BYTES[t.dtype] * shape.experts
    adapter = t.lora.rank * len(t.lora.targets) if t.lora else 0
    # Liger's kernels leave experts as they are.
    of_mlp = 3 if t.compile or fused and not shape.experts else 4
    return norms + attention + of_mlp * shape.mlp_width + routed + adapter


def _added_at_the_update(c: Config, shape: ModelShape) -> Items:
    """Return the bytes that the optimizer's step adds to `_throughout_a_step`."""
    t = c.trainer
    if t.offload_optimizer or (t.zero_stage == 0 and t.dtype == "float32"):
        return {"copy of gradients": 0.0}
    return {"copy of gradients": 4.0 * min(trained(c, shape) / _shared(c, 1), GROUP_PARAMETERS)}


def rollout(c: Config, shape: ModelShape) -> Estimate:
    """Return the estimate for one device of an engine."""
    r, size = c.rollout, BYTES[c.model.dtype]
    tp = r.tensor_parallel
    wide = (2 + shape.experts_per_token) * shape.hidden
    step = r.step_tokens(c.model.max_context, c.deterministic)
    work = size * step * (wide + 3 * shape.mlp_width // tp)
    logits = (size + 8) * r.max_sequences * shape.vocab
    adapter = c.trainer.lora.slot_parameters(shape) if c.trainer.lora else 0
    items = _in_gib(
        c,
        {
            "weights": size * shape.parameters / tp,
            "adapter": float(size * adapter),
            "activations": float(work + logits),
        },
    )
    firm = items["weights"] + items.get("adapter", 0.0)
    if c.cluster.gpus and not r.enforce_eager:
        items["CUDA graphs"] = GRAPHS_GIB
    if r.kv_cache_gib is not None:
        cache = r.kv_cache_gib
    elif c.cluster.gpus and c.cluster.gpu_memory_gib:
        cache = max(0.0, c.cluster.gpu_memory_gib * r.gpu_memory_utilization - sum(items.values()))
    else:
        cache = 0.0  # unknown without cluster.gpu_memory_gib
    beside = {
        "trainers' NCCL": RUNTIME_GIB * (c.cluster.gpus > 0 and c.transfer.broadcast == "nccl"),
        "drafts checked": _drafted(c, shape) / GIB,
    }
    items |= {name: gib for name, gib in beside.items() if gib}
    items["KV cache"] = cache
    per_token = shape.kv_bytes_per_token * size // 2 // shape.kv_heads * -(-shape.kv_heads // tp)
    version = size * trained(c, shape) / GIB  # a whole version, the most that is mirrored or staged
    host = {
        "mirror of new versions": min(c.transfer.mirror_gib, version),
        "staged blocks": min(tp * c.transfer.stage_gib, version),
    }
    host = {name: gib for name, gib in host.items() if gib}
    return Estimate(items, firm, int(cache * GIB / per_token), host, sum(beside.values()))


def _drafted(c: Config, shape: ModelShape) -> int:
    """Return the bytes of the logits of drafted positions in an engine step, beyond each sequence's
    first."""
    r = c.rollout
    if r.draft.method == "none":
        return 0
    step = r.step_tokens(c.model.max_context, c.deterministic)
    positions = min(r.max_sequences * r.draft.tokens, step) - r.max_sequences
    return max(0, positions) * shape.vocab * (2 * BYTES[c.model.dtype] + 3 * 4)


def waiting_gib(c: Config, trainer: Estimate, rollout: Estimate) -> tuple[float, float]:
    """Return the GiB that move to host memory while engines and trainer take turns on devices,
    summed over ranks: (the trainer's states during a rollout, the engines' weights during
    training). On CPUs the engines' weights never move."""
    engines = c.hybrids or c.rollout.workers
    moved = engines * c.rollout.tensor_parallel if c.cluster.gpus else 0
    return c.trainer.ranks * trainer.firm, moved * rollout.firm


def host_gib(c: Config, trainer: Estimate, rollout: Estimate) -> tuple[float, float]:
    """Return `Estimate.host` summed over (all trainer ranks, all engines of one machine). The
    mirror counts once, since a node has one."""
    engines, held = c.rollout.workers + c.hybrids, dict(rollout.host)
    mirror = held.pop("mirror of new versions", 0.0)
    return c.trainer.ranks * sum(trainer.host.values()), mirror + engines * sum(held.values())


def _in_gib(c: Config, items: dict[str, float]) -> dict[str, float]:
    """Return bytes on a device as GiB, with CUDA's context."""
    found = {name: nbytes / GIB for name, nbytes in items.items() if nbytes}
    if c.cluster.gpus:
        found["runtime"] = RUNTIME_GIB
    return found
