"""A mixin of vLLM's worker that releases its weights and KV cache, but keeps its process, kernels
and CUDA graphs.

A deactivated worker drops the weights; a sleeping worker keeps them in host memory.

On a GPU this uses vLLM's sleep mode: level 2, which keeps nothing, to deactivate, and level 1 to
sleep. On a CPU, where vLLM's sleep mode does nothing, we release memory pages ourselves. Either way
every tensor keeps its address. So `rose_activate` has vLLM's loader read the weights into the same
tensors. Importing this module imports vLLM.
"""

from __future__ import annotations

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader

from rose import heap, memory
from rose.engine import adapter
from rose.memory import release_pages

SLEEP_TAGS = frozenset({"weights", "kv_cache"})  # vLLM's tags for the memory that sleep releases


class InactiveWorker:
    """Mixed into vLLM's worker beside `WorkerExtension`. No step may run between `rose_deactivate`
    and `rose_activate`, or `rose_sleep` and `rose_wake`."""

    # Checksums of the weights in the model's folder; None until a deactivation has taken them.
    _rose_initial: dict[str, str] | None = None
    _rose_asleep: set[str] | frozenset[str] = frozenset()  # tags still to be woken

    def rose_deactivate(self) -> None:
        """Release weights and KV cache without a copy; on a GPU by vLLM's sleep mode."""
        if self._rose_initial is None and self.weight_transfer_engine.holds_initial:
            self._rose_initial = self.rose_checksum()
        self.weight_transfer_engine.reset()
        caches = self._rose_release_cache()
        if self.device.type != "cpu":
            self.sleep(level=2)
            return
        model = self.model_runner.get_model()
        release_pages(caches | _storages(model.parameters()) - _storages(model.buffers()))
        heap.release_free()  # memory that loading the model left in the allocator

    def rose_activate(self) -> None:
        """Read the weights of the model's folder. Raises what vLLM's loader raises. Raises
        `RuntimeError` when the weights differ from those that the folder had before, or the device
        has too little memory for steps."""
        if self.device.type != "cpu":
            self.wake_up()
        self._read_folder()
        self._rose_regain_cache()
        found = self.rose_checksum() if self._rose_initial is not None else None
        if found != self._rose_initial:
            wrong = [name for name, digest in found.items() if digest != self._rose_initial[name]]
            raise RuntimeError(
                f"{len(wrong)} of {len(found)} parameters read from {self.model_config.model} are "
                f"not what they were before, first {wrong[0]}; did the folder change?"
            )

    def _rose_release_cache(self) -> set[tuple[int, int]]:
        """Return the KV cache's storages, which `rose_deactivate` releases on a CPU. An extension
        that maps the cache by block releases its blocks here, and returns an empty set."""
        return _storages(self.model_runner.kv_caches)

    def _rose_regain_cache(self) -> None:
        """Take again the memory that an extension released in `_rose_release_cache`."""

    def _read_folder(self) -> None:
        """Load the weights of the model's folder, and clear the adapter."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad(), adapter.detached(model):
            loader = get_model_loader(self.vllm_config.load_config)
            loader.load_weights(model, self.model_config)
        adapter.clear(model)

    def rose_sleep(self) -> tuple[float, float, float]:
        """Release the KV cache and, on a GPU, the weights, which are copied to host memory. Does
        nothing to a worker that is fully asleep. Returns the device's GiB released, free
        afterwards, and in all."""
        before = memory.device_memory(self.device)
        if self.device.type != "cpu":
            if self._rose_asleep != SLEEP_TAGS:
                self.sleep(level=1)
        else:
            release_pages(_storages(self.model_runner.kv_caches))
            heap.release_free()
        self._rose_asleep = set(SLEEP_TAGS)
        return self._rose_memory_since(before)

    def rose_wake(self, tag: str) -> tuple[float, float, float]:
        """Take the memory of `tag`, "weights" or "kv_cache", again. Returns what `rose_sleep`
        returns. On a CPU there is nothing to do: the weights never left, and the system maps the KV
        cache's pages as they are touched."""
        before = memory.device_memory(self.device)
        if tag in self._rose_asleep:
            if self.device.type != "cpu":
                self.wake_up([tag])
            self._rose_asleep.remove(tag)
        return self._rose_memory_since(before)

    def _rose_memory_since(self, before: memory.DeviceMemory) -> tuple[float, float, float]:
        """Return GiB released since `before`, free, and total."""
        now = memory.device_memory(self.device)
        return now.freed_since(before), now.free, now.total


def _storages(tensors) -> set[tuple[int, int]]:
    """(address, bytes) of each storage behind these tensors; a shared storage counts once."""
    return {
        (storage.data_ptr(), storage.nbytes()) for storage in (t.untyped_storage() for t in tensors)
    }
