"""ROSE's extension of vLLM's worker: methods that `Engine` calls and vLLM doesn't have.

The engine argument `worker_extension_cls` names it. So vLLM imports this module in every worker
before it builds the model, and mixes `WorkerExtension` into its worker class. `Engine` calls the
methods with `collective_rpc`.

Importing this module registers ROSE's weight-transfer engine with vLLM. On a CPU it also switches
off vLLM's prepacked matrix kernels (oneDNN, AMX), also for experts. These kernels empty or reorder
the weights, so that an update in place would seem to succeed but change the wrong values.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from rose.engine import adapter, described, rejection
from rose.engine.inactive import InactiveWorker
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


class WorkerExtension(InactiveWorker):
    """Mixed into vLLM's worker, which has `model_runner` and `weight_transfer_engine`."""

    def rose_status(self) -> dict:
        """Return `RoseWeightTransferEngine.status`."""
        return self.weight_transfer_engine.status()

    def rose_flip(self) -> dict:
        """Call vLLM's `finish_weight_update`; return the status after it."""
        self.finish_weight_update()
        return self.weight_transfer_engine.status()

    def rose_abandon(self) -> dict:
        """Drop a version, staged or not yet, and close vLLM's weight update; return the status."""
        self.weight_transfer_engine.abandon()
        if self._weight_update_active:
            # No version is staged any more, so this flips nothing.
            self.finish_weight_update()
        return self.weight_transfer_engine.status()

    def rose_description(self) -> list[str]:
        """Return `described.lines` of this worker."""
        return described.lines(self.vllm_config)

    def rose_begin_drafts(self, draft: dict[str, Any]) -> None:
        """Prepare an engine with speculative drafts, before its first request. `draft` is the
        section rollout.draft. Raises `RuntimeError` if this is a CPU and vLLM's sampling of drafted
        positions can't be corrected."""
        if current_platform.is_cpu():
            rejection.mend()

    def rose_record_routing(self) -> None:
        """Prepare a CPU engine that returns its routing, before its first request."""
        from rose.engine import routing  # imports vLLM modules that no other engine needs

        routing.record(self.model_runner)

    def rose_checksum(self) -> dict[str, str]:
        """Return the xxh3-128 of each live parameter of this rank, with padding, and of the
        adapter."""
        model = self.model_runner.get_model()
        return {
            name: digest(p.detach().cpu().contiguous().view(torch.uint8).numpy())
            for name, p in (adapter.base(model) | adapter.slots(model)).items()
        }

    def rose_adapter(self) -> None:
        """Create the adapter that all turns use, filled with zeros."""
        adapter.begin(self.model_runner)
