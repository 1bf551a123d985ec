"""What a live run's killer does, simulated at the same times."""

import dataclasses

import pytest

from rose.parts.simulator import faults
from rose.parts.simulator.driver import simulate
from rose.scheduler import events as ev
from tests.parts.simulator.clusters import Memory, borrowed, cluster, pool, scheduler


def test_an_engine_beside_an_online_server_dies_and_comes_back_at_the_times_given():
    available = faults.up([(3.0, 3.5), (15.0, 15.5)])
    lent = dataclasses.replace(borrowed(count=1), available=available)
    memory = Memory()
    result = simulate(cluster(pool(count=1), lent, groups=6), scheduler(), 1, memory)
    assert [e.at for e in memory.events(ev.WorkerLost)] == [3.0, 15.0]
    joined = [e.at for e in memory.events(ev.WorkerJoined) if e.kind == "cooperative"]
    assert joined == [0.0, 7.5, 19.5]  # its pool takes 4 s to start
    assert [step.trajectories for step in result.steps] == [24, 24]
    assert result.serving and sum(w.decoded for w in result.workers if w.pool == "borrowed")


def test_killed_hosts_lose_nothing_and_double_nothing():
    remade = []
    for recovery in ("none", "classified", "replay"):
        boxes = faults.hosts(2, [(4.0, 0), (9.0, 1)], recovery, 0.1, 1.0, 3.0)
        memory = Memory()
        result = simulate(cluster(groups=6, sandboxes=boxes), scheduler(), 1, memory)
        lost = [(e.at, e.host) for e in memory.events(ev.HostLost)]
        assert lost == [(4.0, "host-0"), (9.0, "host-1")]
        assert [step.trajectories for step in result.steps] == [24, 24]
        assert result.counts.recovered > 0
        remade.append(result.counts.remade_tokens)
    assert remade[0] > remade[1] > remade[2] == 0


def test_hosts_that_nobody_kills_cost_what_a_start_does():
    bare = simulate(cluster(), scheduler(), 1)
    boxes = faults.hosts(2, [], "none", 0.25, 1.0, 3.0)
    boxed = simulate(cluster(sandboxes=boxes), scheduler(), 1)
    assert boxed.steps[0].rollout_s == pytest.approx(bare.steps[0].rollout_s + 0.25, abs=0.05)
    assert boxed.tokens == bare.tokens


@pytest.mark.parametrize("down", [[(0.0, 1.0)], [(2.0, 1.0)], [(1.0, 3.0), (2.0, 4.0)]])
def test_spans_that_are_none_are_refused(down):
    with pytest.raises(ValueError, match="ascending and apart"):
        faults.up(down)


def test_a_host_that_is_none_is_refused():
    with pytest.raises(ValueError, match="host 2, killed at 5 s: there are 2"):
        faults.hosts(2, [(5.0, 2)], "none", 0.1, 1.0, 3.0)
