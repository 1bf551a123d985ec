"""A worker whose weights and KV cache are given back while its process, kernels and graphs stay:
mixed into vLLM's.

Deactivated it forgets the weights, asleep it keeps them in host memory.

On a GPU by vLLM's sleep mode (level 2: nothing is kept), on a CPU, where vLLM's does nothing, by
dropping the pages of the parameters. Either way every tensor keeps its address, and the weights are
read again from the model's folder into them by vLLM's loader. Importing this imports vLLM.
"""

from __future__ import annotations

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader

from rose import heap, memory
from rose.engine import adapter
from rose.engine.vmm import SPARE
from rose.memory import give_back

SLEEPS = frozenset({"weights", "kv_cache"})  # vLLM's tags of what a sleeping engine gives back


class InactiveWorker:
    """Mixed into vLLM's worker beside `WorkerExtension`. Nothing may run between the two calls."""

    _rose_initial: dict[str, str] | None = None  # checksums of the folder's weights, if seen
    _rose_asleep: set[str] | frozenset[str] = frozenset()  # what `rose_wake` brings back

    def rose_deactivate(self) -> None:
        """Forget weights and KV cache. Raises `RuntimeError` on a GPU without sleep mode."""
        on_cpu = self.device.type == "cpu"
        if not on_cpu and not self.model_config.enable_sleep_mode:
            raise RuntimeError("started without enable_sleep_mode, so weights can't be given back")
        if self._rose_initial is None and self.weight_transfer_engine.holds_initial:
            self._rose_initial = self.rose_checksum()
        self.weight_transfer_engine.begin_anew()
        if self.rose_kv is not None:
            self.rose_kv.suspend()
        if not on_cpu:
            self.sleep(level=2)
            return
        model = self.model_runner.get_model()
        spans = _storages(model.parameters()) - _storages(model.buffers())
        if self.rose_kv is None:
            spans |= _storages(self.model_runner.kv_caches)
        give_back(spans)
        heap.release_free()  # what loading the model left in the allocator

    def rose_activate(self) -> None:
        """Read the folder's own weights. Raises what the loader raises, and `RuntimeError` when the
        weights are not those of before, or when the device has too little memory for steps."""
        if self.device.type != "cpu":
            self.wake_up()
        self._read_folder()
        if self.rose_headroom is not None:
            # the rest may be what the spare memory is for, by now
            self.rose_headroom.keep(SPARE // 2)
        if self.rose_kv is not None:
            self.rose_kv.resume()
        found = self.rose_checksum() if self._rose_initial is not None else None
        if found != self._rose_initial:
            wrong = [name for name, digest in found.items() if digest != self._rose_initial[name]]
            raise RuntimeError(
                f"{len(wrong)} of {len(found)} parameters read from {self.model_config.model} are "
                f"not what they were before, first {wrong[0]}; did the folder change?"
            )

    def _read_folder(self) -> None:
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad(), adapter.detached(model):
            loader = get_model_loader(self.vllm_config.load_config)
            loader.load_weights(model, self.model_config)
        adapter.clear(model)

    def rose_sleep(self) -> tuple[float, float, float]:
        """Give back the KV cache and, on a GPU, the weights, whose copy stays in host memory.
        Returns GiB given back, free on the device afterwards, and in all. Asleep already: nothing
        happens."""
        before = memory.look(self.device)
        if self.device.type != "cpu":
            if self._rose_asleep != SLEEPS:
                self.sleep(level=1)
        else:
            give_back(_storages(self.model_runner.kv_caches))
            heap.release_free()
        self._rose_asleep = set(SLEEPS)
        return self._rose_moved(before)

    def rose_wake(self, tag: str) -> tuple[float, float, float]:
        """Take the memory of "weights" or "kv_cache" again; the figures of `rose_sleep`. On a CPU
        the weights never went, and the KV cache's pages come as they are touched."""
        before = memory.look(self.device)
        if tag in self._rose_asleep:
            if self.device.type != "cpu":
                self.wake_up([tag])
            self._rose_asleep.remove(tag)
        return self._rose_moved(before)

    def _rose_moved(self, before: memory.DeviceMemory) -> tuple[float, float, float]:
        now = memory.look(self.device)
        return now.given_since(before), now.free, now.total


def _storages(tensors) -> set[tuple[int, int]]:
    """(address, bytes) of what these tensors lie in; tied ones once."""
    return {
        (storage.data_ptr(), storage.nbytes()) for storage in (t.untyped_storage() for t in tensors)
    }
