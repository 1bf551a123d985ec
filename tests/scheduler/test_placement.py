"""rebalance: which trajectories move to less loaded environment hosts, without flapping."""

import pytest

from rose.scheduler import events as ev
from tests.scheduler.said import asked, built
from tests.scheduler.test_refusals import REBALANCE


class World:
    """Hosts with constant loads, and trajectories with snapshots on one of them."""

    def __init__(self, **args):
        self.s, self.at = built(600.0, placement=("rebalance", REBALANCE | args)), 0.0
        self.cpu = {}

    def host(self, name, cpu, cores=10.0, running=10, memory=0.5):
        self.cpu[name] = dict(cpu=cpu, cores=cores, running=running, memory=memory)

    def saved(self, trajectory, host="a", commands_s=100.0, late=False):
        if trajectory not in self.s.cluster.group_of and not late:
            self.s.handle(asked(f"{trajectory}.t0", self.at, 1, 1))
        one = {"trajectory": trajectory, "host": host, "turns": 3, "commands_s": commands_s}
        self.s.handle(ev.TrajectorySaved(at=self.at, **one))

    def run(self, seconds):
        """Report all loads and tick once per second; return the moves (time, trajectory, host)."""
        found = []
        for _ in range(seconds):
            self.at += 1.0
            for name, load in self.cpu.items():
                self.s.handle(ev.HostLoad(at=self.at, host=name, **load))
            for action in self.s.handle(ev.Tick(at=self.at)):
                if isinstance(action, ev.MoveTrajectory):
                    found.append((self.at, action.trajectory, action.host))
        return found


def crowded():
    world = World()
    world.host("a", cpu=40.0)
    world.host("b", cpu=2.0)
    return world


def test_trajectories_that_spent_most_leave_a_host_that_stays_crowded_for_the_least_loaded():
    world = crowded()
    world.host("b", cpu=9.0)
    world.host("c", cpu=30.0, cores=100.0)
    for at in range(4):
        world.saved(f"g0.{at}", commands_s=10.0 + at)
    moves = world.run(11)
    assert moves == [(11.0, "g0.3", "c"), (11.0, "g0.2", "c")]
    assert world.s.cluster.saved["g0.3"].host == "c"
    assert not world.run(9), "its load must be reported again first"
    assert [name for _, name, _ in world.run(2)] == ["g0.1", "g0.0"]


def test_a_short_peak_moves_no_trajectory():
    world = crowded()
    world.saved("g0.0")
    for _ in range(5):
        world.cpu["a"]["cpu"] = 40.0
        assert not world.run(9)
        world.cpu["a"]["cpu"] = 5.0
        assert not world.run(1)


def test_only_trajectories_with_a_snapshot_move():
    world = crowded()
    assert not world.run(30)
    world.saved("g0.0")
    world.s.handle(ev.TrajectoryEnded(at=world.at, trajectory="g0.0", tokens=1))
    world.saved("g0.0", late=True)
    assert not world.run(30) and world.s.cluster.saved == {}


def test_a_move_must_save_twice_its_cost():
    """A move from slowdown 4 to 1 saves 3/4 of the time spent. It costs 1 s and must save 2."""
    for spent, moves in ((2.5, 0), (2.8, 1)):
        world = crowded()
        world.saved("g0.0", commands_s=spent)
        assert len(world.run(11)) == moves


# The last is less crowded by the margin of 1.25 before the move, and not after it.
@pytest.mark.parametrize("cpu, memory", [(38.0, 0.5), (2.0, 0.95), (28.0, 0.5)])
def test_a_trajectory_stays_if_no_other_host_is_better(cpu, memory):
    world = crowded()
    world.host("b", cpu=cpu, memory=memory)
    world.saved("g0.0")
    assert not world.run(40)


def test_a_moved_trajectory_has_to_pay_for_its_next_move():
    world = crowded()
    world.saved("g0.0", commands_s=100.0)
    assert len(world.run(11)) == 1
    world.cpu["a"], world.cpu["b"] = world.cpu["b"], world.cpu["a"]
    world.saved("g0.0", "b", commands_s=102.0)
    assert not world.run(60)
    world.saved("g0.0", "b", commands_s=103.0)
    assert world.run(1)[0][1:] == ("g0.0", "a")


def test_a_host_that_is_gone_or_silent_takes_no_part():
    world = crowded()
    world.saved("g0.0")
    world.run(5)
    world.s.handle(ev.HostLost(at=world.at, host="b"))
    del world.cpu["b"]
    assert not world.run(30)
    world.s.handle(ev.HostLost(at=world.at, host="a"))
    assert world.s.cluster.saved == {} and list(world.s.cluster.hosts) == []


def test_between_equal_hosts_with_noisy_loads_no_trajectory_moves_twice():
    """Two hosts share 40 tasks like their trajectories. The moves end, and no trajectory moves
    twice."""
    world, place = World(at_once=4), {f"g0.{i}": "a" if i < 30 else "b" for i in range(40)}
    moves = []
    for second in range(300):
        for name in "ab":
            mine = sum(host == name for host in place.values())
            noise = 1 + 0.1 * ((second * 7 + ord(name)) % 5 - 2) / 2
            world.host(name, cpu=mine * noise, running=mine)
        for trajectory, host in place.items():
            world.saved(trajectory, host, commands_s=10.0 + second)
        for at, trajectory, host in world.run(1):
            place[trajectory] = host
            moves.append((at, trajectory))
    names = [name for _, name in moves]
    assert 2 < len(names) == len(set(names)) and moves[-1][0] < 100
