"""Trainer and engine on the same device in turn: the whole job with real MPI, vLLM and DeepSpeed,
on a CPU."""

import json
import math
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from job import Job  # noqa: E402
from test_main_job import TIMELESS  # noqa: E402

from rose.observe.metrics import read_metrics, rows_of  # noqa: E402
from rose.trainer import checkpoint  # noqa: E402

pytestmark = pytest.mark.slow

EXACT = ("deterministic=true", "trainer.steps=3")
SHARED = (*EXACT, "colocate=true", "trainer.checkpoint_every=100")
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


def test_in_turn_it_learns_the_same_bit_for_bit_through_a_killed_engine_a_stop_and_a_resume(
    tmp_path,
):
    alone = Job(tmp_path / "alone", *EXACT)
    assert alone.wait() == 0, alone.said + alone.logs()
    shared = Job(tmp_path / "shared", *SHARED)
    shared.until(lambda: shared.phase() == ("rollout", 2), "the second step's rollout")
    shared.signal(signal.SIGINT)
    assert shared.wait(120) == 130, shared.said + shared.logs()
    assert checkpoint.step_of(checkpoint.latest(shared.run)) == 1, (
        "the trainer took its turn to save what was finished"
    )
    again = Job(tmp_path / "shared", *SHARED)
    again.until(lambda: again.phase() == ("train", 2), "the second step's training")
    again.engine().kill()  # in its sleep, or as it falls asleep
    assert again.wait() == 0, again.said + again.logs()
    for attempt, steps in (("1", 1), ("2", 2)):
        assert_in_turn(again.run / "events" / attempt, steps)
    assert again.steps()[-1]["engine_restarts"] == 1 and again.orphans() == []
    for expected, got in zip(alone.steps(), again.steps(), strict=True):
        assert {k: got[k] for k in TIMELESS} == {k: expected[k] for k in TIMELESS}
        assert got["version"] == got["step"]
        assert got["rollout_sleep_gib"] > 0 or got["step"] == 2, (
            "an engine that is dead has nothing to give"
        )
    assert [row["eval_successes"] for row in rows_of(read_metrics(again.run), "eval")] == [
        row["eval_successes"] for row in rows_of(read_metrics(alone.run), "eval")
    ]
