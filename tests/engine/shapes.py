"""Shapes of a decoder's tensors, as Hugging Face names them and as vLLM has them: written out here,
not taken from rose/engine/layout.py."""

from rose.config import ModelShape

Extents = dict[str, tuple[int, ...]]


def tensors(shape: ModelShape, bias: bool) -> Extents:
    """Hugging Face's: Qwen2 has a `bias`, and Qwen3 norms of heads, which are here always."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    h, i = shape.hidden, shape.intermediate
    layer: Extents = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        layer[f"self_attn.{name}_proj.weight"] = (rows, h)
        if bias:
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
    layer |= {"self_attn.o_proj.weight": (h, q), "mlp.gate_proj.weight": (i, h)}
    layer |= {"mlp.up_proj.weight": (i, h), "mlp.down_proj.weight": (h, i)}
    return _model(shape, shape.vocab, layer)


def parameters(shape: ModelShape, bias: bool, ranks: int) -> Extents:
    """vLLM's, on one of so many tensor-parallel ranks."""
    q, kv = shape.heads // ranks * shape.head_dim, max(1, shape.kv_heads // ranks) * shape.head_dim
    h, i = shape.hidden, shape.intermediate // ranks
    layer: Extents = {"self_attn.qkv_proj.weight": (q + 2 * kv, h)}
    if bias:
        layer["self_attn.qkv_proj.bias"] = (q + 2 * kv,)
    layer |= {"self_attn.o_proj.weight": (h, q), "mlp.gate_up_proj.weight": (2 * i, h)}
    layer |= {"mlp.down_proj.weight": (h, i)}
    padded = -(-shape.vocab // 64) * 64
    return _model(shape, padded // ranks, layer)


def _model(shape: ModelShape, vocabulary: int, layer: Extents) -> Extents:
    """All layers with their norms, and what is outside of them."""
    hidden, head = (shape.hidden,), (shape.head_dim,)
    layer |= {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    layer |= {"self_attn.q_norm.weight": head, "self_attn.k_norm.weight": head}
    found: Extents = {"model.embed_tokens.weight": (vocabulary, shape.hidden)}
    if not shape.tied_embeddings:
        found["lm_head.weight"] = (vocabulary, shape.hidden)
    for number in range(shape.layers):
        found |= {f"model.layers.{number}.{name}": extent for name, extent in layer.items()}
    return found | {"model.norm.weight": hidden}
