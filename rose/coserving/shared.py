"""One engine for both sides, where they serve the same weights: online requests first, rollouts in what is left.

    --scheduler-cls rose.coserving.shared.scheduler --scheduling-policy priority

Requests with a priority of `names.ROLLOUT_PRIORITY` or more are rollouts. Before each step it is decided how many tokens
of theirs may go into it: as many as make it no longer than online requests have slack, by the rule of
rose/coserving/gate.py (here a rollout token holds an online request up by all of what it adds to the step). Blocks that
online requests need are freed beforehand by handing rollouts back, so that none of them is ever preempted for a rollout.
"""

from __future__ import annotations

import itertools
import time

from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.request import Request

from rose.coserving import board, names
from rose.coserving.evict import Evicting
from rose.coserving.gate import Reason, largest, lent, part
from rose.coserving.member import pause_s, vllm_scheduler
from rose.coserving.online import OnlineScheduler
from rose.coserving.predictor import Work
from rose.coserving.slo import pace
from rose.coserving.steps import decodes_next, left_of, together, work_of

FIRST_WAIT_S, LAST_WAIT_S = 0.002, 0.05  # of a loop that has nothing but rollouts which may not run


def scheduler(vllm_config, **rest):
    """For vLLM's `scheduler_cls`."""
    return vllm_scheduler(SharedScheduler, vllm_config, **rest)


