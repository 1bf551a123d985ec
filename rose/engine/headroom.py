"""GPU memory for the activations of a step, which an engine that shares its device keeps for
itself.

vLLM reserves it by taking less KV cache, but not where it is told how much to take
(`kv_cache_memory_bytes`); and when it captures CUDA graphs it gives back to the device what its
profile run had of it. The other engine's weights or either's pages of KV cache would take it, and
this engine would end at its next full step. So what the profile run took is measured, and when all
graphs are captured torch's allocator takes so much as one piece and keeps it, of which it cuts what
steps want.

Left out: what a step takes beyond vLLM's profile run, as of log-probabilities of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rose.engine.vmm import SPARE

FRAGMENTS = 1.125  # of what steps use: pieces are cut, and not every rest is of use
GIB = 2**30


class Headroom:
    """Of one worker, on its CUDA device. `nbytes`: of the largest step, known after `measured`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.nbytes = device, 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around vLLM's profile run, a largest step. Raises `RuntimeError` for want of memory."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                "vLLM's profile run, a step of the largest size, found too little GPU memory "
                f"beside the weights; {self._remedy()}"
            ) from error
        peak = torch.cuda.max_memory_allocated(self.device)
        lasting = torch.cuda.memory_allocated(self.device)
        self.nbytes = int(FRAGMENTS * (peak - lasting))

    def keep(self, spare: int = SPARE) -> None:
        """From here on this engine has memory for any step. Raises `RuntimeError` when the device
        hasn't so much, and `spare` bytes beyond it."""
        torch.cuda.empty_cache()
        try:
            torch.empty(self.nbytes, dtype=torch.int8, device=self.device)
        except torch.OutOfMemoryError:
            left = -1
        else:
            left = torch.cuda.mem_get_info(self.device)[0]
        if left < spare:
            torch.cuda.empty_cache()
            raise RuntimeError(
                f"the steps of this engine take {self.nbytes / GIB:.2f} GiB of GPU memory beside "
                f"weights and KV cache (measured in vLLM's profile run), and {spare / GIB:.2f} "
                f"must stay free; {self._remedy()}"
            )

    def _remedy(self) -> str:
        free, total = torch.cuda.mem_get_info(self.device)
        return (
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free on {self.device}, which another "
            "engine may share. Lower serving.online.kv_cache_gib or serving.lending.kv_gib, the "
            "KV cache of both, or this engine's max_batched_tokens and max_sequences (the online "
            "server's: serving.online.*, the rollout engine's: rollout.*)"
        )
