"""Tests of rose/engine/outputs.py: which outputs an engine process keeps, and what it sends."""

import queue
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from rose.engine import outputs
from rose.engine.outputs import kept_by
from rose.engine.start import EXTENSION

outputs.install()


def lists(tokens: list[int]) -> LogprobsLists:
    ids = np.array(tokens, dtype=np.int64)[:, None]
    return LogprobsLists(ids, -ids.astype(np.float32) / 10, np.arange(len(ids)) + 1)


def output(request: str, *tokens: int, **fields) -> EngineCoreOutput:
    return EngineCoreOutput(request, list(tokens), new_logprobs=lists(list(tokens)), **fields)


def sent(kept: outputs.Kept, *made: EngineCoreOutput) -> list[EngineCoreOutput]:
    """Return what is sent of one engine step's outputs."""
    batch = EngineCoreOutputs(outputs=list(made))
    kept.step({0: batch})
    return batch.outputs


def tokens_of(found: list[EngineCoreOutput]) -> list[tuple[str, list[int]]]:
    return [(one.request_id, one.new_token_ids) for one in found]


def test_first_output_is_sent_at_once_and_then_one_in_interval_tokens():
    kept = outputs.Kept(3)
    found = [tokens_of(sent(kept, output("a", t))) for t in range(8)]
    assert found == [[("a", [0])], [], [], [("a", [1, 2, 3])], [], [], [("a", [4, 5, 6])], []]


def test_joined_output_has_all_log_probabilities_and_experts():
    kept = outputs.Kept(4)
    sent(kept, output("a", 1))
    row = np.zeros((1, 2, 2), np.uint8)
    sent(kept, output("a", 2, 3, routed_experts=np.repeat(row, 2, 0)))
    [one] = sent(kept, output("a", 4, 5, routed_experts=np.repeat(row + 1, 2, 0)))
    assert one.new_token_ids == one.new_logprobs.logprob_token_ids[:, 0].tolist() == [2, 3, 4, 5]
    assert one.new_logprobs.logprobs[:, 0] == pytest.approx([-0.2, -0.3, -0.4, -0.5])
    assert one.new_logprobs.sampled_token_ranks.tolist() == [1, 2, 1, 2]
    assert one.routed_experts.reshape(4, -1).max(1).tolist() == [0, 0, 1, 1]


def test_last_output_of_a_request_brings_what_was_kept():
    kept = outputs.Kept(8)
    sent(kept, output("a", 1), output("b", 1))
    sent(kept, output("a", 2), output("b", 2))
    end = output("a", 3, finish_reason=FinishReason.STOP, stop_reason=3)
    (one,) = sent(kept, end, output("b", 3))
    assert one.new_token_ids == [2, 3] and one.stop_reason == 3 and one.finished
    (evicted,) = sent(kept, EngineCoreOutput("b", [], finish_reason=FinishReason.ABORT))
    assert evicted.new_token_ids == [2, 3]
    assert evicted.new_logprobs.logprob_token_ids[:, 0].tolist() == [2, 3]


def test_request_of_one_output_and_interval_of_one_keep_nothing():
    kept = outputs.Kept(8)
    (one,) = sent(kept, output("a", 1, finish_reason=FinishReason.LENGTH))
    assert one.finished and not kept.flush()
    kept = outputs.Kept(1)
    assert [len(sent(kept, output("a", t))) for t in range(3)] == [1, 1, 1]


def core(interval: int, extension: str = EXTENSION) -> SimpleNamespace:
    of_steps = SimpleNamespace(stream_interval=interval)
    parallel = SimpleNamespace(worker_extension_cls=extension)
    config = SimpleNamespace(scheduler_config=of_steps, parallel_config=parallel)
    made = SimpleNamespace(vllm_config=config, output_queue=queue.Queue(), _weight_version="old")
    made.scheduler = SimpleNamespace(finish_requests=lambda *_: None)
    return made


def test_another_server_in_this_environment_keeps_nothing():
    """Requests of another server may have unlike numbers of log-probabilities."""
    assert (kept_by(core(8)).interval, kept_by(core(8, "")).interval) == (8, 1)


def step(engine: SimpleNamespace, *made: EngineCoreOutput) -> list[EngineCoreOutput]:
    batch = EngineCoreOutputs(outputs=list(made))
    EngineCoreProc._attach_weight_version(engine, {0: batch})
    assert batch.weight_version == engine._weight_version
    return batch.outputs


def test_new_weights_are_named_after_the_old_ones_tokens_are_sent():
    engine = core(8)
    step(engine, output("a", 1))
    step(engine, output("a", 2))
    EngineCoreProc.set_weight_version(engine, "new")
    client, batch = engine.output_queue.get_nowait()
    assert (client, batch.weight_version) == (0, "old")
    assert tokens_of(batch.outputs) == [("a", [2])]
    assert step(engine, output("a", 3)) == []
    (last,) = step(engine, output("a", 4, finish_reason=FinishReason.LENGTH))
    assert last.new_token_ids == [3, 4] and engine.output_queue.empty()


def test_requests_that_the_engine_process_ends_get_their_tokens_first():
    engine = core(8)
    step(engine, output("a", 1), output("b", 1))
    step(engine, output("a", 2), output("b", 2))
    EngineCoreProc._send_finish_outputs_to_client(engine, ["a"], 0, FinishReason.ABORT)
    tokens, end = (engine.output_queue.get_nowait()[1] for _ in range(2))
    assert tokens_of(tokens.outputs) == [("a", [2])]
    assert tokens_of(end.outputs) == [("a", [])] and end.outputs[0].finished
    # The client of an aborted request has dropped its state already.
    EngineCoreProc.abort_requests(engine, ["b"])
    assert not outputs.kept_by(engine).flush() and engine.output_queue.empty()


def test_log_probabilities_read_at_once_are_those_read_one_by_one():
    sampling = SamplingParams(logprobs=0, flat_logprobs=True)
    request = EngineCoreRequest("a", [1], None, sampling, None, 0.0, None, None, None)
    at_once, one_by_one = (LogprobsProcessor.from_new_request(None, request) for _ in range(2))
    for tokens in ([7], [8, 9, 10]):
        at_once._update_sample_logprobs(lists(tokens))
        LogprobsProcessor._update_sample_logprobs.__wrapped__(one_by_one, lists(tokens))
    assert at_once.logprobs == one_by_one.logprobs
    assert at_once.cumulative_logprob == pytest.approx(one_by_one.cumulative_logprob)
