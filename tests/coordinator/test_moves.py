"""Trajectories that move to another environment host: nothing is lost or counted twice, and no
token is made twice."""

from rose import protocol as p
from tests.coordinator import peers
from tests.coordinator.conftest import HOSTS, begun, lose, of_hosts, started
from tests.coordinator.test_lost_hosts import Deaths, check_each_once
from tests.coordinator.test_lost_hosts import storm as storm  # a fixture


def other(host):
    [rank] = set(HOSTS) - {host}
    return rank, f"environment-{HOSTS.index(rank)}"


def test_words_about_a_move_that_came_to_nothing_change_nothing(rollouts, world):
    host = begun(rollouts, world)
    rank, name = other(host)
    world.sent.clear()
    rollouts.move("g9.0", name)
    rollouts.move("g0.0", "environment-9")
    rollouts.move("g0.0", f"environment-{HOSTS.index(host)}")
    assert world.sent == [], "it is gone, or there"
    rollouts.move("g0.0", name)
    lose(rollouts, host, ready=False)
    assert started(world)["g0.0"] == rank, "its host died before it left"
    rollouts.handle(p.TrajectoryReleased(host, "g0.0"))
    rollouts.drop("g0")
    rollouts.handle(p.TrajectoryReleased(rank, "g0.0"))
    assert started(world) == {} and rollouts.counts.trajectories_moved == 0


def test_one_whose_new_host_dies_meanwhile_goes_to_another(rollouts, world):
    host = begun(rollouts, world)
    rank, name = other(host)
    for _ in range(2):
        rollouts.move("g0.0", name)
    assert world.taken(p.ReleaseTrajectory) == [(host, p.ReleaseTrajectory("g0.0"))], "asked once"
    lose(rollouts, rank, ready=False)
    world.sent.clear()
    rollouts.handle(p.TrajectoryReleased(host, "g0.0"))
    assert started(world) == {"g0.0": host}


def test_trajectories_that_fork_off_each_other_stay(world, make_config):
    sizes = "rollout.group_size=4 trainer.batch_size=8 rollout.environment_hosts=2"
    made = of_hosts(make_config(sizes, "rollout/branch=tree"), world, HOSTS)
    for host in HOSTS:
        made.handle(p.HostReady(host))
    made.admit(0, "g0", 0.0)
    at = [(rank, m) for rank, m in world.taken(p.StartTrajectory)]
    tied = {m.follows for _, m in at} | {m.id for _, m in at if m.follows}
    assert any(m.follows for _, m in at)
    world.sent.clear()
    for rank, m in at:
        if m.id in tied:
            made.move(m.id, other(rank)[1])
    assert world.sent == []


def test_a_storm_of_moves_and_deaths_loses_nothing(storm, tmp_path):
    config = storm("scheduler/batching=bounded_staleness scheduler/placement=rebalance")
    deaths = Deaths(tokens=100)

    def moves(coordinator):
        if running := list(coordinator.rollouts._running):
            name, host = deaths.draw.choice(running), deaths.draw.randrange(3)
            coordinator.rollouts.move(name, f"environment-{host}")
        deaths.come(coordinator)

    # at turns of the loop alone: an order to a peer is no place to give the next
    coordinator, peer = peers.run(config, tmp_path, watch=moves)
    check_each_once(coordinator, peer, 4 * 8)
    assert len(deaths.ranks) > 2
    assert sum(row["trajectories_moved"] for row in peers.rows(tmp_path)) > 10
    peers.check_replay(config, tmp_path)
