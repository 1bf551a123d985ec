"""A mixin of vLLM's worker that maps and releases KV memory block by block at the scheduler's call.

In an engine that shares its device (ROSE_COSERVING is set), the one buffer of vLLM's KV cache comes
from a page pool: `HostPages` on a CPU, `vmm.PagePool` on a GPU. vLLM allocates the buffer inside a
context for sleep mode and KV connectors. We replace this context by a `TorchFunctionMode`, which
intercepts the one call of `torch.zeros`.

At first only block 0, vLLM's null block, has memory. The scheduler maps blocks before it uses them.
Before there is a scheduler, vLLM warms up its kernels with real steps on blocks 1, 2, ...
(v1/worker/gpu/warmup.py). During the warm-up these blocks share one page, because nothing reads the
values that its steps write. Other work without a scheduler writes nowhere (slot -1) and reads block
0: the profile run, the capture of CUDA graphs, dummy steps and padding.

On a GPU the worker also reserves memory for activations (rose/parts/lending/vllm/headroom.py).
Importing this module imports vLLM.
"""

from __future__ import annotations

import os

import torch
from torch.overrides import TorchFunctionMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from rose.parts.lending.vllm.blocks import FAILED, BlockMemory, Pool, layout_of
from rose.parts.lending.vllm.headroom import Headroom
from rose.parts.lending.vllm.host_pages import HostPages
from rose.parts.lending.vllm.vmm import SPARE, CudaDriver, CudaError, PagePool

logger = init_logger(__name__)


class KvAllocation(TorchFunctionMode):
    """Context in which vLLM allocates the KV cache of `worker` from a page pool. At its end it sets
    `worker.rose_kv` to the cache's `BlockMemory`. Raises `ValueError` for a KV cache that can't be
    lent by block, and `RuntimeError` unless vLLM allocated exactly one buffer."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._pools: list = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.zeros or (kwargs or {}).get("dtype") is not torch.int8:
            return func(*args, **(kwargs or {}))
        nbytes = args[0]
        pool = new_pool(nbytes, torch.device(kwargs["device"]))
        self._pools.append(pool)
        return pool.tensor()[:nbytes]

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        if kind is not None:
            return
        if len(self._pools) != 1:
            raise RuntimeError(
                f"vLLM allocated {len(self._pools)} KV buffers where one was expected; "
                "rose.parts.lending.vllm.kv_worker was written for vLLM 0.32"
            )
        worker = self._worker
        layout = layout_of(
            worker.model_runner.kv_cache_config,
            worker.cache_config.get_resolved_kv_cache_layout().name,
        )
        worker.rose_kv = BlockMemory(self._pools[0], layout)
        worker.rose_kv.map([0])
        _warm_up_in_scratch(worker)


def new_pool(nbytes: int, device: torch.device) -> Pool:
    if device.type == "cpu":
        return HostPages(nbytes)
    return PagePool(CudaDriver(torch.cuda.current_device()), nbytes, SPARE)


def _warm_up_in_scratch(worker: Worker) -> None:
    """Let `worker`'s warm-up steps touch every block, then reserve the memory of its steps. Patches
    the instance, because vLLM's GPU and CPU classes have different warm-ups."""
    warm_up = worker.compile_or_warm_up_model

    def compile_or_warm_up_model():
        worker.rose_before_warm_up()
        with worker.rose_kv.scratch():
            done = warm_up()
        if worker.rose_headroom is not None:
            worker.rose_headroom.keep()
        return done

    worker.compile_or_warm_up_model = compile_or_warm_up_model


def _measure_headroom(worker: Worker) -> None:
    """Measure the memory of steps during vLLM's profile run, which follows loading the model.
    Patches the instance, as `_warm_up_in_scratch` does."""
    profile = worker.determine_available_memory
    worker.rose_headroom = Headroom(worker.device)

    def determine_available_memory():
        with worker.rose_headroom.measured():
            return profile()

    worker.determine_available_memory = determine_available_memory


def _context(worker: Worker, tag: str):
    """Replace vLLM's `Worker._maybe_get_memory_pool_context`: return the context in which `worker`
    allocates `tag`, "weights" or "kv_cache"."""
    if not os.environ.get("ROSE_COSERVING"):
        return _vllms_context(worker, tag)
    if tag == "weights" and worker.device.type == "cuda":
        _measure_headroom(worker)
    return KvAllocation(worker) if tag == "kv_cache" else _vllms_context(worker, tag)


_vllms_context = Worker._maybe_get_memory_pool_context
Worker._maybe_get_memory_pool_context = _context


class KvWorker:
    """Mixed into vLLM's worker. Block ids are those of the scheduler's block pool."""

    rose_kv: BlockMemory | None = None  # None unless the engine shares its device
    rose_headroom: Headroom | None = None  # None unless the engine shares a GPU

    def rose_kv_layout(self) -> dict:
        """Describe the KV cache to the scheduler. The keys are the fields of `blocks.Layout`;
        `block_bytes`, a block's bytes in all layers; `page_bytes`, the pool's page size; `held`,
        the number of blocks that hold memory; and `mapped_bytes`."""
        kv = self._rose_lent()
        return kv.layout._asdict() | {
            "block_bytes": kv.layout.block_bytes,
            "page_bytes": kv.pool.page,
            "held": kv.held,
            "mapped_bytes": kv.mapped_bytes,
        }

    def rose_map_blocks(self, block_ids: list[int]) -> int:
        """Map the memory of these blocks, before a step uses them. Return the bytes newly mapped,
        or FAILED when the device has too little memory; then none of the blocks was mapped."""
        try:
            return self._rose_lent().map(block_ids)
        except (MemoryError, CudaError) as error:
            logger.warning("%d blocks of KV cache stay withheld: %s", len(block_ids), error)
            return FAILED

    def rose_release_blocks(self, block_ids: list[int]) -> int:
        """Release the memory of these blocks and their content. Return the bytes released. On a GPU
        this waits for the steps that were submitted."""
        return self._rose_lent().release(block_ids)

    def rose_before_warm_up(self) -> None:
        """Prepare the model of an engine on a shared device, before CUDA graphs are captured."""

    def _rose_release_cache(self) -> set[tuple[int, int]]:
        self._rose_lent().suspend()
        return set()

    def _rose_regain_cache(self) -> None:
        if self.rose_headroom is not None:
            # Half the usual margin, because kernels loaded since the start may use the other half.
            self.rose_headroom.keep(SPARE // 2)
        self._rose_lent().resume()

    def _rose_lent(self) -> BlockMemory:
        """Return the cache's blocks. Raises `RuntimeError` in an engine with its own device."""
        if self.rose_kv is None:
            raise RuntimeError("KV memory can't be lent: started without ROSE_COSERVING")
        return self.rose_kv
