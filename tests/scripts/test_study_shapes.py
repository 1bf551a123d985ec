"""The rows of the study of engines of several degrees, and its table, from made outcomes."""

from types import SimpleNamespace

import pytest

from rose.parts.simulator.study import build, runs
from scripts.harness import simulated
from scripts.simulator import study_shapes
from scripts.simulator.study_shapes import ROWS, Shapes


@pytest.mark.parametrize("setting, gpus", [("rose_8b", 8), ("rose_32b", 32)])
def test_every_row_has_the_gpus_of_the_papers_dedicated_engines(setting, gpus):
    for row in ROWS[setting]:
        each = sum(row.degrees) if row.kind == "mix" else row.degrees[0]
        assert row.workers * each == gpus, row
        if row.kind == "switching":
            assert all(gpus % degree == 0 for degree in row.degrees), row


def test_gains_are_over_the_best_single_degree_which_the_trainer_has_beside_a_mix(monkeypatch):
    speed = {"single-4": 3.0, "mix-4+2+2": 2.4, "switching-4+8": 3.3}
    overrides = {}

    def simulated(setting, system, rows, best, given, processes):
        overrides.update((row.point, row.overrides(system, best)) for row in rows)
        return [
            SimpleNamespace(
                point=row.point, tokens_s=speed.get(row.point, 1.0), step_s=1, rollout_s=1
            )
            for row in rows
            for seed in (1, 2)
        ]

    monkeypatch.setattr(study_shapes, "simulated", simulated)
    found = {row["shapes"]: row["gain"] for row in study_shapes.study("rose_8b", "best", [], 1)}
    assert found["single 4"] == 1.0 and found["single 1"] == pytest.approx(1 / 3)
    assert found["mix 4+2+2"] == pytest.approx(0.8) and found["switching 4+8"] == pytest.approx(1.1)
    assert "sim.pool.hybrid.tensor_parallel=4" in overrides["mix-4+1+1+1+1"]
    assert "sim.pool.hybrid.tensor_parallel=2" in overrides["single-2"]


@pytest.mark.parametrize("system", study_shapes.SYSTEMS)
def test_a_row_that_switches_makes_a_scheduler_of_each_system(system):
    row = next(row for row in ROWS["rose_8b"] if row.kind == "switching")
    own = [f"sim/systems=[{system}]", "sim.seeds=[1]", *row.overrides(system, 8)]
    jobs = runs.jobs_of(study_shapes.composed("rose_8b", own))
    (job,) = [job for job in jobs if job.name == system]
    build.make_scheduler(job.config, job.system)


@pytest.mark.parametrize(
    "row, wanted",
    [
        (study_shapes.single(4, 8), {"dedicated": 64, "hybrid": 64}),
        (Shapes("mix", (4, 2, 2), 1), {"dedicated-tp4": 64, "dedicated-tp2": 32, "hybrid": 128}),
    ],
)
def test_every_gpu_has_as_many_sequences_whatever_the_degree(row, wanted):
    c = simulated(
        "+experiment=rose_8b", "sim/systems=[best]", *row.overrides("best", 8),
        "sim.pools=[dedicated,hybrid]",
    )  # fmt: skip
    pools = build.make_spec(c, "rose", build.ours(c), 1).pools
    assert {pool.name: pool.engine.max_sequences for pool in pools} == wanted
