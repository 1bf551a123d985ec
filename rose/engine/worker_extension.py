"""Runs inside vLLM's worker: what `Engine` asks of it besides vLLM's own calls.

Named in `worker_extension_cls`, so vLLM imports this module in every worker before it builds the
model and mixes `WorkerExtension` into its worker class; `Engine` calls the methods with
`collective_rpc`.

At import: ROSE's weight-transfer engine is registered with vLLM. On a CPU, vLLM's prepacked matrix
kernels (oneDNN, AMX) are switched off, its experts' too: they empty or reorder the weights, so that
an update in place would not change what it means to while looking like a success.
"""

from __future__ import annotations

import os
import time

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from rose.engine import adapter
from rose.engine.drafts import PROPOSER, rejection
from rose.engine.inactive import InactiveWorker
from rose.engine.kv_worker import KvWorker
from rose.engine.weight_transfer import NAME, RoseWeightTransferEngine
from rose.processes import die_with_parent
from rose.transfer.codec import digest

die_with_parent()
WeightTransferEngineFactory.register_engine(NAME, RoseWeightTransferEngine)
if current_platform.is_cpu():
    import vllm._custom_ops
    import vllm.model_executor.layers.utils as linear_kernels

    from rose.engine import cpu_experts

    vllm._custom_ops._supports_onednn = False
    linear_kernels.check_cpu_sgl_kernel = lambda n, k, dtype: False
    cpu_experts.keep_plain()
    if os.environ.get("ROSE_ENGINE_THREADS"):
        torch.set_num_threads(int(os.environ["ROSE_ENGINE_THREADS"]))


class WorkerExtension(KvWorker, InactiveWorker):
    """Mixed into vLLM's worker, which has `model_runner` and `weight_transfer_engine`."""

    def rose_status(self) -> dict:
        """See `RoseWeightTransferEngine.status`."""
        return self.weight_transfer_engine.status()

    def rose_flip(self) -> dict:
        """vLLM's `finish_weight_update`, and the status after it."""
        self.finish_weight_update()
        return self.weight_transfer_engine.status()

    def rose_abandon(self) -> dict:
        """Give up what is staged or being staged, and close vLLM's session of it; the status."""
        self.weight_transfer_engine.abandon()
        if self._weight_update_active:
            self.finish_weight_update()  # flips nothing
        return self.weight_transfer_engine.status()

    def rose_begin_drafts(self, adaptive: bool, memory_bytes: int) -> None:
        """Before the first drafts of an engine that is to have some. Raises `RuntimeError` if
        vLLM's sampling of drafted positions can't be mended on this CPU."""
        clock = time.perf_counter
        if current_platform.is_cpu():
            rejection.mend()
            # this thread has a part in all that a step computes; others' load is not in its time
            clock = time.thread_time
        if self.vllm_config.speculative_config.model == PROPOSER:
            self.model_runner.drafter.begin(self.model_runner, adaptive, memory_bytes, clock)

    def rose_record_routing(self) -> None:
        """Before the first request of an engine on a CPU that returns its routing."""
        from rose.engine import routing  # vLLM's modules for it are of no use to others

        routing.record(self.model_runner)

    def rose_siblings(self, spans: list[tuple[str, int, bytes, bytes]], ended: list[str]) -> None:
        """See `Engine.learn_siblings`."""
        for span in spans:
            self.model_runner.drafter.feed(*span)
        self.model_runner.drafter.drop(ended)

    def rose_checksum(self) -> dict[str, str]:
        """xxh3-128 of every live parameter of this rank, padding included, and an adapter's."""
        model = self.model_runner.get_model()
        return {
            name: digest(p.detach().cpu().contiguous().view(torch.uint8).numpy())
            for name, p in (adapter.base(model) | adapter.slots(model)).items()
        }

    def rose_adapter(self) -> None:
        """Make the adapter that all turns use, of zeros."""
        adapter.begin(self.model_runner)
