"""An environment host that dies: its trajectories start again on hosts that are up, get the turns
that they had, and no token is made or counted twice."""

import random

import pytest

from rose import protocol as p
from rose.coordinator import groups, turn_log
from rose.coordinator.waiting import RunFailed
from tests import made
from tests.coordinator import peers
from tests.coordinator.conftest import HOSTS, ask, begun, lose, of_hosts, request, started, tokens


def test_a_turn_under_way_goes_on_for_the_new_host_and_its_answer_is_given_once(rollouts, world):
    host = begun(rollouts, world)
    ask(world, host, "g0.0.t0")
    world.progress([7, 8])
    lose(rollouts, host)
    host = started(world)["g0.0"]
    world.sent.clear()
    ask(world, host, "g0.0.t0")
    assert world.sent == [], "the engine that has it goes on"
    assert (world.hub.log.resumed_turns, world.hub.log.resumed_tokens) == (1, 2)
    world.finish([9])
    [(rank, result)] = world.taken(p.TurnResult)
    assert rank == host and tokens(result) == [7, 8, 9]
    ask(world, host, "g0.0.t1")
    assert [type(m) for _, m in world.sent] == [p.GenerateTurn], "a draw of its own"
    rollouts.handle(p.TrajectoryFinished(made.trajectory("g0.0")))
    assert world.taken(p.AbortTurn) == [(10, p.AbortTurn("g0.0.t1", 1))], "it ends with it"
    assert len(world.hub.ledger) == 0 and not world.scheduler.cluster.turns


def test_a_turn_that_an_environment_asks_otherwise_this_time_is_cut(rollouts, world):
    host = begun(rollouts, world)
    ask(world, host, "g0.0.t0")
    world.progress([7, 8])
    lose(rollouts, host)
    host = started(world)["g0.0"]
    world.sent.clear()
    ask(world, host, "g0.0.t0", tokens=(1, 2, 4))
    assert [type(m) for _, m in world.sent] == [p.AbortTurn, p.GenerateTurn]
    assert tokens(world.sent[1][1]) == [1, 2, 4]
    world.sent.clear()
    # an agent's other call: under another number, from the tokens that it had
    ask(world, host, "g0.0.t1")
    [(_, work)] = world.taken(p.GenerateTurn)
    assert tokens(work) == [1, 2, 3, 7, 8]


def on_one_host(world, make_config, *overrides, restarts):
    sizes = f"rollout.group_size=2 trainer.batch_size=8 rollout.host_restarts={restarts}"
    rollouts = of_hosts(make_config(sizes, *overrides), world, [1])
    rollouts.handle(p.HostReady(1))
    return rollouts


def test_what_waits_to_fork_off_another_does_not_kill_hosts(world, make_config):
    tree = ("rollout/branch=tree", "rollout.branch.at=[1,2]", "rollout.group_size=8")
    rollouts = on_one_host(world, make_config, *tree, restarts=1000)
    rollouts.admit(0, "g0", 0.0)
    for _ in range(5):
        starts = [m for _, m in world.taken(p.StartTrajectory)]
        roots = [m.id for m in starts if not m.follows]
        assert len(starts) == 8 > len(roots) > 0
        world.sent.clear()
        for name in roots:  # which wait for the engine
            ask(world, 1, f"{name}.t0")
        lose(rollouts, 1)
    assert {what for what, _ in world.faults} == {"environment host died"}
    assert rollouts.groups.failed == 0


def plays(world, host, name, turns, life=0):
    """It gets so many turns from there on, with contexts of its own in each `life`."""
    for turn in range(turns):
        ask(world, host, f"{name}.t{turn}", tokens=(life, *range(3 + turn)))
        if f"{name}.t{turn}" in world.hub.ledger:
            world.finish([7], turn=f"{name}.t{turn}")


def started_in_order(rollouts, world, groups):
    for group in range(groups):
        rollouts.admit(group, f"g{group}", 0.0)
    return started(world)


@pytest.mark.parametrize("kills", [3, 30])
def test_deaths_from_outside_fail_one_trajectory_each_at_most(world, make_config, kills):
    """However many trajectories are in one long step of theirs."""
    rollouts = on_one_host(world, make_config, "env.max_failures_in_row=2", restarts=1000)
    started_in_order(rollouts, world, 16)
    for _ in range(kills):
        lose(rollouts, 1)
    assert rollouts.groups.failed == kills - 2 and rollouts.groups.running == 32


def test_a_task_that_kills_its_hosts_each_time_ends_the_run(world, make_config):
    """After a turn, so that each death comes with progress."""
    rollouts = on_one_host(world, make_config, "env.max_failures_in_row=4", restarts=3)
    rollouts.admit(0, "g0", 0.0)
    with pytest.raises(RunFailed, match=r"tasks of frozen_lake fail each time .*max_failed_tasks"):
        for life in range(100):
            for name in started(world):
                if name.startswith("g0.0"):
                    plays(world, 1, name, 1, life)
            lose(rollouts, 1)


