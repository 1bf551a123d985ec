"""The KV cache of a simulated rollout engine, counted in tokens, not blocks.

The KV of a sequence that ended or was removed stays cached as a prefix of its trajectory. The least
recently used trajectory is evicted first, from its last token backwards, as vLLM frees a request's
last blocks first. The prompt of a group is held once for all its trajectories.
"""

from __future__ import annotations

import math
from collections import OrderedDict

# The share of the KV cache that stays free when a sequence is admitted beside others.
WATERMARK = 0.01  # ours: vLLM 0.32 leaves none by default, and preempts what it has just admitted


class KvCache:
    """The KV memory that an engine's sequences hold, and the prefixes that stay cached."""

    def __init__(self, capacity: int, prefix_caching: bool) -> None:
        self.capacity, self._prefix_caching = capacity, prefix_caching
        self.held = 0  # tokens in use
        self._cached = 0  # tokens that may be evicted
        # trajectory -> (own tokens, group), the least recently used first
        self._cache: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._prompts: dict[str, list[int]] = {}  # group -> [tokens, number of users]

    @property
    def free(self) -> float:
        """Tokens not in use; negative if a lone sequence outgrew the capacity."""
        return self.capacity - self.held

    def has_room(self, group: str, prompt: int, context: int) -> bool:
        """Return whether a sequence with these token counts can be admitted beside others."""
        own = context - (prompt if group in self._prompts else 0)
        return self.held + own + WATERMARK * self.capacity <= self.capacity

    def allocate(self, key: str, group: str, prompt: int, context: int) -> tuple[int, int]:
        """Hold the context of trajectory `key`. Return (tokens held besides the group's prompt,
        tokens to prefill)."""
        found = self._cache.pop(key, None)
        cached = 0
        if found is not None:
            cached = min(found[0], context - prompt)
            self._cached -= found[0]
        own = todo = context
        if self._prefix_caching:
            own -= prompt
            if group in self._prompts:
                # A cached trajectory is a user of the prompt already.
                self._prompts[group][1] += found is None
                todo -= prompt
            else:
                self._prompts[group] = [prompt, 1]
                self.held += prompt
        self.held += own
        self.fit()
        return own, max(todo - cached, 1)  # vLLM always computes the last token.

    def release(self, key: str, group: str, own: int, todo: int) -> None:
        """Free the memory of a sequence that holds `own` tokens besides the group's prompt and
        still has `todo` to prefill. The computed tokens stay cached."""
        self.held -= own
        if not self._prefix_caching:
            return
        # Not even the group's prompt is computed completely: drop it with this sequence.
        if todo > own:
            self._unshare(group)
            return
        self._cache[key] = (own - todo, group)
        self._cached += own - todo
        self.fit()

    def fit(self) -> None:
        """Evict cached tokens, the least recently used first, until all tokens fit."""
        while self._cache and (over := self.held + self._cached - self.capacity) > 0:
            self._evict(math.ceil(over))

    def clear(self) -> None:
        """Evict all cached tokens."""
        while self._cache:
            self._evict(self._cached)

    def _evict(self, tokens: int) -> None:
        """Evict up to `tokens` tokens of the trajectory that was used least recently."""
        key, (own, group) = next(iter(self._cache.items()))
        gone = min(own, tokens)
        self._cached -= gone
        if gone < own:
            self._cache[key] = (own - gone, group)
        else:
            del self._cache[key]
            self._unshare(group)

    def _unshare(self, group: str) -> None:
        """Count one user less of the group's prompt, and free the prompt after its last user."""
        prompt = self._prompts[group]
        prompt[1] -= 1
        if not prompt[1]:
            self.held -= prompt[0]
            del self._prompts[group]
