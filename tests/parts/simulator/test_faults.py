"""What a live run's killer does, simulated at the same times."""

import dataclasses

import pytest

from rose.parts.simulator import faults
from rose.scheduler import events as ev
from tests.parts.simulator.clusters import borrowed, cluster, pool, run


def test_an_engine_beside_an_online_server_dies_and_comes_back_at_the_times_given():
    available = faults.up([(3.0, 3.5), (15.0, 15.5)])
    lent = dataclasses.replace(borrowed(count=1), available=available)
    result, memory = run(cluster(pool(count=1), lent, groups=6))
    assert [e.at for e in memory.events(ev.WorkerLost)] == [3.0, 15.0]
    joined = [e.at for e in memory.events(ev.WorkerJoined) if e.kind == "cooperative"]
    assert joined == [0.0, 7.5, 19.5]  # its pool takes 4 s to start
    assert [step.trajectories for step in result.steps] == [24, 24]
    assert result.serving and sum(w.decoded for w in result.workers if w.pool == "borrowed")


def test_killed_hosts_lose_nothing_and_double_nothing():
    remade = []
    for recovery in ("none", "classified", "replay"):
        boxes = faults.hosts(2, [(4.0, 0), (9.0, 1)], recovery, 0.1, 1.0, 3.0)
        result, memory = run(cluster(groups=6, sandboxes=boxes))
        lost = [(e.at, e.host) for e in memory.events(ev.HostLost)]
        assert lost == [(4.0, "host-0"), (9.0, "host-1")]
        assert [step.trajectories for step in result.steps] == [24, 24]
        assert result.counts.recovered > 0
        remade.append(result.counts.remade_tokens)
    assert remade[0] > remade[1] > remade[2] == 0


def test_hosts_that_nobody_kills_cost_what_a_start_does():
    boxes = faults.hosts(2, [], "none", 0.25, 1.0, 3.0)
    bare, boxed = (run(cluster(sandboxes=each))[0] for each in (None, boxes))
    assert boxed.steps[0].rollout_s == pytest.approx(bare.steps[0].rollout_s + 0.25, abs=0.05)
    assert boxed.tokens == bare.tokens
