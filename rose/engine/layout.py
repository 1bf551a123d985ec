"""The place of each Hugging Face tensor in vLLM's parameters, for every tensor-parallel rank.

Pure functions. They cover the decoder family that Qwen2, Qwen3 and Llama share:
- q, k and v are fused into `qkv_proj` (with bias in Qwen2), gate and up into `gate_up_proj`;
- rows of fused layers and columns of `o_proj` and `down_proj` are split over ranks;
- key-value heads are replicated where there are fewer of them than ranks;
- the vocabulary is padded to a multiple of 64 and split;
- norms, and the routers of Qwen3's mixtures, are on every rank;
- a layer's experts lie in two parameters, one expert below the other: `w13_weight`, with gate above
  up, and `w2_weight`. An expert is split like an MLP or, with expert parallelism, lies whole on one
  rank;
- adapters have one pair of matrices for each projection, fused or not.

Quantized layouts are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rose.config import ModelShape

VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
_LAYER = re.compile(r"(model\.layers\.\d+\.)(self_attn|mlp)\.(\w+)\.(weight|bias)")
_ADAPTER = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")
_WHOLE = re.compile(
    r"model\.norm\.weight|model\.layers\.\d+\.(input_layernorm|post_attention_layernorm|"
    r"self_attn\.q_norm|self_attn\.k_norm|mlp\.gate)\.weight"
)
_EXPERT = re.compile(
    r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight"
)


class LocalSlice(NamedTuple):
    """A copy of part of a tensor: `parameter[destination] = tensor[source]` on one rank."""

    parameter: str
    destination: tuple[slice, ...]
    source: tuple[slice, ...]


def cuts(
    name: str, shape: tuple[int, ...], model: ModelShape, degrees: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Rows and columns of HF tensor `name` at which a rank's part begins or ends, ascending. All
    tensor-parallel `degrees` count. Degrees that don't divide the model are skipped, as no engine
    can have them. Raises `ValueError` as `slices` does."""
    found: tuple[set[int], set[int]] = (set(), set())
    slices(name, shape, model, 0, 1)
    for degree in degrees:
        for rank in range(degree):
            try:
                place = slices(name, shape, model, rank, degree)
            except ValueError:
                break
            for axis, part in zip(found, place.source if place else (), strict=False):
                axis.update((part.start, part.stop))
    return sorted(found[0]), sorted(found[1])


def slices(
    name: str,
    shape: tuple[int, ...],
    model: ModelShape,
    tp_rank: int,
    tp_size: int,
    expert_parallel: bool = False,
) -> LocalSlice | None:
    """The part of HF tensor `name` that rank `tp_rank` of `tp_size` holds.

    None for `lm_head.weight` of a model with tied embeddings, which vLLM keeps only once, and for
    an expert of another rank. For a parameter with three dimensions, `destination` indexes it with
    the first two flattened into one.

    Raises `ValueError` for a tensor that this family doesn't have, a shape that differs from the
    model's, or a `tp_size` that doesn't divide the dimension to be split.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tensor-parallel rank {tp_rank} of {tp_size}")
    if name in EMBEDDINGS:
        _expect(name, shape, (model.vocab, model.hidden))
        kept = name != "lm_head.weight" or not model.tied_embeddings
        return _vocabulary(name, model, tp_rank, tp_size) if kept else None
    if _WHOLE.fullmatch(name):
        whole = tuple(slice(0, size) for size in shape)
        return LocalSlice(name, whole, whole)
    if match := _EXPERT.fullmatch(name):
        prefix, expert, projection = match.groups()
        if int(expert) >= model.experts:
            raise ValueError(f"tensor {name!r}: the model has {model.experts} experts")
        _expect(name, shape, model.projections[projection])
        if not expert_parallel:
            return _expert(name, prefix, int(expert), projection, model, tp_rank, tp_size)
        each = _divide(name, model.experts, tp_size)
        if int(expert) // each != tp_rank:
            return None
        return _expert(name, prefix, int(expert) % each, projection, model, 0, 1)
    if match := _ADAPTER.fullmatch(name):
        return _adapter(name, *match.groups(), shape, model, tp_rank, tp_size)
    match = _LAYER.fullmatch(name)
    if match is None:
        raise ValueError(
            f"tensor {name!r} is not one of a Qwen2, Qwen3, Qwen3-MoE or Llama decoder"
        )
    prefix, block, projection, kind = match.groups()
    bias = kind == "bias"
    if block == "self_attn" and projection in ("q_proj", "k_proj", "v_proj"):
        return _qkv(name, prefix, projection, kind, shape, model, tp_rank, tp_size)
    if block == "mlp" and projection in ("gate_proj", "up_proj"):
        rows = _divide(name, model.intermediate, tp_size)
        _expect(name, shape, (model.intermediate,) if bias else (model.intermediate, model.hidden))
        start = rows if projection == "up_proj" else 0
        return _rows(f"{prefix}mlp.gate_up_proj.{kind}", start, tp_rank * rows, rows, shape)
    if (block, projection) in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        width = model.heads * model.head_dim if block == "self_attn" else model.intermediate
        _expect(name, shape, (model.hidden,) if bias else (model.hidden, width))
        if bias:  # whole on every rank; vLLM adds it on rank 0
            return LocalSlice(name, (slice(0, model.hidden),), (slice(0, model.hidden),))
        columns = _divide(name, width, tp_size)
        return LocalSlice(
            name,
            (slice(0, model.hidden), slice(0, columns)),
            (slice(0, model.hidden), slice(tp_rank * columns, (tp_rank + 1) * columns)),
        )
    raise ValueError(f"tensor {name!r} is not one of a Qwen2, Qwen3, Qwen3-MoE or Llama decoder")


def _adapter(
    name: str,
    matrix: str,
    projection: str,
    kind: str,
    shape: tuple[int, ...],
    model: ModelShape,
    tp_rank: int,
    tp_size: int,
) -> LocalSlice:
    """The part of an adapter's matrix beside the part of the base matrix that `tp_rank` holds. It
    has the same columns of A (rank, columns), or the same rows of B (rows, rank). The destination
    begins at 0 in the engine's slot, whose LoRA rank may be larger."""
    whole = model.projections.get(projection)
    if whole is None:
        raise ValueError(f"tensor {name!r} is beside no projection of a layer")
    rank = shape[0] if kind == "A" else shape[-1]
    _expect(name, shape, (rank, whole[1]) if kind == "A" else (whole[0], rank))
    rows, columns = slices(f"{matrix}.weight", whole, model, tp_rank, tp_size).source
    if kind == "A":
        source, local = (slice(0, rank), columns), columns.stop - columns.start
        return LocalSlice(name, (slice(0, rank), slice(0, local)), source)
    source, local = (rows, slice(0, rank)), rows.stop - rows.start
    return LocalSlice(name, (slice(0, local), slice(0, rank)), source)


