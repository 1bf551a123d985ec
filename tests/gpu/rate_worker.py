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

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.serial_utils import MsgpackEncoder

from rose.engine import outputs
from rose.engine.worker_extension import WorkerExtension

CORES: list[EngineCoreProc] = []  # the engine core, once it has made a step
# Part of a step -> seconds of wall time, and (name, "processor") -> of processor time.
SPENT: Counter[str] = Counter()
# rose/engine/slots.py has replaced vLLM's function by this one.
QUICK_SLOTS = KVCacheManager.allocate_slots
REPEATS = 200  # launches of a kernel that is timed


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


def with_wide_blocks(logprob, narrow: Callable) -> Callable:
    """Return vLLM's `compute_token_logprobs` with blocks of 8,192 logits instead of 1,024: the loop
    over a row waits for memory in each block."""

    def compute_token_logprobs(logits, token_ids):
        (rows, vocabulary), count = logits.shape, token_ids.shape[1]
        found = logits.new_empty((rows, count), dtype=torch.float32)
        token_ids = token_ids.to(torch.int64)
        logprob._topk_log_softmax_kernel[(rows,)](
            found,
            logits,
            logits.stride(0),
            token_ids,
            token_ids.stride(0),
            count,
            vocabulary,
            BLOCK_SIZE=8192,
            TOPK_BLOCK_SIZE=logprob.triton.next_power_of_2(count),
            num_warps=16,
        )
        return found

    compute_token_logprobs.narrow = narrow
    return compute_token_logprobs


class Extension(WorkerExtension):
    """Mixed into vLLM's worker."""

    def rate_levers(
        self, interval: int, collects: bool, switch_s: float, wide: bool, slots: bool
    ) -> None:
        """Set the levers of `tests.gpu.rate.Way` in this process."""
        for core in CORES:
            outputs.kept_by(core).interval = interval
        gc.enable() if collects else gc.disable()
        sys.setswitchinterval(switch_s)
        KVCacheManager.allocate_slots = QUICK_SLOTS if slots else QUICK_SLOTS.__wrapped__
        if self.device.type == "cuda":
            from vllm.v1.worker.gpu.sample import logprob

            narrow = getattr(
                logprob.compute_token_logprobs, "narrow", logprob.compute_token_logprobs
            )
            logprob.compute_token_logprobs = with_wide_blocks(logprob, narrow) if wide else narrow
        SPENT.clear()

    def rate_kernel(self, rows: int, vocabulary: int) -> dict[str, float]:
        """Return the microseconds of vLLM's kernel of log-probabilities, and with wide blocks, and
        the largest difference between both."""
        from vllm.v1.worker.gpu.sample import logprob

        logits = torch.randn(rows, vocabulary, device=self.device, dtype=torch.bfloat16) * 4
        tokens = torch.randint(0, vocabulary, (rows, 1), device=self.device)
        narrow = getattr(logprob.compute_token_logprobs, "narrow", logprob.compute_token_logprobs)
        wide = with_wide_blocks(logprob, narrow)
        difference = (narrow(logits, tokens) - wide(logits, tokens)).abs().max()
        took = {"largest difference": float(difference)}
        for name, function in (("vLLM's", narrow), ("wide blocks", wide)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(REPEATS):
                function(logits, tokens)
            torch.cuda.synchronize()
            took[name] = 1e6 * (time.perf_counter() - began) / REPEATS
        return took

    def rate_spent(self) -> dict[str, float]:
        return {name: float(value) for name, value in SPENT.items()}
