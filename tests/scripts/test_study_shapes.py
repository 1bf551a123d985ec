"""The rows of the study of engines of several degrees, and its table, from made outcomes."""

from types import SimpleNamespace

import pytest

from rose.parts.simulator.study import build, runs
from scripts.simulator import study_shapes
from scripts.simulator.study_shapes import ROWS


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
