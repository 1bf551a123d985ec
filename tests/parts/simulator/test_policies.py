"""Every policy of conf/scheduler runs a small cluster, and decides the same on replay."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml

from rose.config import Policy
from rose.config import Scheduler as SchedulerConfig
from rose.parts.simulator import spec
from rose.parts.simulator.driver import simulate
from rose.policies import build
from rose.scheduler import events as ev
from tests.parts.simulator import clusters
from tests.parts.simulator.clusters import Agents, Memory, cluster, counted_once, pool

CONF = Path(__file__).resolve().parents[3] / "conf" / "scheduler"
PLAIN = {"provisioning": "fixed", "routing": "least_loaded", "order": "fifo"}
PLAIN |= {"batching": "synchronous"}
OPTIONS = [(kind, path.stem) for kind in PLAIN for path in sorted((CONF / kind).glob("*.yaml"))]


def policy(kind, name):
    """The option's YAML; what it takes from other groups is about borrowed workers, of which there
    are a few here."""
    found = yaml.safe_load((CONF / kind / f"{name}.yaml").read_text())
    args = found["args"] or {}
    args |= {key: 4 for key, value in args.items() if str(value).startswith("${")}
    return Policy(name=found["name"], args=args)


def scheduler(kind, name):
    chosen = {k: policy(k, v) for k, v in (PLAIN | {kind: name}).items()}
    return build(SchedulerConfig(**chosen, queue_depth=0.0), 600.0)


def all_kinds():
    waves = np.abs(np.sin(np.arange(50.0)))
    load = clusters.made_load(2 * np.arange(50.0), 0.8 * waves, 0.9 * np.roll(waves, 1), 20, 100.0)
    available = spec.Available(np.array([0.0, 7.0, 20.0, 60.0]), np.array([2, 0, 1, 3], np.int32))
    return (
        pool(),
        pool("coop", "cooperative", 4, serving=clusters.serving(load), switch_s=1.0),
        pool("spot", "spot", 3, available=available),
        pool("hybrid", "hybrid", 2, switch_s=1.0),
        pool("serverless", "serverless", 6, on_request=True, allocation=spec.Allocation(0.5, 2.0)),
    )


@pytest.mark.parametrize("kind, name", OPTIONS)
def test_a_policy_counts_every_trajectory_once_on_workers_of_all_kinds_and_replays(kind, name):
    memory = Memory()
    env = Agents(crash=1, equal=[1])
    what = cluster(*all_kinds(), steps=4, groups=6, env=env, horizon_s=3000.0)
    result = simulate(what, scheduler(kind, name), 1, memory)
    assert [step.trajectories for step in result.steps] == [24] * 4
    counted_once(memory, len(memory.events(ev.TrajectoryEnded)))
    fresh = scheduler(kind, name)
    assert all(fresh.handle(event) == actions for event, actions in memory.entries)


def test_with_too_little_memory_for_all_contexts_thunder_computes_fewer_of_them_again():
    small = pool(count=2, engine=dataclasses.replace(clusters.ENGINE, kv_tokens=8000))
    computed = {}
    for routing in ("cache_affine", "thunder"):
        found = simulate(cluster(small, steps=2, groups=6), scheduler("routing", routing), 1)
        assert [step.trajectories for step in found.steps] == [24] * 2
        computed[routing] = sum(worker.prefilled for worker in found.workers)
    assert computed["thunder"] < computed["cache_affine"]


def test_rollouts_go_on_while_the_trainer_trains_where_the_policy_is_asynchronous():
    what, took = cluster(pool(count=1), steps=8), []
    for name in ("synchronous", "one_step_off", "bounded_staleness"):
        took.append(simulate(what, scheduler("batching", name), 1).seconds)
    assert took[2] <= took[1] < took[0]
