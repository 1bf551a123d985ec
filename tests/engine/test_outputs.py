"""Tests of rose/engine/outputs.py: which outputs an engine process keeps, and what it sends. That
nothing is lost or altered is shown by tests of real engines, which keep 8 tokens each."""

import queue
from types import SimpleNamespace

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCoreProc
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


def test_last_output_brings_what_was_kept_and_one_of_one_keeps_nothing():
    kept = outputs.Kept(8)
    sent(kept, output("a", 1))
    sent(kept, output("a", 2))
    [one] = sent(kept, EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT))
    assert one.new_token_ids == [2] and one.finished
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
