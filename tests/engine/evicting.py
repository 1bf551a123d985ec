"""A vLLM scheduler that gives back requests of turns named "evict...", as a co-serving engine's does."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.coserving import names

AT_TOKENS = 100  # of prompt and answer


class EvictingScheduler(AsyncScheduler):
    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in [r for r in self.running if r.request_id.startswith("evict") and r.num_tokens >= AT_TOKENS]:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT,
                                                      stop_reason=names.EVICTED))
        return outputs
