"""KV blocks that an engine may not use are in nobody's hands, and their memory is the system's."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.coserving.pool import MAP, RELEASE, Pool

pytestmark = pytest.mark.slow  # imports vLLM
BLOCKS, BYTES = 33, 4096


def made():
    from vllm.v1.core.block_pool import BlockPool

    blocks = BlockPool(BLOCKS, enable_caching=False, hash_block_size=16)
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=[SimpleNamespace(size=BLOCKS * BYTES)])
    pool, memory = Pool(SimpleNamespace(block_pool=blocks), config), set()

    def call(method, ids):
        assert len(ids) == len(set(ids))
        if method == MAP:
            assert not memory & set(ids)
            memory.update(ids)
        else:
            assert method == RELEASE and memory >= set(ids)
            memory.difference_update(ids)

    return pool, blocks, memory, call


def test_all_but_vllms_own_block_is_used_at_first():
    pool, _, memory, call = made()
    pool.begin(call)
    assert pool.total == pool.limit_bytes == 32 * BYTES and memory == set(range(1, 33))


@settings(max_examples=60, deadline=None)
@given(orders=st.lists(st.one_of(st.tuples(st.just("limit"), st.integers(0, 40 * BYTES)),
                                 st.tuples(st.just("take"), st.integers(0, 12)), st.tuples(st.just("free"), st.just(0))),
                       max_size=30), first=st.integers(0, 33 * BYTES), adjacent=st.sampled_from([1, 8]))
def test_memory_is_mapped_for_what_may_be_used_and_held_blocks_are_never_taken(orders, first, adjacent):
    pool, blocks, memory, call = made()
    pool.limit(first)
    pool.begin(call, adjacent)
    held = []
    for what, value in orders:
        if what == "limit":
            excess = pool.excess(value)
            reached = pool.limit(value)
            assert reached == max(min(value // BYTES, 32), len(held)) * BYTES
            assert excess == max(0, len(held) - min(value // BYTES, 32))
        elif what == "take" and value <= blocks.get_num_free_blocks():
            held += blocks.get_new_blocks(value)
        elif what == "free":
            blocks.free_blocks(held)
            held = []
        assert pool.used == len(held) * BYTES and pool.free == pool.limit_bytes - pool.used
        assert len(memory) * BYTES == pool.limit_bytes and memory >= {block.block_id for block in held}


def test_where_pages_hold_several_blocks_memory_goes_from_one_end():
    pool, blocks, memory, call = made()
    pool.begin(call, adjacent=4)
    blocks.free_blocks(reversed(blocks.get_new_blocks(32)))  # the free ones in any order
    pool.limit(20 * BYTES)
    assert memory == set(range(1, 21))
    pool.limit(25 * BYTES)
    pool.limit(10 * BYTES)
    assert len(memory) == 10 and memory == set(range(1, 11))
