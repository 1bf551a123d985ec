"""Sandboxes on hosts in simulated time, also when hosts die."""

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
from tests.parts.simulator.clusters import Agents, cluster, run, scheduler

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
        three = (100,) * 3, (10,) * 3, (4.0,) * 3, (False,) * 3
        return [spec.Episode(200, *three, 1.0, reset_s=2.0)] * size


def rebalance(**changes):
    """Arguments of `run`: a scheduler that moves trajectories off crowded hosts."""
    args = {"crowded": 1.2, "margin": 1.25, "move_s": 1.0, "patience_s": 3.0, "at_once": 4}
    return {"placement": ("rebalance", args | changes)}


def one(**changes):
    """Simulate one trajectory of one step."""
    boxes = dataclasses.replace(BOXES, **changes.pop("boxes", {}))
    sizes = {"steps": 1, "groups": 1, "size": 1} | changes
    return cluster(env=Script(), sandboxes=boxes, **sizes)


def alone(**changes):
    """One trajectory, one step; (rollout's seconds, result, journal)."""
    result, memory = run(one(boxes=changes))
    return result.steps[0].rollout_s, result, memory


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


def test_a_turn_on_its_way_to_an_engine_when_the_host_died_is_not_taken_for_its_next_attempt():
    boxes = {"recovery": "replay", "detect_s": 0.0, "restart_s": 0.0}
    boxes["failures"] = (3.0, 0), (3.0, 1)
    [step] = run(one(boxes=boxes, dispatch_s=5.0))[0].steps
    # 2.25 s of start twice, and three times the way to the engine, a turn and its command
    assert step.rollout_s == pytest.approx(3.0 + 2.25 + 3 * (5 + TURN_S + 4), abs=0.2)


class Trajectories:
    """A hub without a scheduler, which notes what was saved: trajectories g0.0 and so on, each of
    which changes something by its first turn only, whose captures are of 1 MB."""

    def __init__(self, count, **changes):
        self.loop, self.events = Loop(), []
        kinds = {"recovery": "classified", "changes": (NOTHING, PROCESS), "cores": (64.0,)}
        what = dataclasses.replace(BOXES, **kinds | changes)
        self.boxes = Sandboxes(what, self.loop, 1, self, Counts())
        self.all = [self._open(f"g0.{i}") for i in range(count)]

    def _open(self, name):
        [episode] = Script().group(0, 1, 0, None)
        trajectory = Trajectory(name, Group("g0", 0, None), 0, episode, 0.0)
        self.boxes.open(trajectory)
        self.boxes._boxes[name].changes = [1, 0, 0]
        return trajectory

    def turn(self, at, trajectory):
        self.run(at)
        trajectory.next_turn()
        self.boxes.command(trajectory, 4.0, True)

    def run(self, until):
        self.loop.over = False
        self.loop.at(until, lambda *_: setattr(self.loop, "over", True), None)
        self.loop.run(math.inf)

    def feed(self, event):
        self.events.append((event.trajectory, event.turns))

    def ready(self, trajectory): ...

    def observed(self, trajectory, more): ...


SLOW = {"host_bytes_s": 1e6 / 8}  # 1 MB takes 8 s to the store.


def test_a_turn_that_changed_nothing_is_saved_with_those_before_it():
    """The second turn is over before the first is stored."""
    hub = Trajectories(1, **SLOW)
    hub.turn(3.0, hub.all[0])
    hub.turn(8.0, hub.all[0])  # command until 7, capture until 7.5
    hub.run(15.5)
    assert hub.events == []
    hub.run(15.502)
    assert hub.events == [("g0.0", 2)]
    hub.turn(30.0, hub.all[0])
    hub.run(40.0)
    assert hub.events == [("g0.0", 2), ("g0.0", 3)]  # the third at once


