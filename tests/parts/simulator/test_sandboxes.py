"""Sandboxes on hosts in simulated time: by hand where a figure can be known, and what must hold
whatever dies when."""

import dataclasses
import math

import pytest

from rose.coordinator import journal
from rose.parts.simulator import spec
from rose.parts.simulator.driver import simulate
from rose.parts.simulator.episodes import Group, Trajectory
from rose.parts.simulator.hosts import Cores, Task
from rose.parts.simulator.loop import Loop
from rose.parts.simulator.result import Counts
from rose.parts.simulator.sandboxes import Sandboxes
from rose.scheduler import events as ev
from tests.parts.simulator.clusters import Agents, Memory, cluster
from tests.scheduler.said import built

MIB = 2**20
NOTHING = spec.Change(1.0, None)
PROCESS = spec.Change(1.0, spec.Save(0.5, 1e6))
BOXES = spec.Sandboxes(
    **{"cores": (64.0, 64.0), "memory_bytes": 64 * MIB, "sandbox_bytes": MIB, "start_s": 0.25},
    **{"turn_s": 0.0, "look_s": 0.0, "changes": (NOTHING,), "full": spec.Save(0.5, 1e6)},
    **{"restore_s": 0.5, "restore_bytes": 0.0, "staging_bytes": 100e6, "host_bytes_s": 1e9},
    **{"store_bytes_s": 1e9, "recovery": "none", "mtbf_s": math.inf, "restart_s": 1000.0},
    **{"detect_s": 1.0, "load_s": 5.0},
)


class Script:
    """One trajectory a group: three turns of 100 tokens, commands of 4 s, a reset of 2 s."""

    max_new_tokens = 100

    def group(self, index, size, version, draw):
        return [
            spec.Episode(200, (100,) * 3, (10,) * 3, (4.0,) * 3, (False,) * 3, 1.0, reset_s=2.0)
            for _ in range(size)
        ]


def scheduler(placement="stay", **args):
    return built(600.0, batching_args={"max_admitted": 2.0}, placement=(placement, args))


def alone(**changes):
    """One trajectory, one step; (rollout's seconds, result, journal)."""
    boxes = dataclasses.replace(BOXES, **changes)
    result, memory = ran(cluster(env=Script(), steps=1, groups=1, size=1, sandboxes=boxes))
    return result.steps[0].rollout_s, result, memory


def ran(what):
    memory = Memory()
    return simulate(what, scheduler(), 1, memory), memory


def dead(at, **changes):
    """Both hosts die at this second; the first is there again after 10 s."""
    return alone(failures=((at, 0), (at, 1)), restart_s=10.0, **changes)


TURN_S = 1.0  # 100 tokens of 10 ms each and prefill: between 1.0 and 1.1 s


def test_jobs_share_cores_and_one_alone_has_no_more_than_one():
    loop, ends = Loop(), {}
    cores = Cores(2.0, loop)
    tasks = {name: Task() for name in "abcd"}

    def ran(name):
        return lambda _: ends.__setitem__(name, loop.now)

    for name, seconds in {"a": 1.0, "b": 2.0, "c": 2.0, "d": 9.0}.items():
        cores.run(seconds, tasks[name], ran(name))
    loop.at(3.0, lambda *_: cores.cancel(tasks["d"]), None)
    loop.at(20.0, lambda *_: setattr(loop, "over", True), None)
    loop.run(math.inf)
    # four at half speed until 2 s; three at two thirds until 3 s; then two at full speed
    assert ends == {"a": pytest.approx(2.0), "b": pytest.approx(3 + 1 / 3), "c": ends["b"]}
    assert cores.used() == pytest.approx(4 * 2 + 3 * 1 + 2 / 3) and cores.running == 0


def test_what_a_capture_takes_longer_than_the_model_thinks_is_waited_for():
    plain, _, _ = alone()
    quick, result, memory = alone(recovery="full")
    assert quick == pytest.approx(plain) and result.counts.save_s == 0
    assert result.counts.saved_bytes == 2e6  # of each turn but the last
    assert [e.turns for e in memory.events(ev.TrajectorySaved)] == [1, 2]
    slow, result, _ = alone(recovery="full", full=spec.Save(3.0, 1e6))
    assert slow == pytest.approx(plain + 2 * (3 - TURN_S), abs=0.1)
    assert result.counts.save_s == pytest.approx(slow - plain)
    looked, result, memory = alone(recovery="classified", look_s=2.0)
    assert looked == pytest.approx(plain + 2 * (2 - TURN_S), abs=0.1)
    assert result.counts.saved_bytes == 0
    assert result.counts.save_s == pytest.approx(looked - plain)
    assert [e.turns for e in memory.events(ev.TrajectorySaved)] == [1, 2]


