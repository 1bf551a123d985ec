"""A run with an engine on the trainer's device, with real MPI, vLLM and DeepSpeed: it makes tokens
while the trainer waits, dies asleep and with turns, and no trajectory is lost or trained twice."""

import json
import re
from collections import Counter

import psutil
import pytest

from rose.coordinator import journal, replay
from rose.coordinator.control import first_name
from rose.scheduler import events as ev
from tests.job.job import Gated, Job, resume, suspend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

# Of the first step's maps two have a hole beside the start, of the second's none: of 16 episodes eight
# at least go on after their first move, then all.
STEPS, GROUPS, SIZE = 2, 4, 4
RUN = (f"trainer.steps={STEPS}", "rollout.hybrid=1", "scheduler/provisioning=all_idle")
RUN += ("scheduler.provisioning.args.hybrid_wait_s=0",)
# The turns of a step don't all fit into one engine.
RUN += ("rollout.max_sequences=4",)
TAKEN = 5  # turns of an engine of four sequences, with those that scheduler.queue_depth allows


class Scene:
    """A job whose episodes all wait at their first move until `opens`."""

    def __init__(self, folder) -> None:
        self.gates = Gated(folder, STEPS, GROUPS, SIZE)
        self.job = Job(folder, *RUN, *self.gates.overrides)

    def engine(self, index: int) -> psutil.Process:
        """The engine process of a rollout rank that is up."""
        found = self.job.run.glob("status/attempt-*/rank-*.json")
        ranks = [json.loads(path.read_text()) for path in found]
        pid = next(r["pid"] for r in ranks if (r["role"], r["index"]) == ("rollout", index))
        return self.job.engine(pid)

    def until_all_wait(self, step: int) -> None:
        self.gates.until(self.job, "waits", step)

    def opens(self, step: int) -> None:
        """Every episode goes on; returns when all do."""
        self.gates.opens(step)
        self.gates.until(self.job, "goes", step)

    def deaths(self) -> list[str]:
        return [f["detail"] for f in self.job.faults() if f["what"] == "engine died"]


def test_a_hybrid_engine_works_while_the_trainer_waits_and_may_die_at_any_time(tmp_path):
    scene = Scene(tmp_path)
    job = scene.job
    scene.until_all_wait(1)
    dedicated, trainer = scene.engine(0), psutil.Process(job.rank("trainer")["pid"])
    dedicated.suspend()
    scene.opens(1)
    job.until(
        lambda: job.live().get("finished", 0) >= GROUPS * SIZE - TAKEN,
        "the hybrid engine to end what the dedicated one has no room for",
    )
    suspend(trainer)
    dedicated.resume()
    job.until(
        lambda: "trainer ranks to finish step 1" in job.live().get("waiting_for", ""),
        "the trainer's turn",
    )
    asleep = scene.engine(1)
    asleep.kill()
    job.until(lambda: len(scene.deaths()) == 1, "word of the engine that died asleep")
    resume(trainer)

    def again() -> bool:
        """The next engine is up, with the newest weights."""
        return job.live().get("workers", {}).get("rollout-1", {}).get("version") == 1

    scene.until_all_wait(2)
    job.until(again, "the engine to start again in its next turn")
    second = scene.engine(1)
    assert second.pid != asleep.pid
    job.until_idle("rollout-1")
    dedicated.suspend(), second.suspend()
    scene.opens(2)
    job.until(lambda: job.turns_at("rollout-1"), "turns that the dedicated engine has no room for")
    second.kill()
    dedicated.resume()
    assert job.wait() == 0, job.said + job.logs()

    held = [int(re.search(r"; (\d+) turns go elsewhere", death)[1]) for death in scene.deaths()]
    assert held[0] == 0 < held[1] and len(held) == 2
    rows = job.steps()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["hybrid_token_share"] > 0 and 0 < rows[0]["hybrid_idle_used"] <= 1
    assert rows[1]["engine_restarts"] == 2
    assert all(row["staleness_max"] == 0 and row["mismatch_kl"] < 1e-3 for row in rows)
    for step in (1, 2):
        trained = Counter(first_name(t.id) for g in replay.load(job.run, step) for t in g)
        assert set(trained.values()) == {1} and len(trained) == GROUPS * SIZE
    [path] = (job.run / "journal").iterdir()
    actions = [a for entry in list(journal.read(path))[1:] for a in entry.actions]
    expected = [ev.UseWorker, ev.RestWorker, ev.UseWorker]
    assert [type(a) for a in actions if isinstance(a, ev.UseWorker | ev.RestWorker)][:3] == expected