def test_a_capture_without_room_is_due_at_the_next_turn():
    """The host has room for one capture: from 7 to 7.5 s of the first; the second's is due at 7.25."""
    hub = Trajectories(2, staging_bytes=1.5e6, **SLOW)
    for at, trajectory in zip((3.0, 3.25), hub.all, strict=True):
        hub.turn(at, trajectory)
    hub.run(20.0)
    assert hub.events == [("g0.0", 1)] and hub.boxes._counts.skipped_saves == 1
    hub.turn(20.0, hub.all[1])  # changes nothing itself
    hub.run(40.0)
    assert hub.events == [("g0.0", 1), ("g0.1", 2)] and hub.boxes._counts.saved_bytes == 2e6


def test_a_capture_that_is_cancelled_leaves_its_room_to_others():
    hub = Trajectories(2, staging_bytes=1.5e6)
    for at, trajectory in zip((3.0, 3.25), hub.all, strict=True):
        hub.turn(at, trajectory)
    hub.run(7.2)  # the first captures since 7.0
    hub.boxes.close(hub.all[0])
    hub.run(20.0)
    assert hub.events == [("g0.1", 1)]


def test_a_sandbox_waits_for_memory():
    _, memory = run(one(boxes={"cores": (64.0,), "memory_bytes": 2 * MIB}, size=6))
    assert max(e.running for e in memory.events(ev.HostLoad)) == 2


@pytest.mark.parametrize("recovery", ["none", "replay", "full", "classified"])
def test_whatever_dies_each_trajectory_is_counted_once_and_it_replays(recovery, tmp_path):
    kinds = tuple(dataclasses.replace(kind, share=0.5) for kind in (NOTHING, PROCESS))
    hosts = {"cores": (2.0, 3.0, 1.0), "memory_bytes": 6 * MIB, "host_bytes_s": 2e6}
    faults = {"mtbf_s": 40.0, "restart_s": 7.0, "load_s": 1.0}
    boxes = dataclasses.replace(BOXES, changes=kinds, recovery=recovery, **hosts, **faults)
    what = cluster(steps=2, groups=4, env=Agents(crash=1), sandboxes=boxes)
    args = rebalance(crowded=1.0, margin=1.0, move_s=0.1, patience_s=2.0)
    path = tmp_path / "journal.jsonl"
    fresh = scheduler(**args)
    written = journal.Journal(path, fresh.snapshot())
    result = simulate(what, fresh, 5, written)
    written.close()
    assert [step.trajectories for step in result.steps] == [16, 16]
    counts = result.counts
    assert counts.lost_hosts > 3 and counts.recovered > 10
    assert (counts.moved > 0) == (recovery in ("full", "classified"))
    assert (counts.remade_tokens > 0) == (recovery != "replay")
    assert journal.replay(path, scheduler(**args)) == counts.decisions
    events = [entry.event for entry in list(journal.read(path))[1:]]
    ended = [each.trajectory for each in events if isinstance(each, ev.TrajectoryEnded)]
    assert len(ended) == len(set(ended))
    again = simulate(what, scheduler(**args), 5)
    assert again.steps == result.steps and again.counts == counts


def test_rival_recoveries_meet_the_same_failures():
    lost = []
    for recovery in ("none", "replay", "full"):
        boxes = dataclasses.replace(BOXES, recovery=recovery, mtbf_s=15.0, restart_s=5.0)
        _, memory = run(cluster(groups=4, sandboxes=boxes))
        lost.append([(e.host, e.at) for e in memory.events(ev.HostLost)])
    shortest = min(map(len, lost))
    assert shortest > 2 and all(found[:shortest] == lost[0][:shortest] for found in lost)


def test_trajectories_leave_a_crowded_host_and_the_step_is_shorter():
    boxes = {"cores": (64.0, 0.5), "recovery": "full", "load_s": 1.0}
    what = one(boxes=boxes, groups=4, size=8)
    stay, moving = (run(what, **args)[0] for args in ({}, rebalance()))
    assert stay.counts.moved == 0 and moving.counts.moved > 4
    assert moving.steps[0].rollout_s < 0.8 * stay.steps[0].rollout_s
    assert moving.counts.remade_tokens == 0 and moving.steps[0].tokens == stay.steps[0].tokens
