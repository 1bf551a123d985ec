"""One run through everything that interrupts one: real MPI, vLLM and DeepSpeed, on one device in
turn for a part of it. What it learns is bit for bit what an uninterrupted run learns."""

import json
import math
import signal
from pathlib import Path

import pytest

from rose.observe.metrics import read_metrics, rows_of
from rose.trainer import checkpoint
from tests.job.job import Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 5
EXACT = ("deterministic=true", f"trainer.steps={STEPS}")
SHARED = ("colocate=true", "trainer.checkpoint_every=100")
TIMELESS = (
    "reward_mean",
    "success",
    "response_tokens_mean",
    "turns_mean",
    "loss",
    "grad_norm",
    "entropy",
    "mismatch_kl",
)
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


def in_phase(job: Job, phase: str, after: int) -> bool:
    """Whether that phase of a step later than `after` has begun."""
    return job.phase()[0] == phase and job.phase()[1] > after


def stop(job: Job, after: int) -> None:
    """Ctrl-C in the rollout of a step later than `after` + 1: it ends cleanly, and what is finished
    is saved although no checkpoint was due."""
    job.until(lambda: in_phase(job, "rollout", after + 1), "the next step's rollout")
    job.signal(signal.SIGINT)
    assert job.wait() == 130 and "did not stop" not in job.said, job.said + job.logs()
    assert saved(job) == job.steps()[-1]["step"] > after
    assert job.orphans() == []


def test_it_learns_the_same_through_stops_a_power_failure_one_device_for_all_and_a_dead_engine(
    tmp_path,
):
    whole = Job(tmp_path / "whole", *EXACT)
    assert whole.wait() == 0, whole.said + whole.logs()

    stopped = Job(tmp_path, *EXACT, "trainer.checkpoint_every=100")
    stop(stopped, after=0)
    done = saved(stopped)

    powerless = Job(tmp_path, *EXACT, "trainer.checkpoint_every=2")
    powerless.until(
        lambda: saved(powerless) > done and powerless.phase()[1] > saved(powerless),
        "another step's checkpoint",
    )
    powerless.kill_everything()
    before = saved(powerless)
    assert before < STEPS - 2, "killed before it was done"

    shared = Job(tmp_path, *EXACT, *SHARED)
    stop(shared, before)
    done = saved(shared)

    last = Job(tmp_path, *EXACT, *SHARED)
    last.until(lambda: in_phase(last, "train", done), "the next step's training")
    last.engine().kill()  # in its sleep, or as it falls asleep
    assert last.wait() == 0, last.said + last.logs()
    assert last.steps()[-1]["engine_restarts"] == 1 and last.orphans() == []
    for attempt in (3, 4):
        assert_in_turn(last.run / "events" / str(attempt), 1)
    for row in last.steps()[before:]:
        assert row["rollout_sleep_gib"] > 0 or row["step"] == done + 1, (
            "an engine that is dead has nothing to give"
        )
    assert_same(whole, last)


def assert_same(whole: Job, broken: Job) -> None:
    """Metrics of every step, trajectories and evaluations."""
    for expected, got in zip(whole.steps(), broken.steps(), strict=True):
        assert {k: got[k] for k in TIMELESS} == {k: expected[k] for k in TIMELESS}
        assert got["version"] == got["step"]
    assert trained_on(broken.run, STEPS) == trained_on(whole.run, STEPS)
    assert trained_on(broken.run, STEPS) == [f"g{g}.{m}" for g in range(20) for m in range(4)]
    assert [row["eval_successes"] for row in rows_of(read_metrics(broken.run), "eval")] == [
        row["eval_successes"] for row in rows_of(read_metrics(whole.run), "eval")
    ]
