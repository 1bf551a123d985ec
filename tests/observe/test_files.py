"""Files that a run writes stay readable whatever happens to the writer."""

import json

import numpy as np
import pytest

from rose.observe.metrics import MetricsWriter, read_metrics, rows_of
from rose.observe.recorder import Recorder, read_events
from rose.observe.series import difference_interval, wilson_interval
from rose.observe.status import LiveStatus, read_status
from tests.processes import until


def test_intervals_equal_the_published_examples():
    # Newcombe 1998, table I
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(20, 20)[1] == 1.0 and wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="successes=3 of n=2"):
        wilson_interval(3, 2)
    low, high = difference_interval((48, 80), (56, 70))  # Newcombe 1998b, table II (a), method 10
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_recorded_events_come_back_with_their_rank(tmp_path):
    recorder = Recorder(tmp_path, 3, "rollout", "rollout-0", attempt=2)
    recorder.span("turn", 10.0, 11.5, turn="g1.0.t0", tokens=np.int32(7), name="free")
    with pytest.raises(KeyError), recorder.timed("load_version", version=4) as args:
        args["bytes"] = 12
        raise KeyError
    recorder.instant("engine_died", exit_code=-9)
    recorder.counter("kv_usage", np.float32(0.5))
    recorder.close()
    (rank,) = read_events(tmp_path)
    assert (rank.rank, rank.role, rank.name, rank.attempt) == (3, "rollout", "rollout-0", 2)
    turn, load, died, usage = rank.events
    assert turn["args"] == {"turn": "g1.0.t0", "tokens": 7, "name": "free"}
    assert turn["end"] - turn["start"] == 1.5
    assert load["args"] == {"version": 4, "bytes": 12} and load["end"] >= load["start"]
    assert died["args"] == {"exit_code": -9} and usage["value"] == 0.5


def test_a_torn_line_costs_only_itself(tmp_path):
    path = tmp_path / "events/1/trainer-0.jsonl"
    for names in (["first"], ["first", "second"]):
        recorder = Recorder(tmp_path, 0, "trainer", "trainer-0")
        recorder.instant(names[-1])
        until(lambda: b"instant" in path.read_bytes(), "the event, which needs no further call")
        recorder.close()
        path.write_bytes(path.read_bytes() + b'{"kind":"instant","na')
        assert [e["name"] for e in next(read_events(tmp_path)).events] == names


def test_metrics_survive_a_torn_line_and_bad_numbers(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"loss": np.float32(0.5), "grad_norm": float("nan"), "response_hist": [[8, 2]]})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"step","step":2,"lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(2, {"loss": 0.25})
    writer.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["loss"] == 0.5 and first["grad_norm"] is None
    assert first["response_hist"] == [[8, 2]]
    assert second["step"] == 2 and second["kind"] == "step"


def test_resume_forgets_later_steps_but_no_fault(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, {"kind": "eval", "eval_n": 8})
    for step in (1, 2, 3):
        writer.write(step, {"loss": step})
    writer.write(3, {"kind": "fault", "what": "engine restart"})
    writer.truncate(after_step=1)
    writer.write(2, {"loss": 20})
    writer.close()
    rows = read_metrics(tmp_path)
    expected = [("eval", 0), ("step", 1), ("fault", 3), ("step", 2)]
    assert [(row["kind"], row["step"]) for row in rows] == expected
    assert [row["loss"] for row in rows_of(rows, "step")] == [1, 20]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_reads_the_run_as_if_it_had_not_been_interrupted(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    nine = event_file_writer.AtomicCounter(9)  # the next file's name, with 10, sorts before its
    monkeypatch.setattr(event_file_writer, "_global_uid", nine)
    writer = MetricsWriter(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        writer.write(step, {"loss": float(step)})
    writer.close()
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.truncate(after_step=1)
    writer.write(2, {"loss": 20.0})
    writer.write(2, {"kind": "eval", "eval_success": 0.5, "eval_success/lake": 0.25})
    writer.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]
    assert [e.value for e in board.Scalars("eval/success")] == [0.5]
    assert [e.value for e in board.Scalars("eval/success/lake")] == [0.25]


def test_status_is_rate_limited_but_phases_show_at_once(tmp_path):
    assert read_status(tmp_path) is None
    live = LiveStatus(tmp_path, interval=3600)
    live.update(finished=5)
    assert read_status(tmp_path).finished == 0
    live.update(phase="rollout", step=1)
    assert (read_status(tmp_path).phase, read_status(tmp_path).finished) == ("rollout", 5)
    live.update(finished=7)
    live.close()
    assert read_status(tmp_path).finished == 7
    with pytest.raises(TypeError):
        live.update(fase="train")
