"""What the schedulers of both engines have in common: a board that is kept fresh, the other's
board, memory that is held or given back, and a loop that can be woken for it."""

from __future__ import annotations

import threading
import time
from typing import Any

from rose.engine import plugin
from rose.engine.blocks import Layout
from rose.lending import board
from rose.lending.board import Peer
from rose.lending.rules.predictor import Predictor
from rose.lending.vllm import device
from rose.lending.vllm.pool import Call, Pool
from rose.lending.vllm.steps import Timed

BEAT_S = 0.02  # between two signs of life; lending.stale_after_s is many of them
LATE = 16  # a shut gate is polled after a 16th of the time for which it has been shut


class Member(Timed):
    """Mixin before vLLM's scheduler, which without a device in the environment is only timed."""

    kind: type  # of its board
    board_name: str

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.device = device.here()
        self._core: Any = None
        self._due = False  # memory must change hands: the loop turns once more for it
        if self.device is None:
            return
        if len(self.kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"{len(self.kv_cache_config.kv_cache_groups)} groups of KV cache: co-serving lends "
                "the cache of models with one (no sliding windows or states beside full attention)"
            )
        self.pool = Pool(self.kv_cache_manager, self.kv_cache_config)
        self.control = Peer(self.device.folder / "control", board.Control)
        self._board = board.Writer(self.device.folder / self.board_name, self.kind)
        self.state = self._board.state
        self.state.kv_total = self.pool.total
        self._writing = threading.Lock()
        self._beats = threading.Thread(target=self._beat, name="rose-beat", daemon=True)

    def attach(self, core: Any) -> None:
        """Called from the plugin, once, when the engine is complete and before its first step."""
        if self.device is None:
            return
        self._core = core
        try:
            layout = core.model_executor.collective_rpc("rose_kv_layout")[0]
        except Exception as error:
            raise ValueError(
                "this engine's workers can't give memory back: start it with worker_extension_cls="
                f"rose.engine.kv_worker.KvWorker ({error})"
            ) from error
        where = Layout(*(layout[name] for name in Layout._fields))
        call = core.model_executor.collective_rpc
        self.begin(lambda method, ids: call(method, args=(ids,)), where, layout["page_bytes"])
        self._publish()
        self._beats.start()

    def begin(self, call: Call, layout: Layout | None = None, page: int = 0) -> None:
        """See `Pool.begin`."""
        self.pool.begin(call, layout, page)

    def has_requests(self) -> bool:
        return self._due or super().has_requests()

    def _ends_at(self, predictor: Predictor | None) -> float:
        """When all steps in flight will have ended at their P99; 0 without any, or without a
        predictor."""
        if not predictor or not self._in_flight:
            return 0.0
        return time.monotonic() + self._in_flight_s(predictor)[1]

    def _publish(self) -> None:
        with self._writing:
            self._board.write()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self._beats_once()
                if not self._due and self._wants_turn():
                    self._due = True
                    self._wake()
            except RuntimeError as error:
                # else the loop's thread changed a queue that was looked at
                if "during iteration" not in str(error):
                    raise  # the board then falls silent, and nothing is lent
            self._publish()

    def _wake(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _called(self) -> bool:
        """Whether requests, aborts or calls wait for the engine's loop."""
        return self._core is not None and not self._core.input_queue.empty()

    def _beats_once(self) -> None:
        """Called in the beat's thread, each time."""

    def _wants_turn(self) -> bool:
        """Called in the beat's thread: whether memory should move though no request calls for a
        step."""
        raise NotImplementedError


def pause_s(shut_s: float, first_s: float, last_s: float) -> float:
    """Seconds until the next poll of a gate that has been shut for `shut_s`, within the limits."""
    return min(max(first_s, shut_s / LATE), last_s)


def vllm_scheduler(mixin: type, vllm_config: Any, **rest: Any) -> Any:
    """`mixin` over the scheduler that vLLM would take: the asynchronous one only where steps
    overlap. Raises `ValueError` as `plugin.refuse_drafts` does."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    plugin.refuse_drafts(vllm_config)
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type(mixin.__name__, (mixin, base), {})(vllm_config=vllm_config, **rest)
