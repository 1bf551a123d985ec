"""A mixin before vLLM's scheduler class that records each engine step's work, begin and end.

If the environment variable `STEPS` names a file, every step is appended to it. `python -m
rose.parts.lending.profile` fits the predictor to this file.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from rose.parts.lending.rules.predictor import Predictor, Work

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Environment variable with a file to which an engine appends each step as a line of JSON.
STEPS = "ROSE_COSERVING_STEPS"


class Timed:
    """Times engine steps, and calls `_step_begins` and `_step_ended`, which subclasses override. A
    step begins when it is scheduled, but not before the last step has ended: vLLM's asynchronous
    scheduling plans ahead. A step ends when its tokens are known."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight: deque[tuple[object, Work, float]] = deque()
        self._last_ended = 0.0
        path = os.environ.get(STEPS)
        # Closed with the process.
        self._log = open(path, "ab", buffering=0) if path else None  # noqa: SIM115

    def schedule(self, throttle_prefills: bool = False):
        began = time.monotonic()
        output = super().schedule(throttle_prefills)
        if output.total_num_scheduled_tokens:
            work = self._work_of(output.num_scheduled_tokens)
            self._in_flight.append((output, work, began))
            self._step_begins(work, max(began, self._last_ended))
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._in_flight and self._in_flight[0][0] is scheduler_output:
            _, work, began = self._in_flight.popleft()
            ended = time.monotonic()
            began, self._last_ended = max(began, self._last_ended), ended
            if self._log is not None:
                times = {"began": began, "ended": ended, "wall": time.time()}
                self._log.write(msgspec.json.encode(times | work._asdict()) + b"\n")
            self._step_ended(work, began, ended)
        return outputs

    def _in_flight_s(self, predictor: Predictor) -> tuple[float, float]:
        """Seconds until the steps in flight have ended: the mean, and if each takes its P99."""
        mean = p99 = 0.0
        for _, work, _ in self._in_flight:
            mean, p99 = mean + predictor.seconds(work), p99 + predictor.p99(work)
        if not self._in_flight:
            return 0.0, 0.0
        passed = max(0.0, time.monotonic() - max(self._in_flight[0][2], self._last_ended))
        first = self._in_flight[0][1]
        return mean - min(passed, predictor.seconds(first)), p99 - min(passed, predictor.p99(first))

    def _tokens_in_flight(self) -> Counter[str]:
        """Number of each request's tokens in flight. vLLM already counts them as computed."""
        counts: Counter[str] = Counter()
        for output, _, _ in self._in_flight:
            counts.update(output.num_scheduled_tokens)
        return counts

    def _work_of(self, scheduled: dict[str, int]) -> Work:
        """Return the work of a step. vLLM must already have counted its tokens as computed."""
        prefill, decodes, context = [], 0, 0
        for name, count in scheduled.items():
            before = self.requests[name].num_computed_tokens - count
            if count == 1:
                decodes += 1
                context += before
            else:
                prefill.append((count, before))
        return Work(tuple(prefill), decodes, context)

    def _step_begins(self, work: Work, began: float) -> None:
        pass

    def _step_ended(self, work: Work, began: float, ended: float) -> None:
        pass


def work_of(requests: Iterable[Request]) -> Work:
    """Return the work of a step without limit: each request's remaining prompt or next decode."""
    prefill, decodes, context = [], 0, 0
    for request in requests:
        left = max(1, request.num_tokens - request.num_computed_tokens)
        if request.num_output_placeholders > 0 or left == 1:
            decodes, context = decodes + 1, context + request.num_computed_tokens
        else:
            prefill.append((left, request.num_computed_tokens))
    return Work(tuple(prefill), decodes, context)