@pytest.mark.parametrize(
    "recovery, remade, turns, again_s",
    [
        ("none", 300, None, 2.25 + 3 * (TURN_S + 4)),
        ("replay", 0, 3, 2.25 + 3 * 4),
        ("full", 100, 4, 0.25 + 0.5 + TURN_S + 4),
    ],
)
def test_a_lost_trajectory_begins_again_where_its_recovery_says(recovery, remade, turns, again_s):
    """Death in the third turn's command: 2.25 s of start, then 5 s a turn."""
    at = 2.25 + 2 * (TURN_S + 4) + TURN_S + 2
    seconds, result, _ = dead(at, recovery=recovery)
    assert (result.counts.remade_tokens, result.counts.lost_hosts) == (remade, 2)
    assert turns in (None, result.counts.turns)
    assert seconds == pytest.approx(at + 10 + again_s, abs=0.3)


def test_tokens_of_a_turn_under_way_stay_where_the_turns_before_are_kept():
    at = 2.25 + 2 * (TURN_S + 4) + 0.6
    for recovery, least, most in (("none", 230, 260), ("replay", 0, 0), ("classified", 0, 0)):
        _, result, memory = dead(at, recovery=recovery)
        assert least <= result.counts.remade_tokens <= most
        made = [e.made_tokens for e in memory.events(ev.TurnRequested) if e.made_tokens]
        assert bool(made) == (recovery != "none") and all(30 < tokens < 60 for tokens in made)
        assert sum(step.tokens for step in result.steps) == 300


@pytest.mark.parametrize("slow", ["host_bytes_s", "store_bytes_s"])
def test_what_had_not_reached_the_store_is_lost_with_its_host(slow):
    at = 2.25 + 2 * (TURN_S + 4) + 0.7  # the second turn was captured just now
    _, fast, _ = dead(at, recovery="full")
    _, late, _ = dead(at, recovery="full", **{slow: 1e6 / 3})
    assert (fast.counts.remade_tokens, late.counts.remade_tokens > 100) == (0, True)
    assert late.counts.turns == 4


def test_tokens_of_the_first_turn_are_lost_where_nothing_is_kept():
    at = 2.25 + 0.6
    assert 30 < dead(at)[1].counts.remade_tokens < 70
    assert dead(at, recovery="replay")[1].counts.remade_tokens == 0


def test_a_turn_on_its_way_to_an_engine_when_the_host_died_is_not_taken_for_its_next_attempt():
    boxes = dataclasses.replace(BOXES, recovery="replay", detect_s=0.0, restart_s=0.0)
    boxes = dataclasses.replace(boxes, failures=((3.0, 0), (3.0, 1)))
    what = cluster(env=Script(), steps=1, groups=1, size=1, sandboxes=boxes, dispatch_s=5.0)
    [step] = simulate(what, scheduler(), 1).steps
    # 2.25 s of start twice, and three times the way to the engine, a turn and its command
    assert step.rollout_s == pytest.approx(3.0 + 2.25 + 3 * (5 + TURN_S + 4), abs=0.2)


class Trajectories:
    """A hub without a scheduler: notes what it is told."""

    def __init__(self, **changes):
        self.loop, self.told, self.events = Loop(), [], []
        what = dataclasses.replace(BOXES, recovery="classified", **changes)
        self.boxes = Sandboxes(what, self.loop, 1, self, Counts())

    def open(self, name, kinds):
        [episode] = Script().group(0, 1, 0, None)
        group = Group("g0", 0, None)
        trajectory = Trajectory(name, group, 0, episode, 0.0)
        self.boxes.open(trajectory)
        self.boxes._boxes[name].changes = kinds
        return trajectory

    def turn(self, trajectory):
        trajectory.next_turn()
        self.boxes.command(trajectory, 4.0, True)

    def run(self, until):
        self.loop.over = False
        self.loop.at(until, lambda *_: setattr(self.loop, "over", True), None)
        self.loop.run(math.inf)

    def feed(self, event):
        self.events.append(event)

    def ready(self, trajectory):
        self.told.append((self.loop.now, trajectory.key, "ready"))

    def observed(self, trajectory, more):
        self.told.append((self.loop.now, trajectory.key, "observed"))


def test_a_turn_that_changed_nothing_is_saved_with_those_before_it():
    """1 MB takes 8 s to the store; the second turn is over before that, and changed nothing."""
    hub = Trajectories(changes=(NOTHING, PROCESS), host_bytes_s=1e6 / 8)
    one = hub.open("g0.0", [1, 0, 0])
    hub.run(3.0)
    hub.turn(one)
    hub.run(8.0)  # its command until 7, its capture until 7.5
    hub.turn(one)
    hub.run(30.0)
    assert [(e.turns, e.at) for e in hub.events] == [(2, pytest.approx(15.501))]
    hub.turn(one)
    hub.run(40.0)
    assert [e.turns for e in hub.events] == [2, 3]  # the third at once


