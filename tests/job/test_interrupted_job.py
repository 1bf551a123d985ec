"""One run through everything that interrupts one: real MPI, vLLM and DeepSpeed, on one device in
turn for a part of it. What it learns is bit for bit what an uninterrupted run learns."""

import json
import math
import signal
from pathlib import Path

import pytest

from rose.observe.metrics import read_metrics, rows_of
from rose.trainer import checkpoint
from tests.job.hosts import HOSTS, everything, kill_host, kill_hosts
from tests.job.job import Held, Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 4
EXACT = ("deterministic=true", f"trainer.steps={STEPS}", "eval.episodes=4")
SHARED = ("colocate=true", "trainer.checkpoint_every=100", "cluster.stop_timeout_s=180")
TIMELESS = ("reward_mean", "success", "response_tokens_mean", "turns_mean", "loss", "grad_norm")
TIMELESS += ("entropy", "mismatch_kl")
TRAINS, ROLLS = ("train_step", "publish", "save", "load"), ("turn", "load_version")


def spans(folder: Path, role: str) -> list[dict]:
    """Of an attempt's one rank of this role, by time."""
    lines = [json.loads(line) for path in folder.glob(f"{role}-*.jsonl") for line in path.open()]
    return sorted(
        (line for line in lines if line["kind"] == "span"), key=lambda span: span["start"]
    )


def absences(found: list[dict], leaves: str, comes: str) -> list[tuple[float, float]]:
    """From the end of each span `leaves` to the beginning of the next `comes`."""
    gone = [span["end"] for span in found if span["name"] == leaves]
    back = [span["start"] for span in found if span["name"] == comes]
    return [(end, min((start for start in back if start >= end), default=math.inf)) for end in gone]


def assert_in_turn(folder: Path, steps: int) -> None:
    """The trainer worked only while the engine had given its memory back, and the engine only while
    the trainer had."""
    trainer, engine = spans(folder, "trainer"), spans(folder, "rollout")
    # which starts it
    first = next(span["start"] for span in engine if span["name"] == "engine_wake")
    asleep = [(-math.inf, first), *absences(engine, "engine_sleep", "engine_wake")]
    away = absences(trainer, "offload", "reload")
    for found, names, free in ((trainer, TRAINS, asleep), (engine, ROLLS, away)):
        worked = [span for span in found if span["name"] in names]
        assert len(worked) > steps
        for span in worked:
            assert [low for low, high in free if low <= span["start"] and span["end"] <= high], (
                span,
                free,
            )


def saved(job: Job) -> int:
    """The step of the last whole checkpoint; 0 before the first."""
    latest = checkpoint.latest(job.run)
    return checkpoint.step_of(latest) if latest else 0


def assert_same(whole: Job, broken: Job) -> None:
    """Metrics of every step, trajectories and evaluations."""
    for expected, got in zip(whole.steps(), broken.steps(), strict=True):
        assert {k: got[k] for k in TIMELESS} == {k: expected[k] for k in TIMELESS}
        assert got["version"] == got["step"]
    assert everything(broken) == everything(whole)
    names = [f"g{g}.{m}" for g in range(4 * len(whole.steps())) for m in range(4)]
    assert trained_on(broken.run, len(whole.steps())) == names
    found = [row["eval_successes"] for row in rows_of(read_metrics(broken.run), "eval")]
    assert found == [row["eval_successes"] for row in rows_of(read_metrics(whole.run), "eval")]


def test_it_learns_the_same_through_a_stop_dead_hosts_a_power_failure_and_a_dead_engine(tmp_path):
    held = Held(tmp_path, STEPS)
    held.release(*range(1, STEPS + 1))
    run = (*EXACT, *HOSTS, *held.overrides)
    whole = Job(tmp_path / "whole", *run)
    assert whole.wait() == 0, whole.said + whole.logs()
    held.hold(*range(2, STEPS + 1))

    # Ctrl-C, on a device that trainer and engine share: what is finished is saved although no
    # checkpoint was due
    stopped = Job(tmp_path, *run, *SHARED)
    held.until(stopped, 2)
    stopped.signal(signal.SIGINT)
    assert stopped.wait() == 130 and "did not stop" not in stopped.said, (
        stopped.said + stopped.logs()
    )
    assert saved(stopped) == stopped.steps()[-1]["step"] == 1 and stopped.orphans() == []

    # with a device each: hosts die in a rollout, then the power fails when a step is not saved yet
    powerless = Job(tmp_path, *run, "trainer.checkpoint_every=2")
    kill_hosts(powerless, 1)
    held.until(powerless, 2)
    for which, number in enumerate((signal.SIGSEGV, signal.SIGKILL)):  # so the waiting ones' too
        kill_host(powerless, which, number)
    held.release(2, 3)
    held.until(powerless, 4)
    powerless.until(lambda: powerless.steps()[-1]["step"] == 3, "the third step's row")
    powerless.until(lambda: saved(powerless) == 2, "the second step's checkpoint")
    powerless.kill_everything()
    assert powerless.orphans() == []

    held.hold(3)
    last = Job(tmp_path, *run, *SHARED)
    held.until(last, 3)
    with last.trainer_stopped():
        held.release(3, 4)
        last.until(lambda: last.phase() == ("train", 3), "the step's training")
        last.engine().kill()  # in its sleep, or as it falls asleep
    assert last.wait() == 0, last.said + last.logs()
    assert last.orphans() == []
    assert_same(whole, last)

    faults = [fault["what"] for fault in last.faults()]
    assert faults == ["environment host died"] * 3 + ["engine died"], last.faults()
    assert "killed by SIGKILL" in last.faults()[0]["detail"]
    rows = last.steps()
    assert sum(row["trajectories_restarted"] for row in rows) >= 4 and rows[-1]["engine_restarts"]
    assert sum(row["resumed_turns"] for row in rows) > 0 and rows[-1]["failed_trajectories"] == 0
    for attempt in (1, 3):
        assert_in_turn(last.run / "events" / str(attempt), 1)
    for row in (rows[0], rows[3]):  # not step 3's: an engine that is dead has nothing to give
        assert row["rollout_sleep_gib"] > 0
