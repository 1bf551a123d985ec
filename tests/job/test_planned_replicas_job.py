"""An asynchronous run one of whose engines trains as the planner says, with real MPI, vLLM and
DeepSpeed: the engine's turns go on elsewhere, its replica computes a part of each batch, is killed
at work and comes back, the engine is killed asleep; what is trained is what a run without replicas
makes of the same trajectories."""

import json
from collections import Counter

import psutil
import pytest

from rose import config as cfg
from rose.coordinator import journal, replay
from rose.coordinator.control import first_name
from rose.observe.metrics import read_metrics
from rose.policies import build
from rose.scheduler import events as ev
from tests.job.job import Gated, Job, replica, resume, suspend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS, GROUPS, SIZE, ETA = 3, 2, 4, 1
ALL = GROUPS * SIZE  # episodes of a step, of one turn each
SIZES = (
    f"trainer.steps={STEPS}",
    f"trainer.batch_size={ALL}",
    f"rollout.group_size={SIZE}",
    "trainer.step_timeout_s=3000",  # so that nobody is given up for want of time
    "algorithm=decoupled_ppo",
)


class Scene:
    """A job whose episodes all wait after their only turn, and those of step 3 before it, too; two
    batches of them are out at any time."""

    def __init__(self, folder) -> None:
        self.gates = Gated(folder, STEPS + 1 + ETA, GROUPS, SIZE)
        self.job = Job(
            folder,
            *SIZES,
            *self.gates.overrides,
            "+env.args.starts=[3]",
            "+env.args.counts=true",  # so that an only move has a reward of its own
            "env.max_turns=1",
            "rollout.workers=2",
            "scheduler/batching=bounded_staleness",
            f"scheduler.batching.args.eta={ETA}",
            "scheduler.batching.args.running=2",
            "scheduler/routing=round_robin",
            "scheduler/provisioning=libra",
            "scheduler.provisioning.args.replicas=1",
            "scheduler.provisioning.args.period_steps=2",
            "scheduler.provisioning.args.gain=1000",  # it plans, and leaves things as they are
            "trainer.elastic_replicas=1",
        )

    def rank(self, index: int) -> psutil.Process:
        """That of a rollout rank."""
        found = map(json.loads, (p.read_text() for p in self.job.run.glob("status/*/rank-*.json")))
        return psutil.Process(
            next(r["pid"] for r in found if (r["role"], r["index"]) == ("rollout", index))
        )

    def until(self, what: str, step: int, count: int = ALL) -> None:
        self.gates.until(self.job, what, step, count)

    def until_waited_for(self, what: str) -> None:
        self.job.until(lambda: what in self.job.live().get("waiting_for", ""), what)


def test_an_engine_hands_its_turns_on_and_trains_while_the_other_rolls_out(tmp_path):
    scene = Scene(tmp_path)
    job = scene.job
    scene.until("waits", 1)
    first = replica(scene.job, 1)
    scene.gates.opens(1)
    scene.until("waits", 2)
    scene.until("begins", 3)
    job.until(lambda: job.phase() == ("rollout", 2), "all engines to roll out by version 1")

    # half of step 3's turns are with the engine that is to train, and won't end there
    rank = scene.rank(0)
    suspend(rank)
    scene.gates.opens(3, "start")
    scene.until("waits", 3, ALL // 2)
    held_at = job.live()["time"]
    job.until(lambda: job.live()["time"] > held_at + 2, "the scheduler to see an engine at work")
    trainer = psutil.Process(job.rank("trainer")["pid"])
    suspend(trainer)
    scene.gates.opens(2)
    scene.until("waits", 3)
    assert job.phase() == ("train", 2), "the other engine had the turns while step 2 was trained"

    first.suspend()
    resume(rank)
    resume(trainer)
    scene.until_waited_for("replicas to compute their part of step 2: rollout-0")
    first.kill()
    job.until(job.faults, "word of the replica that died")
    second = replica(scene.job, 2)
    assert second.pid != first.pid

    job.until(lambda: job.phase() == ("rollout", 3), "step 2 to be over")

    # the engine dies while its replica is at work, which goes on
    suspend(trainer), second.suspend()
    scene.gates.opens(3)
    scene.until_waited_for("trainer ranks to compute their part of step 3")
    job.engine(rank.pid).kill()
    job.until(lambda: len(job.faults()) == 2, "word of the engine that died")
    second.resume(), resume(trainer)
    assert job.wait() == 0, job.said + job.logs()

    died, engine = job.faults()
    assert died["what"] == "replica died"
    assert died["detail"] == "rollout-0: killed by SIGKILL; another is started"
    assert engine["what"] == "engine died" and "; 0 turns go elsewhere" in engine["detail"]
    rows = job.steps()
    assert [
        (r["step"], r["replicas_planned"], r["replicas"], r["replicas_lost"]) for r in rows
    ] == [(1, 1, 1, 0), (2, 1, 1, 1), (3, 1, 1, 0)]
    assert [row["replica_token_share"] > 0 for row in rows] == [True, False, True]
    assert rows[1]["migrations"] == ALL // 2
    assert all(row["group_staleness_max"] <= ETA for row in rows) and rows[2]["staleness_max"] == 1
    names = [
        first_name(t.id) for k in range(1, STEPS + 1) for g in replay.load(job.run, k) for t in g
    ]
    assert set(Counter(names).values()) == {1} and len(names) == STEPS * ALL
    _plans(job, rows)
    _alone(tmp_path, job, rows)
    assert job.orphans() == []


def _plans(job, rows) -> None:
    """One was made, is said with its forecast, and comes again in a replay."""
    [path] = (job.run / "journal").iterdir()
    entries = list(journal.read(path))[1:]
    plans = [a for e in entries for a in e.actions if isinstance(a, ev.PlanReplicas)]
    [plan] = plans
    assert (plan.step, plan.before, plan.replicas) == (3, 1, 1)
    assert plan.step_s == plan.forecast_s and plan.rollout_s > 0
    # of step 1, as step 2's lost its replica: less than both steps took, however slow it was
    assert 0 < plan.training_s < 2 * plan.step_s
    assert rows[2]["seconds_step_planned"] == plan.forecast_s
    [row] = [r for r in read_metrics(job.run) if r.get("what") == "replicas planned"]
    assert row["detail"].startswith("from step 3 on 1 train, still: ")
    config = cfg.load(job.run / "config.json")
    assert journal.replay(path, build(config.scheduler, config.rollout.turn_timeout_s)) > 100


def _alone(folder, job, rows) -> None:
    """The same trajectories without replicas, from the same weights for the first step."""
    alone = Job(folder / "alone", *SIZES, f"rollout.replay={job.run}")
    assert alone.wait() == 0, alone.said + alone.logs()
    for shared, without in zip(rows, alone.steps(), strict=True):
        # Adam divides by a gradient's own size, so after an update another order of the sum is seen
        rel, least = (1e-5, 1e-6) if shared["step"] == 1 else (1e-2, 1e-4)
        assert shared["tokens"] == without["tokens"] and shared["grad_norm"] > 1e-3
        for name in ("loss", "grad_norm", "entropy", "mismatch_abs"):
            assert shared[name] == pytest.approx(without[name], rel=rel, abs=least), name
