"""vLLM schedulers for tests of engines: one gives requests back, as a co-serving engine's does, one
awaits new weights."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.engine import plugin

AT_TOKENS = 100  # of prompt and answer
WAITS_AT = 80  # the same
HELD_AT = 120  # the same


class EvictingScheduler(AsyncScheduler):
    """Gives back requests of turns named "evict..."."""

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        evicted = [r for r in self.running if r.request_id.startswith("evict")]
        end = {"finish_reason": FinishReason.ABORT, "stop_reason": plugin.EVICTED}
        for request in [r for r in evicted if r.num_tokens >= AT_TOKENS]:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(EngineCoreOutput(request.request_id, [], **end))
        return outputs


class _Patience:
    """No turn ends before the first new weights have come, however long that takes on a busy
    machine."""

    awaited = 1  # new weights

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._most, self._flips = self.max_num_scheduled_tokens, 0

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._flips += pause_state is PauseState.UNPAUSED
        super().set_pause_state(pause_state)

    def schedule(self, *args, **kwargs):
        self.max_num_scheduled_tokens = 0 if self._waits() else self._most
        return super().schedule(*args, **kwargs)

    def _waits(self) -> bool:
        return self._flips < self.awaited and any(r.num_tokens >= WAITS_AT for r in self.running)


class PatientScheduler(_Patience, AsyncScheduler):
    """For engines whose steps overlap, or could."""


class TwicePatientScheduler(PatientScheduler):
    """For engines that load a version before the turn."""

    awaited = 2


class HoldingScheduler(PatientScheduler):
    """Only turns named "held..." wait for new weights, and afterwards for their abort: none of them
    ends at its own limit before a busy test has got to interrupt it."""

    def _waits(self) -> bool:
        at = WAITS_AT if self._flips < self.awaited else HELD_AT
        return any(r.request_id.startswith("held") and r.num_tokens >= at for r in self.running)


class PlainPatientScheduler(_Patience, Scheduler):
    """For engines that draft, whose steps don't."""


class PatientEvictingScheduler(PatientScheduler, EvictingScheduler):
    """Both."""
