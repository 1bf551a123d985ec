"""The worker extension of a rollout engine that shares its device. Importing this module imports
vLLM."""

from __future__ import annotations

from rose.engine.worker_extension import WorkerExtension
from rose.parts.lending.vllm.kv_worker import KvWorker
from rose.parts.lending.vllm.stops import stop_steps


class LentWorker(KvWorker, WorkerExtension):
    """Mixed into vLLM's worker: ROSE's extension, a KV cache that is mapped by block, and steps
    that stop between layers while the online engine computes."""

    def rose_before_warm_up(self) -> None:
        stop_steps(self)
