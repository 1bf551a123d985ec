"""Trajectories that move to another environment host: nothing is lost or counted twice, and no
token is made twice."""

from rose import protocol as p
from tests.coordinator import peers
from tests.coordinator.conftest import HOSTS, ask, begun, lose, of_hosts, started, tokens
from tests.coordinator.test_lost_hosts import Deaths, check_each_once
from tests.coordinator.test_lost_hosts import storm as storm  # a fixture


def other(host):
    [rank] = set(HOSTS) - {host}
    return rank, f"environment-{HOSTS.index(rank)}"


def test_a_turn_under_way_is_given_to_the_host_that_the_trajectory_moves_to(rollouts, world):
    host = begun(rollouts, world)
    ask(world, host, "g0.0.t0")
    world.finish([6])
    ask(world, host, "g0.0.t1", tokens=(1, 2, 3, 6, 4))
    world.progress([7], turn="g0.0.t1")
    rank, name = other(host)
    world.sent.clear()
    rollouts.move("g0.0", name)
    rollouts.move("g0.0", name)
    assert world.sent == [(host, p.ReleaseTrajectory("g0.0"))], "asked once"
    rollouts.handle(p.TrajectoryReleased(host, "g0.0"))
    assert started(world) == {"g0.0": rank}
    assert not rollouts.handle(p.TrajectoryResumed("g0.0", 1, 1, False))
    world.hub.handle(rank, p.TrajectoryResumed("g0.0", 1, 1, False))
    world.sent.clear()
    ask(world, rank, "g0.0.t1", tokens=(1, 2, 3, 6, 4))
    assert world.sent == [], "the engine that has it goes on"
    world.finish([8], turn="g0.0.t1")
    [(to, result)] = world.taken(p.TurnResult)
    assert to == rank and tokens(result) == [7, 8]
    assert (rollouts.counts.trajectories_moved, rollouts.counts.trajectories_restarted) == (1, 0)
    rollouts.drop("g0")
    assert rollouts.counts.tokens_dropped == 3, "each token was made once"


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
    rollouts.move("g0.0", name)
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
