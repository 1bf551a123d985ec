"""Reserve GPU memory for the activations of an engine step, in engines that share a device.

vLLM leaves room for activations by allocating less KV cache, but not when
`kv_cache_memory_bytes` sets the cache's size. And when vLLM captures CUDA graphs, it releases the
memory of its profile run. The other engine's weights, or KV pages of either engine, could then take
this memory, and this engine would fail at its next full step.

So we measure the peak of the profile run. Once all graphs are captured, torch's caching allocator
allocates that much memory in one segment, and keeps it for later steps. Steps that allocate more
than the profile run, such as for log-probabilities of prompts, aren't covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rose.parts.lending.vllm.vmm import SPARE

# Factor on the measured peak. It covers fragmentation: the allocator splits the segment, and some
# remainders are too small for use.
FRAGMENTS = 1.125
GIB = 2**30


class Headroom:
    """The memory that one vLLM worker's steps need on its CUDA device. `nbytes` is the largest
    step's need times FRAGMENTS; 0 until `measured` has run."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.nbytes = device, 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure vLLM's profile run, a step of the largest size, within this context. Raises
        `RuntimeError` when it runs out of memory."""
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
        """Reserve `nbytes` in torch's allocator, so that every later step has its memory. Raises
        `RuntimeError` unless the device has `nbytes` free, and `spare` bytes beyond them."""
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
        """Return the end of an error's text: the device's free memory, and what to change."""
        free, total = torch.cuda.mem_get_info(self.device)
        return (
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free on {self.device}, which another "
            "engine may share. Lower serving.online.kv_cache_gib or serving.lending.kv_gib, the "
            "KV cache of both, or the size of this engine's steps (the online server's: "
            "serving.online.max_batched_tokens and max_sequences, the rollout engine's: "
            "serving.lending.chunk_tokens and rollout.max_sequences)"
        )
