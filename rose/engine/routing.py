"""Make vLLM's CPU engines return the experts that each token was routed to.

vLLM 0.32 returns them (`enable_return_routed_experts`) only from its newer model runner (V2), which
needs Triton. The rest of that feature works with any runner: the scheduler's side, and the worker's
connector, which keeps the rows of cached prefixes by block. Here the older runner (V1), which CPU
engines use, reports its steps to the connector. As with V2, chunked prefill, prefix caching,
preemption and aborts change no row. Importing this module imports vLLM.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector


def allow() -> None:
    """Make vLLM's config check accept the older model runner in this process. The other checks for
    returned experts stay."""
    original = VllmConfig._verify_aux_output_compatibility
    if getattr(original, "allows_older", False):
        return

    def verify(self: VllmConfig) -> None:
        before = VllmConfig.use_v2_model_runner
        VllmConfig.use_v2_model_runner = True
        try:
            original(self)
        finally:
            VllmConfig.use_v2_model_runner = before

    verify.allows_older = True
    VllmConfig._verify_aux_output_compatibility = verify


def record(runner: Any) -> None:
    """Report every later step of `runner` to vLLM's connector of returned experts. `runner` is a V1
    model runner without speculative drafts and without asynchronous scheduling."""
    connector = get_aux_output_connector(
        runner.get_model(), runner.vllm_config, runner.kv_cache_config
    )
    execute, sample = runner.execute_model, runner.sample_tokens
    pending = None

    def execute_model(scheduler_output, intermediate_tensors=None):
        nonlocal pending
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        found = execute(scheduler_output, intermediate_tensors)
        if scheduler_output.total_num_scheduled_tokens:
            pending = connector.prepare_output(_batch(runner.input_batch, scheduler_output))
        return found

    def sample_tokens(grammar_output):
        nonlocal pending
        output, step = sample(grammar_output), pending
        pending = None
        if step is not None:
            counts = [len(tokens) for tokens in output.sampled_token_ids]
            step.enqueue_cpu_copy(np.array(counts), np.zeros(len(counts), np.int64))
            output.aux_output_connector_output = step.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _batch(batch: Any, scheduler_output: Any) -> SimpleNamespace:
    """Return the fields of the V2 runner's batch that the connector reads: the requests, the offset
    of each request's tokens in the step, and its number of tokens computed before."""
    requests = list(batch.req_ids)
    counts = [scheduler_output.num_scheduled_tokens[request] for request in requests]
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(requests)].copy(),
    )
