"""The engine process of the check `rate`: times of a step's parts, and levers that can be moved.

vLLM imports this module in its worker. On one GPU that is the engine process.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.serial_utils import MsgpackEncoder

from rose.engine import outputs
from rose.engine.worker_extension import WorkerExtension

CORES: list[EngineCoreProc] = []  # the engine core, once it has made a step
# Part of a step -> seconds of wall time, and (name, "processor") -> of processor time.
SPENT: Counter[str] = Counter()


def timed(name: str, function: Callable) -> Callable:
    """Return `function` with its time added to `SPENT`."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        began, computed = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            SPENT[name] += time.perf_counter() - began
            SPENT[f"{name}, processor"] += time.thread_time() - computed

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

    def rate_levers(self, interval: int, collects: bool, switch_s: float) -> None:
        """Set the tokens that `rose.engine.outputs` keeps, whether Python collects garbage, and the
        time after which a thread must leave the GIL."""
        for core in CORES:
            outputs.kept_by(core).interval = interval
        gc.enable() if collects else gc.disable()
        sys.setswitchinterval(switch_s)
        SPENT.clear()

    def rate_spent(self) -> dict[str, float]:
        return {name: float(value) for name, value in SPENT.items()}
