"""Where vLLM's own KV cache configurations put a block, and which of them can't be lent."""

import pytest
import torch

from rose.parts.lending.vllm.blocks import Layout, layout_of

pytestmark = pytest.mark.slow  # imports vLLM
BLOCKS, LAYERS = 10, 3


def cache(name: str, groups: int = 1, size: int | None = None):
    """Three layers of 4 heads of 32, 16 tokens a block, in float32."""
    from vllm.v1 import kv_cache_interface as kv

    spec = kv.FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=32, dtype=torch.float32)
    page, names = spec.page_size_bytes, [f"layer.{i}" for i in range(LAYERS)]
    strides = (page, LAYERS * page) if name[0] == "B" else (BLOCKS * page, page)
    tensors = [kv.KVCacheTensor(size or BLOCKS * LAYERS * page, names, *strides)]
    group = kv.KVCacheGroupSpec(names, spec)
    config = kv.KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group] * groups
    )
    return config, page


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_block_has_a_span_in_every_layers_region_or_one_with_blocks_outermost(name):
    config, page = cache(name)
    starts, strides = tuple(layer * BLOCKS * page for layer in range(LAYERS)), (page,) * LAYERS
    if name[0] == "B":
        starts, strides = (0,), (LAYERS * page,)
    found = layout_of(config, name)
    assert found == Layout(BLOCKS * LAYERS * page, BLOCKS, starts, strides)
    assert found.block_bytes == LAYERS * page


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("LHBNC", {}, "scatters a block over its heads"),
        ("LBHNC", {"groups": 2}, "has 2 groups"),
        ("LBHNC", {"size": 100_000}, "leave its 100000 bytes"),
    ],
)
def test_a_cache_that_cannot_be_lent_by_block_is_refused(name, changes, says):
    with pytest.raises(ValueError, match=says):
        layout_of(cache(name, **changes)[0], name)
