"""The place of each Hugging Face tensor in vLLM's parameters, for every tensor-parallel rank.

Pure functions. They cover the decoder family that Qwen2, Qwen3 and Llama share:
- q, k and v are fused into `qkv_proj` (with bias in Qwen2), gate and up into `gate_up_proj`;
- rows of fused layers and columns of `o_proj` and `down_proj` are split over ranks;
- key-value heads are replicated where there are fewer of them than ranks;
- the vocabulary is padded to a multiple of 64 and split;
- norms, and the routers of Qwen3's mixtures, are on every rank;
- a layer's experts are in two parameters, one expert below the other: `w13_weight`, with gate above
  up, and `w2_weight`. An expert is split like an MLP or, with expert parallelism, is whole on one
  rank;
- adapters have one pair of matrices for each projection, also for those that are fused.

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
    """Return the rows and columns of HF tensor `name` at which a rank's part begins or ends,
    ascending, for all tensor-parallel `degrees`. Degrees that don't divide the model are skipped,
    as no engine can have them. Raises `ValueError` as `slices` does."""
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
    """Return the part of HF tensor `name` that rank `tp_rank` of `tp_size` holds.

    None for `lm_head.weight` of a model with tied embeddings, which vLLM keeps only once, and for
    an expert of another rank. `destination` indexes a parameter with three dimensions as if its
    first two were flattened into one.

    Raises `ValueError` for an unknown tensor, a shape that differs from the model's, or a `tp_size`
    that doesn't divide the dimension to be split."""
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tensor-parallel rank {tp_rank} of {tp_size}")
    tensor = _Tensor(name, shape, model, tp_rank, tp_size)
    if name in EMBEDDINGS:
        tensor.expect((model.vocab, model.hidden))
        kept = name != "lm_head.weight" or not model.tied_embeddings
        return tensor.vocabulary() if kept else None
    if _WHOLE.fullmatch(name):
        whole = tuple(slice(0, size) for size in shape)
        return LocalSlice(name, whole, whole)
    if match := _EXPERT.fullmatch(name):
        prefix, number, projection = match[1], int(match[2]), match[3]
        if number >= model.experts:
            raise ValueError(f"tensor {name!r}: the model has {model.experts} experts")
        tensor.expect(model.projections[projection])
        if not expert_parallel:
            return tensor.expert(prefix, number, projection)
        each = tensor.divide(model.experts)
        if number // each != tp_rank:
            return None
        return tensor._replace(rank=0, size=1).expert(prefix, number % each, projection)
    if match := _ADAPTER.fullmatch(name):
        return tensor.adapter(*match.groups())
    if match := _LAYER.fullmatch(name):
        prefix, block, projection, kind = match.groups()
        bias = kind == "bias"
        if block == "self_attn" and projection in ("q_proj", "k_proj", "v_proj"):
            return tensor.qkv(prefix, projection, kind)
        if block == "mlp" and projection in ("gate_proj", "up_proj"):
            rows = tensor.divide(model.intermediate)
            tensor.expect((model.intermediate,) if bias else (model.intermediate, model.hidden))
            start = rows if projection == "up_proj" else 0
            return _rows(f"{prefix}mlp.gate_up_proj.{kind}", start, tp_rank * rows, rows, shape)
        if (block, projection) in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            width = model.heads * model.head_dim if block == "self_attn" else model.intermediate
            tensor.expect((model.hidden,) if bias else (model.hidden, width))
            hidden = slice(0, model.hidden)
            if bias:  # whole on every rank; vLLM adds it on rank 0
                return LocalSlice(name, (hidden,), (hidden,))
            columns = tensor.divide(width)
            own = slice(tp_rank * columns, (tp_rank + 1) * columns)
            return LocalSlice(name, (hidden, slice(0, columns)), (hidden, own))
    raise ValueError(f"tensor {name!r} is not one of a Qwen2, Qwen3, Qwen3-MoE or Llama decoder")


