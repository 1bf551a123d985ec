"""The rollout engine's scheduler: vLLM's own behind a gate, with memory that can be revoked.

    scheduler_cls="rose.parts.lending.vllm.rollout.scheduler"   (`rose serve` starts the engine so)

The gate (rose/parts/lending/rules/gate.py) decides how many tokens each step may compute. A shut
gate is polled, less often the longer it has been shut. KV memory beyond the budget
(rose/parts/lending/rules/budget.py) is not in vLLM's pool. When the budget falls below what running
requests need, whole requests are evicted, first those that lose the least work. They end with stop
reason `plugin.EVICTED` and the tokens generated so far.
"""

from __future__ import annotations

import copy
import time
from collections import deque

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from rose.engine import plugin
from rose.parts.lending import board
from rose.parts.lending.board import Peer
from rose.parts.lending.rules.budget import Budget
from rose.parts.lending.rules.gate import Gate, Reason
from rose.parts.lending.rules.predictor import Work
from rose.parts.lending.vllm.member import Member, pause_s, vllm_scheduler
from rose.parts.lending.vllm.pool import AT_ONCE
from rose.parts.lending.vllm.priority import Priority
from rose.parts.lending.vllm.steps import work_of
from rose.parts.lending.vllm.stopped import Stopped
from rose.parts.lending.vllm.stops import parts

# Least and most seconds between two polls of a shut gate. Each poll interrupts the online engine.
FIRST_POLL_S = 0.0005
LAST_POLL_S = 0.005
WAIT_S = 0.05  # most seconds at a shut gate before the engine's loop runs again


def scheduler(vllm_config, **others):
    """Create the scheduler. vLLM calls it as its `scheduler_cls`."""
    return vllm_scheduler(RolloutScheduler, vllm_config, **others)


