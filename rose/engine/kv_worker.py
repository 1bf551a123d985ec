"""KV memory that a worker gives back to the system by block: mixed into vLLM's worker, called by
its scheduler.

In an engine that shares its device (ROSE_COSERVING is set) the one buffer of vLLM's KV cache comes
from a page pool, `rose.memory` on a CPU and `rose.engine.vmm` on a GPU. vLLM has a
context around that allocation, for its sleep mode and for KV connectors; here a `TorchFunctionMode`
takes its place, which answers the one `torch.zeros`. At first only block 0 has memory, vLLM's null
block: the scheduler maps what it means to use. Before there is a scheduler vLLM warms up its
kernels with real steps on blocks 1, 2, ... (v1/worker/gpu/warmup.py), which share one page of
memory meanwhile: nobody reads what these steps make. All else that runs without a scheduler - the
profile run, the capture of CUDA graphs, dummy steps, padding - writes nowhere (slot -1) and reads
block 0. On a GPU the worker also keeps the memory that its steps take besides
(rose/engine/headroom.py). Importing this imports vLLM.
"""

from __future__ import annotations

import os

import torch
from torch.overrides import TorchFunctionMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from rose.engine.blocks import FAILED, BlockMemory, Pool, layout_of
from rose.engine.headroom import Headroom
from rose.engine.vmm import SPARE, CudaDriver, CudaError, PagePool
from rose.memory import HostPages

logger = init_logger(__name__)


class KvAllocation(TorchFunctionMode):
    """Context in which vLLM allocates the KV cache of `worker`; afterwards `worker.rose_kv` is its
    `BlockMemory`.

    Raises `ValueError` for a KV cache that can't be lent by block, `RuntimeError` when vLLM
    allocated it in another way than expected.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker, self._pools = worker, []

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
                "rose.engine.kv_worker was written for vLLM 0.32"
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
    """On the instance, as vLLM's classes for GPUs and CPUs each have their own."""
    warm_up = worker.compile_or_warm_up_model

    def compile_or_warm_up_model():
        with worker.rose_kv.scratch():
            done = warm_up()
        if worker.rose_headroom is not None:
            worker.rose_headroom.keep()
        return done

    worker.compile_or_warm_up_model = compile_or_warm_up_model


def _measure_headroom(worker: Worker) -> None:
    """Measure at vLLM's profile run, which follows the model's loading; on the instance, too."""
    profile = worker.determine_available_memory
    worker.rose_headroom = Headroom(worker.device)

    def determine_available_memory():
        with worker.rose_headroom.measured():
            return profile()

    worker.determine_available_memory = determine_available_memory


def _context(worker: Worker, tag: str):
    if not os.environ.get("ROSE_COSERVING"):
        return _vllms_context(worker, tag)
    if tag == "weights" and worker.device.type == "cuda":
        _measure_headroom(worker)
    return KvAllocation(worker) if tag == "kv_cache" else _vllms_context(worker, tag)


_vllms_context = Worker._maybe_get_memory_pool_context
Worker._maybe_get_memory_pool_context = _context


class KvWorker:
    """Mixed into vLLM's worker. Block ids are those of the scheduler's block pool."""

    rose_kv: BlockMemory | None = None
    rose_headroom: Headroom | None = None  # none on a CPU, where all memory is the system's

    def rose_kv_layout(self) -> dict:
        """`blocks`, `block_bytes`, over all layers, and where they lie: `nbytes`, `starts`,
        `strides` of `blocks.Layout`; `page_bytes` of the system or the GPU; `held` blocks;
        `mapped_bytes`."""
        kv = self._rose_lent()
        return kv.layout._asdict() | {
            "block_bytes": kv.layout.block_bytes,
            "page_bytes": kv.pool.page,
            "held": kv.held,
            "mapped_bytes": kv.mapped_bytes,
        }

    def rose_map_blocks(self, block_ids: list[int]) -> int:
        """Before these blocks are used. Returns the bytes that this took from the system, see
        `BlockMemory.map`; FAILED when it has not so many, and then none of them has memory that
        hadn't before."""
        try:
            return self._rose_lent().map(block_ids)
        except (MemoryError, CudaError) as error:
            logger.warning("%d blocks of KV cache stay withheld: %s", len(block_ids), error)
            return FAILED

    def rose_release_blocks(self, block_ids: list[int]) -> int:
        """Release these blocks; what is in them is lost. Returns the bytes that the system got; see
        `BlockMemory.release`. On a GPU this waits for the steps that were submitted."""
        return self._rose_lent().release(block_ids)

    def _rose_lent(self) -> BlockMemory:
        if self.rose_kv is None:
            raise RuntimeError("KV memory can't be lent: started without ROSE_COSERVING")
        return self.rose_kv
