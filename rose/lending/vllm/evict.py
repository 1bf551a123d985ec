"""Requests that a vLLM scheduler hands back: whole, at once, with the tokens made so far."""

from __future__ import annotations

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from rose.engine import plugin


class Evicting:
    """Mixin before vLLM's scheduler; `Member`, whose board counts evictions, comes after it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._evicted: list[Request] = []

    def has_requests(self) -> bool:
        return super().has_requests() or bool(self._evicted)

    def update_from_output(self, scheduler_output, model_runner_output):
        """vLLM tells clients only of ends that it causes; for evictions the output is made here."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in self._evicted:
            group = outputs.setdefault(request.client_index, EngineCoreOutputs())
            group.outputs.append(
                EngineCoreOutput(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.ABORT,
                    stop_reason=plugin.EVICTED,
                )
            )
        self._evicted.clear()
        return outputs

    def evict(self, victims: list[Request]) -> None:
        if not victims:
            return
        self.finish_requests([r.request_id for r in victims], RequestStatus.FINISHED_ABORTED)
        self._evicted += victims
        self.state.evicted += len(victims)
        self.state.wasted_tokens += sum(r.num_computed_tokens for r in victims)