class RolloutScheduler(Member):
    """vLLM's scheduler of the rollout engine on a shared device."""

    kind = board.Rollout
    board_name = "rollout"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._evicted: list[Request] = []  # evicted requests whose clients must still be notified
        if self.device is None:
            return
        lending = self._lending = self.device.serving.lending
        self._online = Peer(self.device.folder / "online", board.Online)
        self._gate = Gate(
            lending,
            self.device.serving.online.slo,
            self.device.profile,
            parts(self.vllm_config, lending),
        )
        self._predictor = self._gate.predictor
        self._budget = Budget(lending, self.device.kv_bytes)
        self._priority: Priority | None = None
        self._most = self.max_num_scheduled_tokens
        # Results of `_online_idle` when each step in flight began.
        self._beside: deque[float | None] = deque()
        self._stopped = Stopped(self._flag, parts(self.vllm_config, lending) > 1)
        self._gate_since = self._moved_at = time.monotonic()
        self._large_since: float | None = None
        self._inactive = self._moves_memory = False
        self.state.shut_by = float(Reason.CONTROL_SILENT)

    def attach(self, core) -> None:
        super().attach(core)
        if (
            self.device is not None
            and self._lending.priority == "idle"
            and core.vllm_config.device_config.device_type == "cpu"
        ):
            self._priority = Priority(except_for=self._beats.native_id)

    # ------------------------------------------------------------------ vLLM's calls

    def add_request(self, request) -> None:
        if self.device is not None and not self.requests:  # No request was waiting at the gate.
            self._moved_at = self._gate_since = self._stopped.came_at = time.monotonic()
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False):
        if self.device is None:
            return super().schedule(throttle_prefills)
        self._due = False
        self._fit_memory()
        if self._priority is not None:
            # The online engine may have raised the priority since the last step.
            self._priority.lower()
        if self._stopped.exceeds(self._lending.patience_s):
            self.evict(list(self.requests.values()))
        self.max_num_scheduled_tokens = self._pass_gate()
        if 0 < self.max_num_scheduled_tokens < len(self.running):
            self._rotate(self.max_num_scheduled_tokens)
        output = super().schedule(throttle_prefills)
        if not output.total_num_scheduled_tokens:
            self._write_board()
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.device is None:
            return outputs
        for group in outputs.values():
            self.state.made_tokens += sum(len(o.new_token_ids) for o in group.outputs)
        for request in self._evicted:  # vLLM doesn't notify the clients of evicted requests.
            ended = EngineCoreOutput(
                request.request_id, [], finish_reason=FinishReason.ABORT, stop_reason=plugin.EVICTED
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        self._evicted.clear()
        self._write_board()
        return outputs

    def has_requests(self) -> bool:
        return super().has_requests() or bool(self._evicted)

    def evict(self, victims: list[Request]) -> None:
        """End these requests at once, with the tokens generated so far."""
        if not victims:
            return
        self.finish_requests([r.request_id for r in victims], RequestStatus.FINISHED_ABORTED)
        self._evicted += victims
        self.state.evicted += len(victims)
        self.state.wasted_tokens += sum(r.num_computed_tokens for r in victims)

    # ------------------------------------------------------------------ the gate

    def _pass_gate(self) -> int:
        """Wait until the gate admits tokens; return their number. Returns 0 after WAIT_S, or sooner
        if the engine's loop has other work."""
        end, work = time.monotonic() + WAIT_S, work_of([*self.running, *self.waiting])
        while True:
            now = time.monotonic()
            ahead = self._in_flight_s(self._predictor) if self._predictor else (0.0, 0.0)
            admission = self._gate.admit(now, self._online.read(), self.control.read(), work, ahead)
            self._note(admission.reason, now)
            if admission.tokens or not self.has_unfinished_requests():
                self._moved_at = now
                return min(admission.tokens, self._most)
            if now - self._moved_at > self._lending.patience_s:
                self._moved_at = now
                self.evict(list(self.requests.values()))
                return 0
            if self._in_flight:
                return 0  # The loop must fetch the tokens of the step in flight.
            time.sleep(pause_s(now - self._moved_at, FIRST_POLL_S, LAST_POLL_S))
            if now > end or self._has_input() or self._memory_changes(self._budget):
                return 0

    def _memory_changes(self, budget: Budget) -> bool:
        """True if memory must be released for the budget, or if a block or more can be mapped."""
        return self._differs(self._target(budget))

    def _differs(self, target: float) -> bool:
        """True if the mapped memory is above `target`, or below it by a block or more."""
        held = self.pool.mapped
        return target < held or target - held >= self.pool.grain and self.pool.can_map

    def _reason(self, reason: Reason) -> Reason:
        """Return the gate's reason, or DEVICE_BUSY where an open gate admits steps that then stop
        at the flag."""
        return Reason.DEVICE_BUSY if reason is Reason.OPEN and self._stopped.shuts else reason

    def _note(self, reason: Reason, now: float) -> None:
        """Record the gate's state. If there are requests, add the time since the last record."""
        reason = self._reason(reason)
        passed, self._gate_since = now - self._gate_since, now
        if self.requests:
            if self.state.open:
                self.state.open_s += passed
            else:
                self.state.shut_s += passed
        self.state.open, self.state.shut_by = float(reason is Reason.OPEN), float(reason)

    def _rotate(self, count: int) -> None:
        """Move the first `count` running requests to the end. vLLM serves requests from the front,
        so with fewer tokens than requests the last ones would starve."""
        self.running = self.running[count:] + self.running[:count]

    def _step_begins(self, work: Work, began: float) -> None:
        if self.device is not None:
            self._beside.append(self._online_idle())
            self._write_board(self._ends_at(self._predictor))

    def _step_ended(self, work: Work, began: float, ended: float) -> None:
        if self.device is None:
            return
        if self._flag.ignored:  # The next step may have to stop before the next beat.
            self._flag.ignored = self._must_not_stop()
        else:
            self._stopped.free_at = ended  # It went on, so the flag was down at each stop.
        s = self.state
        s.steps, s.busy_s = s.steps + 1, s.busy_s + ended - began
        s.prompt_tokens += sum(count for count, _ in work.prefill)
        idle = self._beside.popleft()
        if self._predictor:
            # A step that the online engine interrupted isn't observed. At idle priority such steps
            # take many times as long. With their residuals the gate would stay shut, and no shorter
            # step could correct that.
            if idle is not None and idle == self._online_idle():
                self._predictor.observe(work, ended - began)
            s.step_error, s.step_p99 = self._predictor.error
        s.step_ends = self._ends_at(self._predictor)

    def _online_idle(self) -> float | None:
        """Number of the online engine's steps so far, or None while it is in a step."""
        found = self._online.read()
        return None if found is None or found.step_ends else found.steps

    def _on_beat(self) -> None:
        changes = self._stopped.shuts != (self.state.shut_by == Reason.DEVICE_BUSY)
        if changes and self._in_flight:  # The engine's loop, which asks the gate, waits for a step.
            self._note(Reason.OPEN, time.monotonic())
        self._flag.ignored = self._must_not_stop()

    def _must_not_stop(self) -> bool:
        """True if the step in flight must end even if the online engine's flag is up:

        1. The online engine is silent. It may have died with the flag up.
        2. Memory is being moved or must be released, and this waits for the step.
        3. The step was stopped for too long: a call waits for its end, or `schedule` will return
           the turns.
        """
        if self._moves_memory or self._online.read(self._lending.stale_after_s) is None:
            return True
        if self._target(copy.copy(self._budget)) < self.pool.mapped:
            return True
        steps, patience_s = [step for step, _, _ in self._in_flight], self._lending.patience_s
        runs_since = max(self._in_flight[0][2], self._last_ended) if steps else 0.0
        return self._stopped.must_end(steps, runs_since, patience_s, self._call_waits())

    # ------------------------------------------------------------------ memory

    def set_inactive(self, inactive: bool) -> None:
        """Release all KV memory while the engine has no weights. Without weights the engine can't
        use this memory, and while it loads them it couldn't release it. Must be called in the
        thread of the engine's loop, without running requests."""
        self._inactive = inactive
        if self.device is not None:
            self._fit_memory()

    def _fit_memory(self) -> None:
        """Map memory up to the budget, or release memory beyond it and evict requests for that.
        Also evict requests that wait and are too large for the lent memory."""
        target, held = self._target(self._budget), self.pool.mapped
        if not self._differs(target):
            target = held
        elif target > held:
            # This thread sees no revocation while it maps memory, so it maps little at once.
            target = min(target, held + max(AT_ONCE, self.pool.grain))
            # Publish the budget, then check again that the memory is free. The online engine does
            # the same, so that the two never take the same bytes.
            self._publish_budget(target)
            target = max(held, min(target, self._room()))
        else:
            # Evict the requests first that lose the least work.
            running = sorted(self.running, key=lambda request: request.num_computed_tokens)
            self.evict(
                running[: self.pool.excess(target, [request.request_id for request in running])]
            )
        self._moves_memory = True
        try:
            if target < held:
                # The release waits for the step in flight, which the online engine's stop flag must
                # therefore not hold.
                self._flag.ignored = True
            self._publish_budget(self.pool.limit(self.pool.total, target))
        finally:
            self._moves_memory = False
        self._evict_large()
        self.state.frozen = float(self._budget.frozen)

    def _evict_large(self) -> None:
        """Evict requests that have been too large for the lent memory for lending.patience_s."""
        blocks, now = self.pool.limit_bytes // self.pool.block_bytes, time.monotonic()
        large = [r for r in self.waiting if -(-r.num_tokens // self.block_size) > blocks]
        if not large:
            self._large_since = None
            return
        self._large_since = self._large_since or now
        if now - self._large_since > self._lending.patience_s:
            self._large_since = None
            self.evict(large)

    def _target(self, budget: Budget) -> float:
        """Bytes of pages to map: the budget, but no more than the online engine has released."""
        if self._inactive:
            return 0.0
        target = min(
            budget.update(time.monotonic(), self._online.read(), self.control.read()),
            self.pool.total,
        )
        held = self.pool.mapped
        return target if target <= held else max(held, min(target, self._room()))

    def _room(self) -> float:
        """Bytes of the device's KV memory that the online engine doesn't hold."""
        online = self._online.read(self._lending.stale_after_s)
        return self.device.kv_bytes - online.kv_held if online else 0.0

    def _publish_budget(self, nbytes: float) -> None:
        if self.state.kv_budget != nbytes:
            with self._writing:
                self.state.kv_budget = nbytes
                self._board.write()

    def _wants_loop(self) -> bool:
        if self.has_unfinished_requests():
            return False  # The loop runs anyway.
        if self._memory_changes(copy.copy(self._budget)):  # a copy: the loop's thread owns it
            return True
        # The worker reads the gate's state from the board. A run of the loop publishes a change.
        reason = self._gate.admit(
            time.monotonic(), self._online.read(), self.control.read(), Work((), 0, 0)
        ).reason
        return self._reason(reason) != self.state.shut_by

    def _write_board(self, step_ends: float | None = None) -> None:
        with self._writing:
            s = self.state
            s.running, s.waiting = len(self.running), len(self.waiting)
            if step_ends is not None:
                s.step_ends = step_ends
            s.kv_used = self.pool.used
            self._board.write()
