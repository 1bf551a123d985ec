"""Skip vLLM's search for KV blocks when a request needs no new block.

A request gets a block of 16 tokens once in 16 steps. In the other steps vLLM still goes through all
stages of `allocate_slots`. Scheduling 256 decoding requests took 3.9 ms on the host of an H200, and
2.1 ms without these stages.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager


def install() -> None:
    """Patch vLLM in this process; a second call changes nothing."""
    original = KVCacheManager.allocate_slots
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def allocate_slots(self, request, num_new_tokens, *more, num_lookahead_tokens=0, **rest):
        if not (more or rest) and _has_slots(self, request, num_new_tokens, num_lookahead_tokens):
            return self.empty_kv_cache_blocks
        return original(
            self, request, num_new_tokens, *more, num_lookahead_tokens=num_lookahead_tokens, **rest
        )

    KVCacheManager.allocate_slots = allocate_slots


def _has_slots(manager: Any, request: Any, new: int, lookahead: int) -> bool:
    """True if a running request's blocks have room for `new` tokens and `lookahead` more, and none
    becomes full, because vLLM must cache full blocks."""
    groups = manager.coordinator.single_type_managers
    group, name = groups[0], request.request_id
    # vLLM has this count for running requests only, and only with prefix caching.
    cached = group.num_cached_block.get(name)
    if cached is None or len(groups) > 1 or type(group) is not FullAttentionManager or new < 1:
        return False
    after = request.num_computed_tokens + new
    return (
        min(after + lookahead, manager.max_model_len)
        <= len(group.req_to_blocks[name]) * group.block_size
        and min(after, request.num_tokens) // group.block_size <= cached
    )