def test_a_capture_without_room_is_due_at_the_next_turn():
    """1 MB takes 8 s to the store, and there is room for one."""
    hub = Trajectories(
        changes=(NOTHING, PROCESS), cores=(64.0,), staging_bytes=1.5e6, host_bytes_s=1e6 / 8
    )
    first, second = hub.open("g0.0", [1, 0, 0]), hub.open("g0.1", [1, 0, 0])
    hub.run(3.0)
    hub.turn(first)
    hub.run(3.25)
    hub.turn(second)
    hub.run(20.0)  # the first captured from 7 to 7.5; the second would have from 7.25
    assert [e.trajectory for e in hub.events] == ["g0.0"]
    assert hub.boxes._counts.skipped_saves == 1
    hub.turn(second)  # changes nothing itself
    hub.run(40.0)
    assert [(e.trajectory, e.turns) for e in hub.events] == [("g0.0", 1), ("g0.1", 2)]
    assert hub.boxes._counts.saved_bytes == 2e6


def test_a_capture_that_is_cancelled_leaves_its_room_to_others():
    hub = Trajectories(changes=(PROCESS,), cores=(64.0,), staging_bytes=1.5e6)
    first, second = hub.open("g0.0", [0] * 3), hub.open("g0.1", [0] * 3)
    hub.run(3.0)
    hub.turn(first)
    hub.run(3.25)
    hub.turn(second)
    hub.run(7.2)  # the first captures since 7.0
    hub.boxes.close(first)
    hub.run(20.0)
    assert [e.trajectory for e in hub.events] == ["g0.1"]


def test_a_sandbox_waits_for_memory():
    boxes = dataclasses.replace(BOXES, cores=(64.0,), memory_bytes=2 * MIB)
    _, memory = ran(cluster(env=Script(), steps=1, groups=1, size=6, sandboxes=boxes))
    assert max(e.running for e in memory.events(ev.HostLoad)) == 2


@pytest.mark.parametrize("recovery", ["none", "replay", "full", "classified"])
def test_whatever_dies_each_trajectory_is_counted_once_and_it_replays(recovery, tmp_path):
    kinds = tuple(dataclasses.replace(kind, share=0.5) for kind in (NOTHING, PROCESS))
    hosts = {"cores": (2.0, 3.0, 1.0), "memory_bytes": 6 * MIB, "host_bytes_s": 2e6}
    faults = {"mtbf_s": 40.0, "restart_s": 7.0, "load_s": 1.0}
    boxes = dataclasses.replace(BOXES, changes=kinds, recovery=recovery, **hosts, **faults)
    what = cluster(steps=2, groups=4, env=Agents(crash=1), sandboxes=boxes)
    args = {"crowded": 1.0, "margin": 1.0, "move_s": 0.1, "patience_s": 2.0, "at_once": 4}
    path = tmp_path / "journal.jsonl"
    fresh = scheduler("rebalance", **args)
    written = journal.Journal(path, fresh.snapshot())
    result = simulate(what, fresh, 5, written)
    written.close()
    assert [step.trajectories for step in result.steps] == [16, 16]
    counts = result.counts
    assert counts.lost_hosts > 3 and counts.recovered > 10
    assert (counts.moved > 0) == (recovery in ("full", "classified"))
    assert (counts.remade_tokens > 0) == (recovery != "replay")
    assert journal.replay(path, scheduler("rebalance", **args)) == counts.decisions
    events = [entry.event for entry in list(journal.read(path))[1:]]
    ended = [each.trajectory for each in events if isinstance(each, ev.TrajectoryEnded)]
    assert len(ended) == len(set(ended))
    again = simulate(what, scheduler("rebalance", **args), 5)
    assert again.steps == result.steps and again.counts == counts


def test_rival_recoveries_meet_the_same_failures():
    lost = []
    for recovery in ("none", "replay", "full"):
        boxes = dataclasses.replace(BOXES, recovery=recovery, mtbf_s=15.0, restart_s=5.0)
        _, memory = ran(cluster(groups=4, sandboxes=boxes))
        lost.append([(e.host, e.at) for e in memory.events(ev.HostLost)])
    shortest = min(map(len, lost))
    assert shortest > 2 and all(found[:shortest] == lost[0][:shortest] for found in lost)


def test_trajectories_leave_a_crowded_host_and_the_step_is_shorter():
    boxes = dataclasses.replace(BOXES, cores=(64.0, 0.5), recovery="full", load_s=1.0)
    what = cluster(steps=1, groups=4, env=Script(), size=8, sandboxes=boxes)
    args = {"crowded": 1.2, "margin": 1.25, "move_s": 1.0, "patience_s": 3.0, "at_once": 4}
    stay = simulate(what, scheduler(), 1)
    moving = simulate(what, scheduler("rebalance", **args), 1)
    assert stay.counts.moved == 0 and moving.counts.moved > 4
    assert moving.steps[0].rollout_s < 0.8 * stay.steps[0].rollout_s
    assert moving.counts.remade_tokens == 0 and moving.steps[0].tokens == stay.steps[0].tokens
