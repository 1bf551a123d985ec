"""Engines of several tensor-parallel degrees in the simulator: at once, and by turns."""

import dataclasses

import pytest

from rose.parts.simulator import spec
from rose.scheduler import events as ev
from tests.parts.simulator.clusters import ENGINE, cluster, pool, run

ARGS = {
    **{"n_serving": 0, "recent_s": 10.0, "hysteresis": 0.1, "activation_s": 5.0, "idle_s": 30.0},
    **{"hybrid_wait_s": 10.0, "gain": 0.05, "switch_s": 0.1},
}


def engines(degree, first_gpu=0):
    """On four GPUs: wide ones are faster alone, and slower with many."""
    step = spec.StepTime(0.012 / degree, 2e-5, 1e-9, 1e-5 * degree**3, 1e-7)
    engine = dataclasses.replace(ENGINE, step=step, max_sequences=4 * degree)
    return pool(f"tp{degree}", tensor_parallel=degree, count=4 // degree, engine=engine,
                first_gpu=first_gpu, switch_s=0.1)  # fmt: skip


def test_turns_are_made_once_whichever_of_the_engines_that_share_gpus_are_awake():
    _, fixed = run(cluster(engines(1), groups=6))
    result, memory = run(cluster(engines(1), engines(4), groups=6), "least_loaded", "elastic", ARGS)
    assert [step.trajectories for step in result.steps] == [24, 24]

    def made(journal):
        return sorted((e.trajectory, e.tokens) for e in journal.events(ev.TrajectoryEnded))

    assert made(memory) == made(fixed)  # no token is lost or made twice
    busy = {worker.name: worker.busy_s for worker in result.workers}
    assert busy["tp4-0"] > 0 and busy["tp1-0"] > 0
    held = {worker.name: worker.held_s for worker in result.workers}
    for narrow in range(4):  # of the same GPUs never two are awake
        assert held["tp4-0"] + held[f"tp1-{narrow}"] <= result.seconds + 1e-6


D = "sim.pool.dedicated"


def test_a_mix_of_degrees_has_its_own_gpus_and_as_many_sequences_for_each(spec_of):
    made = spec_of(f"sim.pools=[dedicated] {D}.tensor_parallel=[4,1,1,2] {D}.workers=2").pools
    assert [(p.name, p.count, p.first_gpu, p.engine.max_sequences) for p in made] == [
        ("dedicated-tp4", 2, 0, 64),
        ("dedicated-tp1", 4, 8, 16),
        ("dedicated-tp2", 2, 12, 32),
    ]
    # policies tell them apart
    assert [p.gpu.name for p in made] == ["H800x4", "H800x1", "H800x2"]
    assert spec_of("sim.pools=[dedicated]").pools[0].first_gpu is None


@pytest.mark.parametrize("given, wanted", [("null", 16), (24, 24)])
def test_one_degree_for_all_leaves_an_engine_a_live_ones_sequences(spec_of, given, wanted):
    sizes = f"{D}.tensor_parallel=4 {D}.max_sequences={given}"
    [only] = spec_of(f"sim.pools=[dedicated] {sizes}").pools
    assert only.engine.max_sequences == wanted
