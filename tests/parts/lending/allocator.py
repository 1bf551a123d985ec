"""torch's caching allocator over the memory of one made-up GPU: what one process frees it keeps,
until it empties its cache; a piece may be cut. For modules that say `torch.cuda...` and
`torch.empty`, as their `torch`."""

from types import SimpleNamespace

import torch


class Gpu:
    def __init__(self, total: int) -> None:
        self.total = self.free = total


class Process:
    """An allocator, of several on `gpu`. `held`: bytes of its tensors, `cached`: what it has beyond them."""

    int8, OutOfMemoryError = torch.int8, torch.OutOfMemoryError

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.held, self.cached, self.peak = gpu, 0, 0, 0
        self.cuda = SimpleNamespace(
            empty_cache=self.empty_cache,
            reset_peak_memory_stats=lambda _: setattr(self, "peak", self.held),
            max_memory_allocated=lambda _: self.peak,
            memory_allocated=lambda _: self.held,
            mem_get_info=lambda _: (gpu.free, gpu.total),
        )

    def empty_cache(self) -> None:
        self.gpu.free, self.cached = self.gpu.free + self.cached, 0

    def take(self, nbytes: int) -> None:
        """A tensor that stays."""
        if nbytes > self.cached:
            if nbytes > self.gpu.free + self.cached:
                raise self.OutOfMemoryError("CUDA out of memory")
            self.gpu.free, self.cached = self.gpu.free - (nbytes - self.cached), nbytes
        self.cached, self.held = self.cached - nbytes, self.held + nbytes
        self.peak = max(self.peak, self.held)

    def pass_by(self, nbytes: int) -> None:
        """Tensors that are freed again, as a step's activations."""
        self.take(nbytes)
        self.held, self.cached = self.held - nbytes, self.cached + nbytes

    def empty(self, nbytes: int, **_) -> None:
        self.pass_by(nbytes)