class SharedScheduler(Evicting, OnlineScheduler):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.device is None:
            raise ValueError(f"{names.FOLDER} is not set: which device's configuration and boards?")
        if self.policy is not SchedulingPolicy.PRIORITY:
            raise ValueError(f"scheduling policy {self.policy.value!r}: one engine for both sides needs "
                             "--scheduling-policy priority")
        self._rollout_board = board.Writer(self.device.folder / "rollout", board.Rollout)
        self.rollout_state = self._rollout_board.state
        self.rollout_state.kv_total = self.pool.total
        self._gate_since = self._moved_at = time.monotonic()
        self._hand_back = False  # rollouts have been kept waiting for too long
        self._held_up = 0.0  # seconds by which rollouts made steps longer since no online prompt waited the last time

    def _publish(self) -> None:
        """In the beat's thread too: an engine without rollouts says what they would find."""
        super()._publish()
        with self._writing:
            s = self.rollout_state
            if not s.running + s.waiting:
                reason = self._reason()
                s.open, s.shut_by = float(reason is Reason.OPEN), float(reason)
            s.kv_budget = self._budget()
            self._rollout_board.write()

    # ------------------------------------------------------------------ vLLM's calls

    def add_request(self, request) -> None:
        if is_rollout(request) and not any(is_rollout(r) for r in self.requests.values()):
            self._moved_at = self._gate_since = time.monotonic()  # nobody has waited meanwhile
        super().add_request(request)
        if is_rollout(request):
            self._seen.pop(request.request_id, None)
            self._tell()

    def schedule(self, throttle_prefills: bool = False):
        if not any(is_rollout(r) for r in self.requests.values()):
            self.max_num_scheduled_tokens = self._most
            return super().schedule(throttle_prefills)
        if self._hand_back:
            self._hand_back = False
            self.evict([r for r in self.requests.values() if is_rollout(r)])
        self._make_room()
        running, waiting = self._hide()
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.running = running + self.running  # first in line the next time
            if waiting is not self.waiting:
                waiting.prepend_requests(self.waiting)
                self.waiting = waiting
        if not output.total_num_scheduled_tokens:
            self._tell_rollouts()
            if not self._in_flight:
                self._wait()
        self.rollout_state.steps += any(is_rollout(self.requests[name]) for name in output.num_scheduled_tokens)
        return output

    def _wait(self) -> None:
        """For requests or aborts, for a while."""
        now = time.monotonic()
        end = now + pause_s(now - self._moved_at, FIRST_WAIT_S, LAST_WAIT_S)
        while time.monotonic() < end and not self._called():
            time.sleep(FIRST_WAIT_S)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for group in outputs.values():
            for output in group.outputs:
                request = self.requests.get(output.request_id)
                if request is not None and is_rollout(request):
                    self.rollout_state.made_tokens += len(output.new_token_ids)
        self._tell_rollouts()
        return outputs

    def _share_memory(self, at_once: bool = False) -> None:
        """There is nobody else's: blocks change hands inside of one pool."""
        held = self.pool.limit(self.pool.total)
        with self._writing:
            self.state.kv_wanted = self.state.kv_held = held

    def _wants_turn(self) -> bool:
        return False

    def _insist(self) -> None:
        """Nobody else keeps what online requests wait for."""

    # ------------------------------------------------------------------ what rollouts may have

    def _make_room(self) -> None:
        """Free the blocks that online requests need in this step."""
        missing = self._online_need() - self.kv_cache_manager.block_pool.get_num_free_blocks()
        if missing > 0:
            self.evict_blocks(missing, [r for r in self.running if is_rollout(r)])

    def _online_need(self) -> int:
        """Blocks: for waiting prompts whole, for running requests one more each."""
        size = self.block_size
        waiting = [r for r in [*self.waiting, *self.kv_holding_waiting] if not is_rollout(r)]
        running = [r for r in self.running if not is_rollout(r)]
        return (sum(-(-r.num_tokens // size) + 1 for r in waiting)
                + sum(-(-max(1, r.num_tokens - r.num_computed_tokens) // size) + 1 for r in running))

    def _hide(self) -> tuple[list[Request], RequestQueue]:
        """Take the rollouts that may not go into this step out of vLLM's sight; returns those that ran and the queue of
        those that waited. The others come behind all online requests."""
        online, decodes, prompts = [], [], []
        for request in self.running:
            (online if not is_rollout(request) else decodes if decodes_next(request) else prompts).append(request)
        arriving = list(itertools.takewhile(lambda request: not is_rollout(request), self.waiting))  # they come first
        # beside online prompts to begin rollouts only decode
        wishes = decodes if arriving else itertools.chain(decodes, prompts, self.waiting)
        own = work_of(online)
        if not arriving and not own.prefill:
            self._held_up = 0.0
        tokens = self._admit(own, work_of(wishes, self._lending.chunk_tokens))
        if tokens > len(decodes):
            self.running = online + decodes + prompts
            self.max_num_scheduled_tokens = min(self._most, sum(map(left_of, online)) + tokens)
            return [], self.waiting
        self.running = online + decodes[:tokens]
        self.max_num_scheduled_tokens = self._most
        everybody, self.waiting = self.waiting, create_request_queue(self.policy)
        everybody.remove_requests(arriving)
        self.waiting.prepend_requests(arriving)
        return decodes[tokens:] + prompts, everybody

    def _admit(self, own: Work, demand: Work) -> int:
        """Tokens of `demand`, the rollouts' wishes, beside `own`, the online requests' part of the step."""
        now, reason = time.monotonic(), self._reason()
        tokens = self._largest(now, own, demand) if reason is Reason.OPEN else 0
        if reason is Reason.OPEN and not tokens:
            reason = Reason.SLACK
        state, self._gate_since, passed = self.rollout_state, now, now - self._gate_since
        if state.open:
            state.open_s += passed
        else:
            state.shut_s += passed
        state.open, state.shut_by = float(reason is Reason.OPEN), float(reason)
        if tokens:
            self._moved_at = now
        elif now - self._moved_at > self._lending.patience_s:
            self._moved_at = now
            self._hand_back = True
        return tokens

    def _reason(self) -> Reason:
        """OPEN if anything is lent at all."""
        reason = lent(time.monotonic(), self._board.state, self.control.read(), self._lending)
        if reason is Reason.OPEN and (self._predictor is None or self._slo is None):
            reason = Reason.NO_PROFILE if self._predictor is None else Reason.NO_SLO
        return reason

    def _budget(self) -> float:
        """Bytes that rollouts could hold now: their share of the hour, but neither what online requests use nor the
        reserve for their growth."""
        control = self.control.read()
        if control is None or not control.lend > 0:
            return 0.0
        used = self.pool.used - self.rollout_state.kv_used  # by online requests
        return max(0.0, min(self.pool.total * min(control.share, 1.0), self.pool.total - used - self._reserve))

    def _largest(self, now: float, own: Work, demand: Work) -> int:
        """The most tokens of `demand` that may be in the step with `own`, which are counted in; see
        rose/coserving/gate.py. What a request to come may lose is lost once, not with each step of the queue that it
        finds: from when prompts wait until none does, all steps together."""
        predictor = self._predictor
        share = self._lending.step_share * self._slo.ttft_p99_s * self._promptness.share(now) - self._held_up
        slack = self._hold_until() - now
        paced = self._pace(now) if own.decodes else board.INFINITE
        alone = predictor.seconds(own)
        alone_p99 = alone * predictor.margin(own)

        def fits(tokens: int) -> bool:
            both = together(own, part(demand, tokens))
            seconds = predictor.seconds(both)
            return (seconds - alone <= share and seconds * predictor.margin(both) - alone_p99 <= slack
                    and seconds <= paced)

        tokens = largest(fits, 0, min(self._lending.chunk_tokens, demand.tokens))
        if tokens:
            self._held_up += predictor.seconds(together(own, part(demand, tokens))) - alone
        return tokens

    def _pace(self, now: float) -> float:
        """Seconds that the next step may take for online requests to keep tpot_p50_s on average."""
        if self._in_flight:
            _, work, began = self._in_flight[-1]
            now = max(now, began + self._predictor.seconds(work))
        running = [(seen, self.requests[name]) for name, seen in self._seen.items()
                   if seen.first_token_at is not None and name in self.requests]
        return pace(now, ((seen.first_token_at, seen.tokens + request.num_output_placeholders)
                          for seen, request in running), self._slo)

    def _tell_rollouts(self) -> None:
        count = blocks = 0
        for request in self.requests.values():
            if is_rollout(request):
                count += 1
                blocks += -(-request.num_computed_tokens // self.block_size)  # shared ones repeatedly
        with self._writing:
            s = self.rollout_state
            s.running = sum(map(is_rollout, self.running))
            s.waiting = count - s.running
            s.kv_used = min(blocks * self.pool.block_bytes, self.pool.used)
            s.kv_budget = self._budget()
            self._rollout_board.write()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """New weights: what older ones cached is forgotten, while requests run on with the blocks that they hold.
        vLLM's own does nothing then, or preempts them."""
        self.kv_cache_manager.evict_blocks(set(range(1, self.pool.count + 1)))
        return True


def is_rollout(request: Request) -> bool:
    return request.priority >= names.ROLLOUT_PRIORITY
