"""Tests of rose/engine/slots.py: the KV blocks of decoding requests are vLLM's own, and are found
without its search in most steps."""

import random

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from rose.engine import slots

BLOCK, BLOCKS, LIMIT = 4, 24, 64
slots.install()
init_none_hash(sha256)
hasher = get_request_block_hasher(BLOCK, sha256)


def manager(caching: bool) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, LIMIT, BLOCK, BLOCK, enable_caching=caching)


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=LIMIT), None, block_hasher=hasher)


def decode(allocate, caching: bool, lookahead: int) -> list:
    """Run requests of random lengths step by step until the blocks are used up. Return what each
    call gave and left."""
    dice, kv, found = random.Random(5), manager(caching), []
    prompts = [[dice.randrange(9) for _ in range(n)] for n in (3, 8, 9)]
    running = [request(str(i), prompt) for i, prompt in enumerate(prompts)]
    while len(running) > 1:
        for one in list(running):
            first = not one.num_computed_tokens
            new = one.num_tokens if first else one.num_tokens - one.num_computed_tokens
            given = allocate(kv, one, new, num_lookahead_tokens=lookahead)
            if given is None:
                kv.free(one)
                running.remove(one)
                found.append((one.request_id, None))
                continue
            one.num_computed_tokens += new
            one.append_output_token_ids([dice.randrange(9)] * dice.choice((1, 1, 2)))
            blocks = kv.get_block_ids(one.request_id)
            cached = kv.coordinator.single_type_managers[0].num_cached_block.get(one.request_id)
            free = kv.block_pool.get_num_free_blocks()
            found.append((one.request_id, given.get_block_ids(), blocks, cached, free))
    return found


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_blocks_are_those_that_vllm_finds(caching, lookahead):
    patched = KVCacheManager.allocate_slots
    assert decode(patched, caching, lookahead) == decode(patched.__wrapped__, caching, lookahead)


def test_a_request_with_room_is_not_searched_for(monkeypatch):
    kv, one, searched = manager(True), request("a", [1, 2, 3, 4, 5]), []
    search = kv.coordinator.allocate_new_blocks
    counted = lambda *words: searched.append(1) or search(*words)  # noqa: E731
    monkeypatch.setattr(kv.coordinator, "allocate_new_blocks", counted)
    for _ in range(12):
        new = one.num_tokens - one.num_computed_tokens
        assert kv.allocate_slots(one, new) is not None
        one.num_computed_tokens += new
        one.append_output_token_ids(7)
    # The prompt, and where a block becomes full or another begins.
    assert len(searched) < 8
