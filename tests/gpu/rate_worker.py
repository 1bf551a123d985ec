"""The engine process of the check `rate`: times of a step's parts, and levers that can be moved.

vLLM imports this module in its worker. On one GPU that is the engine process.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter
from collections.abc import Callable

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.serial_utils import MsgpackEncoder

from rose.engine import outputs
from rose.engine.worker_extension import WorkerExtension

CORES: list[EngineCoreProc] = []  # the engine core, once it has made a step
SPENT: Counter[str] = Counter()  # seconds by part of a step, and the number of steps
# rose/engine/slots.py has replaced vLLM's function by this one.
QUICK_SLOTS = KVCacheManager.allocate_slots


def timed(name: str, function: Callable) -> Callable:
    """Return `function` with its wall time added to `SPENT`."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SPENT[name] += time.perf_counter() - began

    return wrapper


def first_step(process: Callable) -> Callable:
    """Return `EngineCoreProc._process_engine_step`, which times its parts from the second step."""

    def _process_engine_step(core):
        if not CORES:
            CORES.append(core)
            scheduler, executor = core.scheduler, core.model_executor
            scheduler.schedule = timed("schedule", scheduler.schedule)
            scheduler.update_from_output = timed("update", scheduler.update_from_output)
            executor.execute_model = timed("execute", executor.execute_model)
            executor.sample_tokens = timed("sample", executor.sample_tokens)
        SPENT["steps"] += 1
        return process(core)

    return _process_engine_step


EngineCoreProc._process_engine_step = timed(
    "whole", first_step(EngineCoreProc._process_engine_step)
)
AsyncOutputFuture.result = timed("wait", AsyncOutputFuture.result)
MsgpackEncoder.encode_into = timed("encode (another thread)", MsgpackEncoder.encode_into)


class Extension(WorkerExtension):
    """Mixed into vLLM's worker."""

    def rate_levers(self, interval: int, collects: bool, slots: bool) -> None:
        """Set the levers of `tests.gpu.rate.Way` in this process."""
        for core in CORES:
            outputs.kept_by(core).interval = interval
        gc.enable() if collects else gc.disable()
        KVCacheManager.allocate_slots = QUICK_SLOTS if slots else QUICK_SLOTS.__wrapped__
        SPENT.clear()

    def rate_spent(self) -> dict[str, float]:
        return {name: float(value) for name, value in SPENT.items()}
