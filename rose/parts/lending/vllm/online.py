"""The online engine's scheduler: vLLM's own, which also publishes when the engine needs the device.

    --scheduler-cls rose.parts.lending.vllm.online.scheduler   (`rose serve` starts the server so)

It schedules requests as vLLM does, except that lent KV memory is not in its pool. As soon as
requests need this memory, the scheduler asks for it on its board, and uses it once the rollout
engine has released it (as its board shows) or is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import time
from dataclasses import dataclass
from statistics import fmean

from rose.heap import Ahead
from rose.parts.lending import board
from rose.parts.lending.board import Peer
from rose.parts.lending.rules.dial import Dial
from rose.parts.lending.rules.predictor import Predictor, Work
from rose.parts.lending.rules.slo import Attainment, Promptness, Request, hold_until
from rose.parts.lending.vllm.blocks import Layout
from rose.parts.lending.vllm.member import Member, vllm_scheduler
from rose.parts.lending.vllm.pool import AT_ONCE, IN_FLIGHT, Call
from rose.parts.lending.vllm.priority import restore_priority

MOST_KEPT = 0.25  # largest share of all KV memory that is kept free for the next step's prompts
# Most seconds for populating the process's heap: at the start, and at each beat without requests.
HEAP_START_S = 2.0
HEAP_BEAT_S = 0.005
# Memory is only lent when more than RELAX x lending.reserve is unused, so that small changes of
# what requests need move no memory.
RELAX = 2.0
# Least seconds between two moves of memory while steps are in flight, unless requests wait for it.
MOVE_EVERY_S = 0.05


def scheduler(vllm_config, **others):
    """Create the scheduler. vLLM calls this as its `scheduler_cls`."""
    return vllm_scheduler(OnlineScheduler, vllm_config, **others)


@dataclass
class _Seen:
    """A request from its arrival to its end; times are monotonic."""

    arrival: float
    first_token_at: float | None = None
    last_token_at: float = 0.0
    tokens: int = 0
    # True if the rollout engine was busy when a step of this engine began during this request.
    lent: bool = False


class OnlineScheduler(Member):
    """vLLM's scheduler of the online engine on a shared device."""

    kind = board.Online
    board_name = "online"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._seen: dict[str, _Seen] = {}
        self._promptness: Promptness | None = None
        if self.device is None:
            return
        lending, slo = self.device.serving.lending, self.device.serving.online.slo
        self._lending, self._slo = lending, slo
        self._predictor = (
            Predictor.from_dict(self.device.profile["online"]["predictor"])
            if self.device.profile
            else None
        )
        found = (self.device.profile or {}).get("interference", {})
        self._dial = Dial(slo, found.get("hold_p99", 1.0), found.get("hold_mean", 1.0))
        self._lets = False  # true if the rollout engine may run beside the step in flight
        self._flag.up = False
        self._attainment = Attainment(slo) if slo else None
        self._promptness = Promptness(slo) if slo else None
        self._rollout = Peer(self.device.folder / "rollout", board.Rollout)
        self._reserve = lending.reserve * self.device.kv_bytes
        self._step_bytes = min(
            self._kv_bytes(self.max_num_scheduled_tokens), MOST_KEPT * self.device.kv_bytes
        )
        self._heap: Ahead | None = None
        self._asked_at: float | None = None  # time at which requests began to wait for lent memory
        self._releasing = False  # true if more memory will be released at later steps
        self._moved_at = 0.0  # time of the last move of memory beside a step in flight
        self.state.kv_held = self.device.kv_bytes  # estimate until `begin`

    def attach(self, core) -> None:
        if self.device is not None and core.vllm_config.device_config.device_type == "cpu":
            self._heap = Ahead()
            self._heap.catch_up(HEAP_START_S)
        super().attach(core)

    def begin(self, call: Call, layout: Layout | None = None, page: int = 0) -> None:
        super().begin(call, layout, page)
        self._share_memory(at_once=True)

    def _publish(self) -> None:
        if self._promptness is not None:
            now = time.monotonic()
            with self._writing:
                self.state.prompt_share = self._promptness.share(now)
                misses = self._attainment.misses_alone(now, busy=bool(self._seen))
                self.state.lends = float(not misses)
        super()._publish()

    # ------------------------------------------------------------------ vLLM's calls

    def add_request(self, request) -> None:
        super().add_request(request)
        if self.device is None or request.request_id in self._seen:
            return
        # vLLM's arrival time is wall-clock time, which may be set. So the wait is limited.
        waited = min(max(0.0, time.time() - request.arrival_time), 60.0)
        self._seen[request.request_id] = _Seen(time.monotonic() - waited)
        self._write_board()

    def schedule(self, throttle_prefills: bool = False):
        if self.device is None:
            return super().schedule(throttle_prefills)
        self._due = False
        if self.waiting and not self.running:
            self._clear_the_device()
        self._share_memory()
        before = {r.request_id: r.num_preemptions for r in self.running}
        output = super().schedule(throttle_prefills)
        self.state.preempted += sum(
            self.requests[name].num_preemptions > count
            for name, count in before.items()
            if name in self.requests
        )
        if not output.total_num_scheduled_tokens:
            if not self._in_flight:
                self._flag.up = False
            self._write_board()
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.device is None:
            return outputs
        now = time.monotonic()
        paces = [self._count(output, now) for group in outputs.values() for output in group.outputs]
        if decodes := [pace for pace in paces if pace is not None]:
            self._dial.decoded(fmean(decodes))
        self._write_board()
        self._stop_rollouts()
        return outputs

    def finish_requests(self, request_ids, finished_status):
        finished = super().finish_requests(request_ids, finished_status)
        if self.device is not None:
            for request in finished:
                self._ended_early(self._seen.pop(request.request_id, None))
            self._write_board()
        return finished

    # ------------------------------------------------------------------ what is published

    def _step_begins(self, work: Work, began: float) -> None:
        if self.device is None:
            return
        rollout = self._rollout.read(self._lending.stale_after_s)
        if rollout is not None and (rollout.running > 0 or rollout.step_ends > 0):
            for seen in self._seen.values():
                seen.lent = True
        self._write_board(self._ends_at(self._predictor))
        if len(self._in_flight) == 1:
            self._stop_rollouts()

    def _step_ended(self, work: Work, began: float, ended: float) -> None:
        if self.device is None:
            return
        s = self.state
        s.steps += 1
        s.busy_s += ended - began
        s.shared_s += (ended - began) * self._lets
        s.prompt_tokens += sum(count for count, _ in work.prefill)
        if self._predictor:
            self._predictor.observe(work, ended - began)
            s.step_error, s.step_p99 = self._predictor.error
        s.step_ends = self._ends_at(self._predictor)

    def _clear_the_device(self) -> None:
        """Raise the flag before the first step of new requests is planned. Planning takes a
        millisecond, in which a rollout step reaches its next stop."""
        control = self.control.read()
        if control is None or control.stops > 0:
            self._flag.up = True

    def _stop_rollouts(self) -> None:
        """Raise or lower the flag for the step that the device runs now.

        The flag is down
        1. while no request runs;
        2. while requests wait for memory, which a stopped rollout step may keep;
        3. beside a step for which the dial allows it;
        4. if the operator switched stops off.
        Between two steps of running requests it stays as it is.
        """
        control = self.control.read()
        if control is not None and not control.stops > 0:
            self._lets, self._flag.up = True, False
        elif self._in_flight:
            s, work = self.state, self._in_flight[0][1]
            self._lets = self._waits_for_memory() or self._dial.lets(
                work, s.decode_s, s.hold_until - time.monotonic()
            )
            self._flag.up = not self._lets
        elif not self.running or self._waits_for_memory():
            self._flag.up = False
        if not self._seen:
            self._dial.idle()

    def _waits_for_memory(self) -> bool:
        """True if requests wait for memory while the rollout engine has some."""
        return bool(self.waiting) and self._to_come() > self.pool.free and self._lent() > 0

    def _write_board(self, step_ends: float | None = None) -> None:
        with self._writing:
            s = self.state
            s.running = len(self.running)
            s.waiting = len(self.waiting) + len(self.kv_holding_waiting)
            if step_ends is not None:
                s.step_ends = step_ends
            s.hold_until, s.decode_s = self._hold_until(), self._decode_s()
            s.kv_used, s.kv_held = self.pool.used, max(self.pool.mapped, self.pool.limit_bytes)
            self._board.write()

    def _hold_until(self) -> float:
        """Compute `hold_until` of the board from the present requests."""
        if not self._seen:
            return board.INFINITE
        now = time.monotonic()
        if self._predictor is None or self._slo is None:
            return now
        # Tokens in flight count as not computed yet, because a rollout step delays them, too.
        requests, in_flight = [], self._tokens_in_flight()
        for name, seen in self._seen.items():
            request = self.requests.get(name)
            if request is None:
                continue
            done = max(0, request.num_computed_tokens - in_flight[name])
            left = max(0, request.num_tokens - done)
            if seen.first_token_at is not None and left <= 1:
                left = 0
            requests.append(
                Request(
                    seen.arrival,
                    left,
                    done,
                    seen.first_token_at,
                    seen.tokens,
                    seen.last_token_at if seen.first_token_at is not None else None,
                )
            )
        return hold_until(
            now,
            requests,
            self._predictor,
            self._slo,
            self.max_num_scheduled_tokens,
            self.max_num_running_reqs,
        )

    def _decode_s(self) -> float:
        """Predict the seconds of a step of all decoding requests; 0 if none decodes."""
        running = [
            self.requests[name].num_computed_tokens
            for name, seen in self._seen.items()
            if seen.first_token_at is not None and name in self.requests
        ]
        if not running or not self._predictor:
            return 0.0
        return self._predictor.seconds(Work((), len(running), sum(running)))

    def _count(self, output, now: float) -> float | None:
        """Count the new tokens of a request. Return the seconds per token; None without new tokens,
        or if the request's first token is among them."""
        pace, seen = None, self._seen.get(output.request_id)
        if seen is None:
            return None
        if output.new_token_ids:
            if seen.first_token_at is None:
                seen.first_token_at = now
                if self._promptness is not None:
                    self._promptness.add(now, now - seen.arrival)
            else:
                pace = (now - seen.last_token_at) / len(output.new_token_ids)
            seen.last_token_at = now
            seen.tokens += len(output.new_token_ids)
            self.state.made_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            del self._seen[output.request_id]
            if self._attainment is not None:
                self._judge(seen)
        return pace

    def _ended_early(self, seen: _Seen | None) -> None:
        """Count an aborted request. It counts as missed only if its first token was late."""
        if seen is None or self._slo is None:
            return
        self.state.aborted += 1
        if seen.first_token_at is None and time.monotonic() - seen.arrival > self._slo.ttft_p99_s:
            self._judge(seen)

    def _judge(self, seen: _Seen) -> None:
        """Count a request among the finished ones, and as met if it met both P99 targets."""
        ttft = None if seen.first_token_at is None else seen.first_token_at - seen.arrival
        tpot = None
        if seen.tokens > 1:
            tpot = (seen.last_token_at - seen.first_token_at) / (seen.tokens - 1)
        now = time.monotonic()
        with self._writing:
            s, a = self.state, self._attainment
            a.add(now, ttft, tpot, seen.lent)
            s.finished = a.finished
            s.met = a.met
            s.finished_lending = a.finished_lending
            s.met_lending = a.met_lending

    # ------------------------------------------------------------------ memory

    def _needed(self) -> float:
        """Bytes that requests use or will use before their next token, with room for at least a
        step full of prompts. Without this room, a new request would wait a step for memory."""
        return self.pool.used + max(self._to_come(), self._step_bytes)

    def _to_come(self) -> int:
        """Further bytes that requests will use before their next token."""
        requests = [*self.running, *self.waiting, *self.kv_holding_waiting]
        return sum(
            self._kv_bytes(r.num_tokens) - self._kv_bytes(r.num_computed_tokens) for r in requests
        )

    def _soon(self) -> float:
        """Bytes that requests use or will use in the next step, with room for at least a step full
        of prompts. Prompts count as a whole."""
        tokens = nbytes = 0
        for r in itertools.chain(self.running, self.waiting, self.kv_holding_waiting):
            if tokens >= self.max_num_scheduled_tokens:
                break
            tokens += max(1, r.num_tokens - r.num_computed_tokens)
            nbytes += self._kv_bytes(r.num_tokens + 1) - self._kv_bytes(r.num_computed_tokens)
        return self.pool.used + max(nbytes, self._step_bytes)

    def _to_hold(self, needed: float) -> float:
        """Bytes that this engine should hold: `needed` and a reserve for growth, or the present
        bytes if a change would gain little."""
        held = self.pool.limit_bytes
        if not self._releasing and needed + self._reserve <= held <= needed + RELAX * self._reserve:
            return held
        return min(needed + self._reserve, self.pool.total)

    def _lends(self) -> bool:
        """True if the operator lends, and a rollout engine lives that could use the memory."""
        control = self.control.read(self._lending.stale_after_s)
        return control is not None and control.lend > 0 and not self._rollout.gone()

    def _kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV blocks for this many tokens."""
        return -(-max(0, tokens) // self.block_size) * self.pool.block_bytes

    def _lent(self) -> float:
        """Bytes of KV memory that the rollout engine may be using."""
        rollout = self._rollout.read()
        if rollout is not None:
            return rollout.kv_budget if board.is_alive(rollout) else 0.0
        # Without a readable board, a living rollout engine may use all memory that was lent.
        return 0.0 if self._rollout.gone() else max(0.0, self.device.kv_bytes - self.pool.mapped)

    def _share_memory(self, at_once: bool = False) -> None:
        """Publish the memory that this engine needs, then map or release memory.

        Each engine publishes before it reads the other engine's board, so they never take the same
        bytes. Unless `at_once`, a call moves little memory beyond the next step's need, because all
        running requests wait for it; while a step is in flight, even less, and not at each call.
        """
        needed = self._needed()
        goal = self._to_hold(needed) if self._lends() else self.pool.total
        piece = math.inf if at_once else IN_FLIGHT if self._in_flight else AT_ONCE
        hold = self._paced(goal, piece)
        grows = hold > self.pool.limit_bytes
        with self._writing:
            self.state.kv_wanted = needed + self.pool.overhead
            # While the pool grows, this engine may take any part of the device's memory.
            self.state.kv_held = self.device.kv_bytes if grows else self.pool.mapped
            self._board.write()
        reached = self.pool.limit(hold, self.device.kv_bytes - self._lent(), piece)
        self._releasing = self.pool.limit_bytes > goal
        with self._writing:
            self.state.kv_held = max(reached, self.pool.limit_bytes)
            self._board.write()

    def _paced(self, goal: float, piece: float) -> float:
        """Bytes to hold after this step is planned, on the way to `goal`. At most `piece` bytes
        move beyond the next step's need; beside a step in flight, only every MOVE_EVERY_S."""
        soon, now = self._soon(), time.monotonic()
        hold = self.pool.paced(goal, soon, piece)
        if not self._in_flight or hold == self.pool.limit_bytes or soon > self.pool.limit_bytes:
            return hold
        if now - self._moved_at < MOVE_EVERY_S:
            return self.pool.limit_bytes
        self._moved_at = now
        return hold

    def _on_beat(self) -> None:
        """Lower the flag if no step needs it, populate the heap while idle, and reclaim memory."""
        if not self._in_flight and not (self.running and self.has_unfinished_requests()):
            self._flag.up = False
        if self._heap is not None and not self._seen:
            self._heap.catch_up(HEAP_BEAT_S)
        self._reclaim()

    def _reclaim(self) -> None:
        """Make the rollout engine release memory that online requests wait for: raise its priority,
        so that it gets CPU time, and kill it if it keeps the memory for lending.revoke_after_s."""
        now, rollout, missing = time.monotonic(), self._rollout.read() or self._rollout.last, 0.0
        if rollout is not None and self._waits_for_memory():
            self._flag.up = False
            wanted = min(self.pool.used + self._to_come(), self.pool.total) + self.pool.overhead
            missing = wanted - (self.device.kv_bytes - rollout.kv_budget)
        if missing < self.pool.block_bytes or not board.is_alive(rollout):
            self._asked_at = None
            return
        self._asked_at = self._asked_at or now
        if now - self._asked_at > self._lending.revoke_after_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rollout.pid), signal.SIGKILL)
        else:
            restore_priority(int(rollout.pid))

    def _wants_loop(self) -> bool:
        if self.has_unfinished_requests():
            return False  # each step moves memory anyway
        hold = self._to_hold(self._needed()) if self._lends() else self.pool.total
        now = self.pool.limit_bytes
        room, block = self.device.kv_bytes - self._lent() - self.pool.mapped, self.pool.block_bytes
        if room < 0 or self.pool.scattered or hold <= now - block:
            return True
        return hold >= now + block and room >= self.pool.grain and self.pool.can_map
