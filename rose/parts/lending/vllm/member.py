"""The common part of both engines' schedulers: keep the board fresh, map and release KV memory, and
wake the engine's loop for that."""

from __future__ import annotations

import threading
import time
from typing import Any

from rose.engine import plugin
from rose.parts.lending import board
from rose.parts.lending.board import Peer
from rose.parts.lending.flag import Flag
from rose.parts.lending.rules.predictor import Predictor
from rose.parts.lending.vllm import device
from rose.parts.lending.vllm.blocks import Layout
from rose.parts.lending.vllm.pool import Call, Pool
from rose.parts.lending.vllm.steps import Timed

BEAT_S = 0.02  # seconds between two writes of the board; lending.stale_after_s is many times that
LATE = 16  # a gate that has been shut for t seconds is polled again after t / LATE seconds


class Member(Timed):
    """A mixin before vLLM's scheduler class. It only times steps if no device is shared."""

    kind: type  # type of the board's state: board.Online or board.Rollout
    board_name: str

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.device = device.here()
        self._core: Any = None
        # True if memory must be mapped or released. The engine's loop then runs without requests.
        self._due = False
        if self.device is None:
            return
        if len(self.kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"{len(self.kv_cache_config.kv_cache_groups)} groups of KV cache: co-serving lends "
                "the cache of models with one (no sliding windows or states beside full attention)"
            )
        self.pool = Pool(self.kv_cache_manager, self.kv_cache_config)
        self.control = Peer(self.device.folder / "control", board.Control)
        self._flag = Flag(self.device.folder)
        self._board = board.Writer(self.device.folder / self.board_name, self.kind)
        self.state = self._board.state
        self.state.kv_total = self.pool.total
        self._writing = threading.Lock()
        self._beats = threading.Thread(target=self._beat, name="rose-beat", daemon=True)

    def attach(self, core: Any) -> None:
        """Connect to the engine core and begin to publish. `shared_device.register` makes the
        engine call this once, before its first step."""
        if self.device is None:
            return
        self._core = core
        try:
            layout = core.model_executor.collective_rpc("rose_kv_layout")[0]
        except Exception as error:
            raise ValueError(
                "this engine's workers can't release memory: start it with worker_extension_cls="
                f"rose.parts.lending.vllm.kv_worker.KvWorker ({error})"
            ) from error
        where = Layout(*(layout[name] for name in Layout._fields))
        call = core.model_executor.collective_rpc
        self.begin(lambda method, ids: call(method, args=(ids,)), where, layout["page_bytes"])
        self._publish()
        self._beats.start()

    def begin(self, call: Call, layout: Layout | None = None, page: int = 0) -> None:
        """Begin to manage memory: see `Pool.begin`."""
        self.pool.begin(call, layout, page)

    def has_requests(self) -> bool:
        return self._due or super().has_requests()

    def _ends_at(self, predictor: Predictor | None) -> float:
        """Predict when the steps in flight end if each takes its P99; 0 without steps or
        predictor."""
        if not predictor or not self._in_flight:
            return 0.0
        return time.monotonic() + self._in_flight_s(predictor)[1]

    def _publish(self) -> None:
        with self._writing:
            self._board.write()

    def _beat(self) -> None:
        """Publish the board every BEAT_S, and wake the engine's loop if memory should move."""
        while True:
            time.sleep(BEAT_S)
            try:
                self._on_beat()
                if not self._due and self._wants_loop():
                    self._due = True
                    self._wake()
            except RuntimeError as error:
                # The loop's thread changed a queue meanwhile: the next beat tries again. Any other
                # error ends this thread, so that the board gets stale and nothing is lent.
                if "during iteration" not in str(error):
                    raise
            self._publish()

    def _wake(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _has_input(self) -> bool:
        """True if requests, aborts or calls wait for the engine's loop."""
        return self._core is not None and not self._core.input_queue.empty()

    def _call_waits(self) -> bool:
        """True if a call, an abort or the engine's shutdown waits for the engine's loop, or if a
        pause waits for nothing but the steps in flight."""
        from vllm.v1.engine import EngineCoreRequestType as Kind

        if self._core is None:
            return False
        queue = self._core.input_queue
        with queue.mutex:
            if any(kind is not Kind.ADD for kind, _ in queue.queue):
                return True
        pauses = getattr(self._core, "_idle_state_callbacks", None)
        return bool(pauses) and not self.has_unfinished_requests()

    def _on_beat(self) -> None:
        """Do this engine's work of each beat, in the beats' thread."""

    def _wants_loop(self) -> bool:
        """True if the loop should run without requests. Called at each beat, in its thread."""
        raise NotImplementedError


def pause_s(shut_s: float, first_s: float, last_s: float) -> float:
    """Return the seconds until the next poll of a gate that has been shut for `shut_s`: at least
    `first_s`, at most `last_s`."""
    return min(max(first_s, shut_s / LATE), last_s)


def vllm_scheduler(mixin: type, vllm_config: Any, **others: Any) -> Any:
    """Create a scheduler of `mixin` and vLLM's class, which is the asynchronous one if the engine
    overlaps steps. Raises `ValueError` as `plugin.refuse_drafts` does."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    plugin.refuse_drafts(vllm_config)
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type(mixin.__name__, (mixin, base), {})(vllm_config=vllm_config, **others)
