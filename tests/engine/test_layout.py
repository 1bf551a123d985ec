"""Slices put together over all ranks are the Hugging Face tensors: checked with vLLM's own rules on
CPU tensors."""

import functools

import msgspec
import pytest
import torch

from rose.config import ModelShape
from rose.engine.layout import slices
from tests.engine import shapes

SIZES = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 8, "kv_heads": 2, "head_dim": 4}
SHAPE = ModelShape(**SIZES, vocab=263, tied_embeddings=False)
LAYER = "model.layers.0."


def load(tp: int) -> tuple[dict, list[dict]]:
    """(tensors by their Hugging Face names, each rank's by vLLM's), in float64: in float32 sums of
    parts differ by more than a misplaced small value would."""
    generator = torch.Generator().manual_seed(0)
    every = shapes.tensors(SHAPE, bias=True)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    source = {name: draw(shape) for name, shape in every.items()}
    ranks, extents = [], shapes.parameters(SHAPE, True, tp)
    for rank in range(tp):
        live = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in extents.items()}
        for name, tensor in source.items():
            parameter, destination, part = slices(name, tuple(tensor.shape), SHAPE, rank, tp)
            live[parameter][destination] = tensor[part]
        ranks.append(live)
    return source, ranks


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_rank_computes_its_part_of_the_layer(tp):
    """Attention heads and MLP outputs of the ranks, added up as vLLM's all-reduce does, equal the
    whole layer's."""
    source, ranks = load(tp)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    attn, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    of = {p: [source[f"{attn}{p}_proj.{kind}"] for kind in ("weight", "bias")] for p in "qkv"}
    q, k, v = (x @ weight.T + bias for weight, bias in of.values())

    def attend(q, k, v):  # (5, heads*4), (5, kv*4) -> (5, heads*4), with grouped key-value heads
        q, k, v = (t.view(5, -1, 4) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(5, -1)

    whole_attention = attend(q, k, v) @ source[f"{attn}o_proj.weight"].T
    gate, up = (x @ source[f"{mlp}{p}_proj.weight"].T for p in ("gate", "up"))
    whole_mlp = (torch.nn.functional.silu(gate) * up) @ source[f"{mlp}down_proj.weight"].T
    attention, output = torch.zeros(2, 5, 32, dtype=torch.float64)
    for live in ranks:
        qkv = x @ live[f"{attn}qkv_proj.weight"].T + live[f"{attn}qkv_proj.bias"]
        sizes = [32 // tp, max(1, 2 // tp) * 4, max(1, 2 // tp) * 4]
        attention += attend(*qkv.split(sizes, -1)) @ live[f"{attn}o_proj.weight"].T
        g, u = (x @ live[f"{mlp}gate_up_proj.weight"].T).chunk(2, -1)
        output += (torch.nn.functional.silu(g) * u) @ live[f"{mlp}down_proj.weight"].T
    torch.testing.assert_close(attention, whole_attention, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(output, whole_mlp, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_an_adapters_product_on_each_rank_is_what_stands_beside_the_ranks_weights(tp):
    every = shapes.tensors(SHAPE, bias=False)
    matrices = {name: shape for name, shape in every.items() if name.endswith("_proj.weight")}
    for name, (rows, columns) in matrices.items():
        a, b = torch.randn(3, columns), torch.randn(rows, 3)
        for rank in range(tp):
            live = {}
            for kind, whole in (("A", a), ("B", b)):
                at = name.replace(".weight", f".lora_{kind}.weight")
                found = slices(at, tuple(whole.shape), SHAPE, rank, tp)
                part = whole[found.source]
                live[kind] = torch.zeros(*((5, part.shape[1]) if kind == "A" else (len(part), 5)))
                live[kind][found.destination] = part  # a slot of rank 5
                assert found.parameter == at
            weight = slices(name, (rows, columns), SHAPE, rank, tp)
            torch.testing.assert_close(live["B"] @ live["A"], (b @ a)[weight.source])


MIXTURE = msgspec.structs.replace(SHAPE, experts=4, experts_per_token=2, expert_intermediate=16)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_experts_of_all_ranks_together_compute_each_experts_mlp(tp, expert_parallel):
    """vLLM's parameters: (experts, 2 x width, hidden), gate above up, and (experts, hidden,
    width)."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    kinds = [f"{kind}_proj" for kind in ("gate", "up", "down")]
    name_of = f"{LAYER}mlp.experts.{{}}.{{}}.weight".format
    drawn = {(n, kind): draw(MIXTURE.projections[kind]) for n in range(4) for kind in kinds}
    source = {name_of(*at): tensor for at, tensor in drawn.items()}
    held, width = (4 // tp, 16) if expert_parallel else (4, 16 // tp)
    x, found = draw(5, 32), {}
    for rank in range(tp):
        w13, w2 = torch.zeros(held, 2 * width, 32), torch.zeros(held, 32, width)
        live = {"w13_weight": w13.double(), "w2_weight": w2.double()}
        for name, tensor in source.items():
            place = slices(name, tuple(tensor.shape), MIXTURE, rank, tp, expert_parallel)
            if place is not None:
                prefix, _, parameter = place.parameter.rpartition(".")
                assert prefix == f"{LAYER}mlp.experts.routed_experts"
                rows = live[parameter].view(-1, live[parameter].shape[-1])
                rows[place.destination] = tensor[place.source]
        for number in range(held):
            expert = rank * held + number if expert_parallel else number
            gate, up = (x @ live["w13_weight"][number].T).chunk(2, -1)
            made = (torch.nn.functional.silu(gate) * up) @ live["w2_weight"][number].T
            found[expert] = found.get(expert, 0) + made
    for expert in range(4):
        gate, up, down = (drawn[expert, kind] for kind in kinds)
        whole = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        torch.testing.assert_close(found[expert], whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_vocabulary_is_split_and_its_padding_stays_zero(tp):
    source, ranks = load(tp)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = torch.cat([live[name] for live in ranks])
        assert torch.equal(whole[:263], source[name]) and not whole[263:].any()


MISFITS = [
    ("mlp.experts.0.w1.weight", (4, 4), 1, "not one of"),
    ("mlp.experts.0.up_proj.weight", (48, 32), 1, "has 0 experts"),
    ("self_attn.gate_proj.weight", (48, 32), 1, "not one of"),
    ("self_attn.q_proj.weight", (32, 32), 3, "can't be split"),
    ("mlp.gate_proj.weight", (48, 31), 1, "config says"),
    ("mlp.gate_proj.lora_A.weight", (3, 31), 1, "config says"),
    ("mlp.gate_proj.lora_B.weight", (47, 3), 1, "config says"),
    ("mlp.router.lora_B.weight", (48, 3), 1, "beside no projection"),
]


@pytest.mark.parametrize("name, shape, tp, says", MISFITS)
def test_what_does_not_fit_is_refused(name, shape, tp, says):
    with pytest.raises(ValueError, match=says):
        slices(f"{LAYER}{name}", shape, SHAPE, 0, tp)
