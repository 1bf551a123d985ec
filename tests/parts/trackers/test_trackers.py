"""Weights & Biases and MLflow through their real packages: the same numbers as metrics.jsonl, one
run over a resume, and no tracker that ends a run or holds it up."""

import importlib.machinery
import importlib.util
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose.observe.metrics import MetricsWriter, read_metrics
from rose.parts.trackers import trackers
from tests.refusals import refused

DEADLINE_S = 120
PATIENT = f"cluster.stop_timeout_s={3 * DEADLINE_S}"  # the packages take long to begin, here


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def watched(config, run: Path, steps: range, wins: float = 0.5) -> None:
    """An attempt of a run that makes these steps, and ends."""
    writer = MetricsWriter(run, False, trackers.start(config, run))
    writer.truncate(after_step=steps[0] - 1)
    speeds = {"tokens_per_s": 9, "tokens_per_s/rollout-0": 9.0}
    for step in steps:
        writer.write(step, {"loss": step / 4, "success": wins} | speeds)
    writer.write(steps[-1], {"kind": "eval", "eval_success": 0.25, "eval_n": 8})
    writer.write(steps[-1], {"kind": "worker", "what": "joined", "detail": "somebody"})
    writer.close()


def faults(run: Path) -> list[str]:
    return [row["detail"] for row in read_metrics(run) if row["kind"] == "fault"]


def test_mlflow_has_the_numbers_and_a_resumed_run_goes_on_in_the_same_one(make_config, run):
    from mlflow.tracking import MlflowClient

    uri = (run.parent / "runs").as_uri()
    config = make_config(f"observe.mlflow.uri={uri}", "observe.mlflow.experiment=lakes", PATIENT)
    watched(config, run, range(1, 4))
    watched(config, run, range(3, 6), wins=0.75)  # the third step was lost, and is made again
    assert faults(run) == []
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("lakes").experiment_id])
    assert found.info.run_name == config.name and found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "train/success")
    values = [(m.step, m.value) for m in sorted(history, key=lambda m: (m.step, m.timestamp))]
    assert values == [(1, 0.5), (2, 0.5), (3, 0.5), (3, 0.75), (4, 0.75), (5, 0.75)]
    assert found.data.metrics["eval/success"] == 0.25 and found.data.metrics["eval/n"] == 8
    assert found.data.metrics["train/tokens_per_s.rollout-0"] == 9.0
    assert found.data.params["trainer.batch_size"] == str(config.trainer.batch_size)


def records(data: bytes) -> Iterator[bytes]:
    """Of an offline run's file: after 7 bytes of header LevelDB's log format, in blocks of 32 KiB,
    of pieces with crc32, length and type (1: whole, 2 to 4: its first, middle and last)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def offline_rows(folder: Path) -> list[dict]:
    """What W&B would send of an offline run: each logged row by name."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    (path,) = folder.glob("*.wandb")
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.parametrize("mode, passed", [("null", None), ("offline", "offline")])
def test_wandbs_own_variable_holds(make_config, tmp_path, monkeypatch, mode, passed):
    """wandb.init(mode=None) takes WANDB_MODE."""
    given = ("observe.wandb.project=lakes", f"observe.wandb.mode={mode}")
    asked, run = {}, SimpleNamespace(define_metric=lambda *_, **__: None)
    fake = SimpleNamespace(teardown=lambda: None, Settings=lambda **_: None)
    fake.init = lambda **options: asked.update(options) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trackers.WandbTracker(make_config(*given), tmp_path)
    assert asked["mode"] == passed


@pytest.mark.slow
def test_wandb_has_the_numbers_offline_and_a_resumed_run_keeps_its_id(make_config, run):
    config = make_config("observe.wandb.project=lakes", "observe.wandb.mode=offline", PATIENT)
    watched(config, run, range(1, 3))
    watched(config, run, range(2, 4))
    assert faults(run) == []
    name = json.loads((run / trackers.FILE).read_text())["wandb"]
    folders = sorted((run / "wandb").glob(f"offline-run-*-{name}*"))  # -1: of the same second
    assert len(folders) == 2 and len(list((run / "wandb").glob("offline-run-*"))) == 2
    rows = [row for folder in folders for row in offline_rows(folder)]
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert sorted(losses) == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert [row["eval/success"] for row in rows if "eval/success" in row] == [0.25, 0.25]


def test_a_server_that_is_not_there_is_told_and_costs_nothing(make_config, run, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        uri = f"observe.mlflow.uri=http://127.0.0.1:{closed.getsockname()[1]}"
        config = make_config(uri, PATIENT)
        watched(config, run, range(1, 3))
    assert [row["step"] for row in read_metrics(run) if row["kind"] == "step"] == [1, 2]
    (told,) = faults(run)
    assert told.startswith("mlflow: it did not start: ") and "127.0.0.1" in told


def test_trackers_that_begin_at_once_both_keep_their_ids(run):
    both = threading.Barrier(2, timeout=DEADLINE_S)

    def begin(name: str) -> None:
        def new() -> str:
            both.wait()  # neither has written its id
            return f"{name}-1"

        trackers.run_id(run, name, new)

    threads = [threading.Thread(target=begin, args=(name,)) for name in trackers.KINDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    ids = {name: f"{name}-1" for name in trackers.KINDS}
    assert json.loads((run / trackers.FILE).read_text()) == ids
    assert trackers.run_id(run, "mlflow", lambda: "another") == "mlflow-1"


def test_one_that_hangs_or_fails_later_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(trackers, "WAITING_ROWS", 2)
    go, began = threading.Event(), threading.Event()

    class Slow:
        def write(self, step, time_s, values):
            began.set()
            go.wait(DEADLINE_S)
            raise SystemExit(f"no room for step {step}")

        def close(self):
            pass

    slow = trackers.Background("slow", Slow, DEADLINE_S)
    slow.write(1, 0.0, {"a": 1.0})
    assert began.wait(DEADLINE_S)
    for step in range(2, 9):
        slow.write(step, 0.0, {"a": 1.0})  # would wait for ever, if it waited
    assert "2 are waiting" in slow.faults.get(timeout=DEADLINE_S)
    go.set()
    late = trackers.Background("late", Slow, DEADLINE_S)
    late.write(3, 0.0, {"a": 1.0})
    assert "from step 3 on: SystemExit: no room for step 3" in late.faults.get(timeout=DEADLINE_S)
    late.write(4, 0.0, {"a": 1.0})
    late.close()  # after a row that failed it still takes rows, and ends in order
    assert not late._thread.is_alive() and late.faults.empty(), "said once"


def test_what_is_not_installed_is_refused_by_its_key(make_config, monkeypatch, tmp_path):
    given = {"observe.wandb.project": "'x'", "observe.mlflow.uri": "'http://x:1'"}
    settings = [make_config(f"{key}={value}").observe for key, value in given.items()]
    for each in (make_config().observe, *settings):
        trackers.check(each)
    (tmp_path / "wandb").mkdir()  # as W&B leaves one where it runs
    found = importlib.machinery.PathFinder.find_spec("wandb", [str(tmp_path)])
    assert found is not None
    there = lambda name: found if name == "wandb" else None  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    for (key, value), each in zip(given.items(), settings, strict=True):
        with refused([f"{key}={value}", "not installed", f"rose-rl[{key.split('.')[1]}]"]):
            trackers.check(each)
