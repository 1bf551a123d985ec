"""Send a turn's tokens from the engine process in batches of `rollout.stream_interval` tokens.

vLLM itself sends each token at its engine step, with three numpy arrays of log-probabilities. The
engine process encodes them, and the rank decodes them and waits for `stream_interval` tokens. With
256 requests on the host of an H200, the decoding took 7 ms a step. The encoding took 1.7 ms, during
which the engine's own thread made no progress. With this patch, the engine process keeps the tokens
until a batch is due. The reader of a turn receives the same chunks as without it.

`install` patches vLLM in the process that calls it, and in processes forked from there.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists


class _Request:
    """The outputs of a request that were not sent yet."""

    __slots__ = ("client", "outputs", "tokens")

    def __init__(self, client: int) -> None:
        self.client = client  # vLLM's number of the process that receives them
        self.outputs: list[EngineCoreOutput] = []
        self.tokens = 0

    def take(self) -> EngineCoreOutput:
        """Remove all outputs, and return them joined."""
        outputs, self.outputs, self.tokens = self.outputs, [], 0
        return joined(outputs)


class Kept:
    """The outputs of an engine process that are not sent yet."""

    def __init__(self, interval: int) -> None:
        self.interval = interval  # tokens
        # A request is kept here from its first output until its end.
        self._requests: dict[str, _Request] = {}

    def step(self, batches: dict[int, EngineCoreOutputs]) -> None:
        """Take the outputs of an engine step, and leave in `batches` only those that are due."""
        if self.interval > 1 or self._requests:
            for client, batch in batches.items():
                batch.outputs = [due for new in batch.outputs if (due := self._due(client, new))]

    def _due(self, client: int, new: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return what is to be sent at a request's `new` output; None if its tokens are kept."""
        request = self._requests.get(new.request_id)
        if request is None:  # first output of the request, never kept
            if new.finish_reason is None:
                self._requests[new.request_id] = _Request(client)
            return new
        request.outputs.append(new)
        request.tokens += len(new.new_token_ids)
        if new.finish_reason is not None:
            del self._requests[new.request_id]
        elif request.tokens < self.interval and new.new_sampling_mask is None:
            return None
        return request.take()

    def forget(self, requests: list[str]) -> None:
        """Drop requests that have ended."""
        for name in requests:
            self._requests.pop(name, None)

    def flush(self, requests: list[str] | None = None) -> dict[int, EngineCoreOutputs]:
        """Remove and return the kept outputs of `requests`, or of all requests, by client."""
        found: dict[int, EngineCoreOutputs] = {}
        for name in self._requests if requests is None else requests:
            if (request := self._requests.get(name)) and request.outputs:
                batch = found.setdefault(request.client, EngineCoreOutputs(outputs=[]))
                batch.outputs.append(request.take())
        return found


def joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Join consecutive outputs of a request into the last one. Of the earlier ones it takes tokens,
    log-probabilities and routed experts: outputs of ROSE's requests have no more."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token for one in outputs for token in one.new_token_ids]
    logprobs = [one.new_logprobs for one in outputs if one.new_logprobs is not None]
    if logprobs:
        last.new_logprobs = LogprobsLists(
            *(np.concatenate(arrays) for arrays in list(zip(*logprobs, strict=True))[:3])
        )
    experts = [one.routed_experts for one in outputs if one.routed_experts is not None]
    if experts:
        last.routed_experts = np.concatenate(experts)
    return last


def install() -> None:
    """Patch vLLM in this process; a second call changes nothing."""
    if hasattr(LogprobsProcessor._update_sample_logprobs, "__wrapped__"):
        return
    _keep_outputs()
    LogprobsProcessor._update_sample_logprobs = _faster(LogprobsProcessor._update_sample_logprobs)


def kept_by(core: Any) -> Kept:
    """Return the outputs that the engine `core` keeps."""
    if not hasattr(core, "rose_kept"):
        config = core.vllm_config
        ours = str(config.parallel_config.worker_extension_cls).startswith("rose.")
        # Log-probabilities of other servers' requests may differ in width: these can't be joined.
        core.rose_kept = Kept(config.scheduler_config.stream_interval if ours else 1)
    return core.rose_kept


def _keep_outputs() -> None:
    """Patch vLLM's engine process, so that it keeps outputs until they are due."""
    attach, label = EngineCore._attach_weight_version, EngineCore.set_weight_version
    abort, finish = EngineCore.abort_requests, EngineCoreProc._send_finish_outputs_to_client

    def send(core: Any, requests: list[str] | None = None) -> None:
        found = kept_by(core).flush(requests)
        attach(core, found)
        for batch in found.items():
            core.output_queue.put_nowait(batch)

    # vLLM calls this with the outputs of each step, before it sends them.
    def _attach_weight_version(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        attach(self, outputs)
        kept_by(self).step(outputs)

    # All tokens of a message have one version, so kept tokens are sent before the next version.
    def set_weight_version(self, weight_version: str) -> None:
        send(self)
        label(self, weight_version)

    # vLLM calls this when the engine process itself ends requests.
    def _send_finish_outputs_to_client(
        self, req_ids: list[str], client_index: int, finish_reason: FinishReason
    ) -> None:
        send(self, list(req_ids))
        kept_by(self).forget(list(req_ids))
        finish(self, req_ids, client_index, finish_reason)

    # A client that aborts requests has dropped their state already, so nothing is sent.
    def abort_requests(self, request_ids: list[str]) -> None:
        abort(self, request_ids)
        kept_by(self).forget(request_ids)

    EngineCore._attach_weight_version = _attach_weight_version
    EngineCore.set_weight_version = set_weight_version
    EngineCore.abort_requests = abort_requests
    EngineCoreProc._send_finish_outputs_to_client = _send_finish_outputs_to_client


def _faster(original):
    """Return a faster `LogprobsProcessor._update_sample_logprobs`, which handles all positions at
    once. It calls `original` unless a request asks only for its sampled tokens'
    log-probabilities."""

    @functools.wraps(original)
    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        flat = self.logprobs
        if self.num_logprobs or self.tokenizer is not None or not isinstance(flat, FlatLogprobs):
            original(self, logprobs_lists)
            return
        tokens, values, ranks, _ = logprobs_lists
        first, count = len(flat.logprobs), len(tokens)
        flat.start_indices += range(first, first + count)
        flat.end_indices += range(first + 1, first + count + 1)
        flat.token_ids += tokens[:, 0].tolist()
        flat.logprobs += values[:, 0].tolist()
        flat.ranks += ranks.tolist()
        flat.decoded_tokens += [None] * count
        self.cumulative_logprob += float(values[:, 0].sum())

    return _update_sample_logprobs