def _expert(
    name: str,
    prefix: str,
    number: int,
    projection: str,
    model: ModelShape,
    tp_rank: int,
    tp_size: int,
) -> LocalSlice:
    """The part of an expert that `tp_rank` holds; `number` counts the experts of this rank."""
    width = _divide(name, model.expert_intermediate, tp_size)
    own, hidden = slice(tp_rank * width, (tp_rank + 1) * width), slice(0, model.hidden)
    if projection == "down_proj":
        below = slice(number * model.hidden, (number + 1) * model.hidden)
        return LocalSlice(
            f"{prefix}routed_experts.w2_weight", (below, slice(0, width)), (hidden, own)
        )
    start = (2 * number + (projection == "up_proj")) * width
    return LocalSlice(
        f"{prefix}routed_experts.w13_weight", (slice(start, start + width), hidden), (own, hidden)
    )


def _vocabulary(name: str, model: ModelShape, tp_rank: int, tp_size: int) -> LocalSlice:
    padded = -(-model.vocab // VOCAB_PADDING) * VOCAB_PADDING
    per_rank = _divide(name, padded, tp_size)
    first, last = (min(rank * per_rank, model.vocab) for rank in (tp_rank, tp_rank + 1))
    return _rows(name, 0, first, last - first, (model.vocab, model.hidden))


def _qkv(
    name: str,
    prefix: str,
    projection: str,
    kind: str,
    shape: tuple[int, ...],
    model: ModelShape,
    tp_rank: int,
    tp_size: int,
) -> LocalSlice:
    """The part of q, k or v in this rank's qkv_proj, whose rows are the rank's query heads, then
    its key heads, then its value heads."""
    heads = model.heads if projection == "q_proj" else model.kv_heads
    total = heads * model.head_dim
    _expect(name, shape, (total,) if kind == "bias" else (total, model.hidden))
    q_rows = _divide(name, model.heads, tp_size) * model.head_dim
    if tp_size >= model.kv_heads:  # each key-value head is on tp_size / kv_heads ranks
        kv_rows, kv_rank = model.head_dim, tp_rank // _divide(name, tp_size, model.kv_heads)
    else:
        kv_rows, kv_rank = _divide(name, model.kv_heads, tp_size) * model.head_dim, tp_rank
    start = {"q_proj": 0, "k_proj": q_rows, "v_proj": q_rows + kv_rows}[projection]
    rows, rank = (q_rows, tp_rank) if projection == "q_proj" else (kv_rows, kv_rank)
    return _rows(f"{prefix}self_attn.qkv_proj.{kind}", start, rank * rows, rows, shape)


def _rows(
    parameter: str, destination: int, source: int, rows: int, shape: tuple[int, ...]
) -> LocalSlice:
    rest = tuple(slice(0, size) for size in shape[1:])
    return LocalSlice(
        parameter,
        (slice(destination, destination + rows), *rest),
        (slice(source, source + rows), *rest),
    )


def _divide(name: str, total: int, parts: int) -> int:
    if total % parts:
        raise ValueError(f"tensor {name!r}: {total} can't be split into {parts}")
    return total // parts


def _expect(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise ValueError(
            f"tensor {name!r} has shape {tuple(found)}; the model's config says {expected}"
        )
