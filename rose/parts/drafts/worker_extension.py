"""The worker extension of an engine that drafts. Importing this module imports vLLM."""

from __future__ import annotations

import time
from typing import Any

from vllm.platforms import current_platform

from rose.engine.worker_extension import WorkerExtension
from rose.parts.drafts.siblings import Span


class DraftingWorker(WorkerExtension):
    """Mixed into vLLM's worker: ROSE's extension, for engines with a `GroupProposer`."""

    def rose_begin_drafts(self, draft: dict[str, Any]) -> None:
        super().rose_begin_drafts(draft)
        # On a CPU, the CPU time of this thread measures a step: the thread takes part in all of its
        # computations, and the load of other processes doesn't count.
        clock = time.thread_time if current_platform.is_cpu() else time.perf_counter
        memory_bytes = draft["memory_mib"] * 2**20
        self.model_runner.drafter.begin(self.model_runner, draft["adaptive"], memory_bytes, clock)

    def rose_learn_siblings(self, spans: list[Span], ended: list[str]) -> None:
        """Pass tokens of siblings on other engines to the proposer; drop groups that `ended`."""
        for span in spans:
            self.model_runner.drafter.feed(*span)
        self.model_runner.drafter.drop(ended)