@pytest.mark.parametrize("alike", [True, False], ids=["the same contexts", "others in each life"])
def test_the_trajectory_that_kills_its_hosts_is_found_among_others(rollouts, world, alike):
    at, poison = started_in_order(rollouts, world, 8), "g5.1"
    host, deaths, done = at[poison], 0, set()
    waiting = [name for name in at if at[name] == host]
    assert len(waiting) > 4
    for _ in range(2 * len(at)):
        if not rollouts.runs(poison):
            break
        for name in waiting:
            plays(world, at[name], name, 1, 0 if alike else deaths)
        # the others' steps end only where it can't kill them
        if poison in waiting:
            deaths += 1
            lose(rollouts, at[poison])
        else:
            for name in set(waiting) - done:
                asked = request(f"{name}.t1", tokens=(9, 9))
                assert not rollouts.handle(asked)
                world.hub.handle(at[name], asked)
                world.finish([8], turn=asked.turn)
                done.add(name)
        fresh = started(world)
        at |= fresh
        waiting = list(fresh)
    assert deaths == 3 and rollouts.groups.failed == 1
    assert [detail for what, detail in world.faults if what == "environment failed"] == [
        f"{poison}: its host died 3 times in the same step of it, the last was killed by SIGKILL"
    ]
    assert {name for name in at if rollouts.runs(name)} == at.keys() - {poison}
    assert rollouts._suspects.keys() <= set(HOSTS)


def test_a_suspect_that_is_dropped_makes_way_for_the_next(rollouts, world):
    started_in_order(rollouts, world, 2)
    for _ in range(2):
        for host in HOSTS:
            lose(rollouts, host, ready=False)
        for host in HOSTS:
            rollouts.handle(p.HostReady(host))
    first = started(world)
    world.sent.clear()
    rollouts.drop("g0")
    rollouts.drop("g1")
    cancelled = {m.id for _, m in world.taken(p.CancelTrajectory)}
    assert cancelled <= first.keys() | set(started(world)), "nobody is told of those that wait"
    rollouts.admit(7, "g7", 0.0)
    assert len(started(world)) == 2 and rollouts.groups.running == 2
    assert not rollouts._suspects


def test_a_host_that_dies_without_progress_ends_the_run(rollouts, world):
    rollouts.admit(0, "g0", 0.0)
    at = started(world)
    for turns in range(1, 10):
        for name in ("g0.0", "g0.1"):
            plays(world, at[name], name, turns)
        lose(rollouts, at["g0.0"])
        at |= started(world)
    host = at["g0.0"]
    with pytest.raises(RunFailed, match=r"died 4 times in a row.*host_restarts=3.*by SIGKILL"):
        for _ in range(4):
            lose(rollouts, host, ready=False)


def test_the_turns_in_memory_are_bounded(world, rollouts, monkeypatch, capsys):
    monkeypatch.setattr(turn_log, "MOST_BYTES", 12 * 4)
    host = begun(rollouts, world)
    for name in ("g0.0", "g0.1"):
        ask(world, host, f"{name}.t0")
        world.finish([7, 8, 9], turn=f"{name}.t0")
    running = world.hub.log.running
    assert (running.turns("g0.0"), running.turns("g0.1")) == (0, 1)
    assert "are not kept for a lost environment host" in capsys.readouterr().out


def check_each_once(coordinator, peer, trajectories):
    """Each was trained once, with tokens that were made once, and nothing of them is left."""
    names = [t.id for step in peer.trained.values() for t in step]
    assert len(names) == trajectories == len(set(names)) and coordinator.rollouts.groups.failed == 0
    assert max(peer.made.values()) <= peers.TOKENS_OF_A_TURN, "a token was made twice"
    for t in (t for step in peer.trained.values() for t in step):
        assert t.tokens[4:] == peer.received[t.id]
    assert coordinator.rollouts.groups.running == 0 and len(coordinator.hub.ledger) == 0
    assert coordinator.scheduler.cluster.turns == {} and coordinator.hub._tokens == {}
    assert coordinator.hub.log.running._bytes == 0 and coordinator.hub._restarted == set()


@pytest.fixture
def storm(make_config, monkeypatch):
    """storm(*overrides): a run on three hosts, which may die as often as they like."""
    monkeypatch.setattr(groups, "FAIL_AFTER_LOSSES", 1000)
    run = "trainer.steps=4 trainer.batch_size=8 rollout.group_size=2 rollout.environment_hosts=3"
    endless = "rollout.host_restarts=1000 eval.episodes=4"
    return lambda *overrides: make_config(run, endless, *overrides)


class Deaths:
    """Kills a random environment host after every `tokens` generated tokens."""

    def __init__(self, tokens):
        self.tokens, self.draw, self.ranks = tokens, random.Random(7), []

    def come(self, coordinator):
        peer = coordinator.mailbox
        due = sum(peer.made.values()) > self.tokens * (1 + len(self.ranks))
        if coordinator.rollouts.groups.running and due:
            hosts = coordinator.members.ranks[p.Role.ENVIRONMENT].values()
            self.ranks.append(self.draw.choice(list(hosts)))
            peer.loses_host(self.ranks[-1])
        return False


@pytest.mark.parametrize("policy", ["synchronous", "dapo", "bounded_staleness"])
def test_hosts_that_die_lose_and_repeat_nothing(policy, storm, tmp_path):
    config, deaths = storm(f"scheduler/batching={policy}"), Deaths(tokens=30)
    coordinator, peer = peers.run(config, tmp_path, stop_when=deaths.come)
    assert len(deaths.ranks) > 10
    check_each_once(coordinator, peer, 4 * 8)
    for count in ("hosts_lost", "trajectories_restarted"):
        assert sum(row[count] for row in peers.rows(tmp_path)) > 5
    peers.check_replay(config, tmp_path)