class _Tensor(NamedTuple):
    """A tensor of the model's folder. Tensor-parallel rank `rank` of `size` holds a part of it."""

    name: str
    shape: tuple[int, ...]
    model: ModelShape
    rank: int
    size: int

    def adapter(self, matrix: str, projection: str, kind: str) -> LocalSlice:
        """Return this rank's part of an adapter's matrix: the same columns of A (rank, columns), or
        rows of B (rows, rank), as its part of the base matrix. The destination begins at 0 in the
        engine's slot, whose LoRA rank may be larger than the adapter's."""
        whole = self.model.projections.get(projection)
        if whole is None:
            raise ValueError(f"tensor {self.name!r} is beside no projection of a layer")
        rank = self.shape[0] if kind == "A" else self.shape[-1]
        self.expect((rank, whole[1]) if kind == "A" else (whole[0], rank))
        base = slices(f"{matrix}.weight", whole, self.model, self.rank, self.size)
        rows, columns = base.source
        source = (slice(0, rank), columns) if kind == "A" else (rows, slice(0, rank))
        local = tuple(slice(0, part.stop - part.start) for part in source)
        return LocalSlice(self.name, local, source)

    def expert(self, prefix: str, number: int, projection: str) -> LocalSlice:
        """Return this rank's part of an expert; `number` counts the rank's experts."""
        width = self.divide(self.model.expert_intermediate)
        own, hidden = slice(self.rank * width, (self.rank + 1) * width), self.model.hidden
        whole, experts = slice(0, hidden), f"{prefix}routed_experts"
        if projection == "down_proj":
            rows = slice(number * hidden, (number + 1) * hidden)
            return LocalSlice(f"{experts}.w2_weight", (rows, slice(0, width)), (whole, own))
        start = (2 * number + (projection == "up_proj")) * width
        rows = slice(start, start + width)
        return LocalSlice(f"{experts}.w13_weight", (rows, whole), (own, whole))

    def vocabulary(self) -> LocalSlice:
        """Return this rank's rows of an embedding. vLLM pads the vocabulary before it is split."""
        vocab = self.model.vocab
        per_rank = self.divide(-(-vocab // VOCAB_PADDING) * VOCAB_PADDING)
        first, last = (min(rank * per_rank, vocab) for rank in (self.rank, self.rank + 1))
        return _rows(self.name, 0, first, last - first, self.shape)

    def qkv(self, prefix: str, projection: str, kind: str) -> LocalSlice:
        """Return the part of q, k or v in this rank's qkv_proj. Its rows are the rank's query
        heads, then the key heads, then the value heads."""
        model = self.model
        total = (model.heads if projection == "q_proj" else model.kv_heads) * model.head_dim
        self.expect((total,) if kind == "bias" else (total, model.hidden))
        q_rows = self.divide(model.heads) * model.head_dim
        if self.size >= model.kv_heads:  # each key-value head is on size / kv_heads ranks
            copies = self._replace(size=model.kv_heads).divide(self.size)
            kv_rows, kv_rank = model.head_dim, self.rank // copies
        else:
            kv_rows, kv_rank = self.divide(model.kv_heads) * model.head_dim, self.rank
        start = {"q_proj": 0, "k_proj": q_rows, "v_proj": q_rows + kv_rows}[projection]
        rows, rank = (q_rows, self.rank) if projection == "q_proj" else (kv_rows, kv_rank)
        return _rows(f"{prefix}self_attn.qkv_proj.{kind}", start, rank * rows, rows, self.shape)

    def divide(self, total: int) -> int:
        """Return a rank's share of `total`. Raises `ValueError` if it is not whole."""
        if total % self.size:
            raise ValueError(f"tensor {self.name!r}: {total} can't be split into {self.size}")
        return total // self.size

    def expect(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless the tensor has this shape."""
        if tuple(self.shape) != shape:
            raise ValueError(
                f"tensor {self.name!r} has shape {tuple(self.shape)}; the model's config says "
                f"{shape}"
            )


def _rows(
    parameter: str, destination: int, source: int, rows: int, shape: tuple[int, ...]
) -> LocalSlice:
    """Return the copy of `rows` whole rows from row `source` to row `destination`."""
    rest = tuple(slice(0, size) for size in shape[1:])
    return LocalSlice(
        parameter,
        (slice(destination, destination + rows), *rest),
        (slice(source, source + rows), *rest),
    )
