"""Hybrid engines roll out while the trainer would idle, and never while it trains: the same groups
are trained as without, whoever dies."""

import asyncio
from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.launch.layout import hybrid_ranks
from rose.observe.recorder import NullRecorder
from rose.parts.hybrid import hybrid_devices
from rose.parts.hybrid.hybrid_devices import HybridDevices
from rose.parts.hybrid.hybrid_starts import RECENT, HybridStarts
from rose.scheduler import events as ev
from rose.trainer import checkpoint
from tests.coordinator import peers

STEPS = 4
ALL_IDLE = ("scheduler/provisioning=all_idle", "scheduler.provisioning.args.hybrid_wait_s=0")
DEVICES = {
    "cpu": (),
    "gpus": ("cluster=gpus", "cluster.gpus=2", "trainer.ranks=1", "trainer.zero_stage=0"),
}


@pytest.fixture
def config(make_config):
    run = f"{peers.SHORT} trainer.steps={STEPS} trainer.batch_size=16 trainer.checkpoint_every=2"
    return lambda *overrides, provisioning=ALL_IDLE: make_config(
        run, "eval.episodes=2 rollout.workers=1 rollout.hybrid=1", *provisioning, *overrides
    )


def trained(peer):
    return {step: sorted(t.id for t in rows) for step, rows in peer.trained.items()}


def whole(peer):
    """Every trained trajectory has the tokens that engines sent of its turns, once each."""
    for rows in peer.trained.values():
        for t in rows:
            assert t.tokens == p.pack_tokens([1]) + peer.received[t.id]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("devices", DEVICES)
def test_a_hybrid_engine_works_in_every_step_and_the_same_groups_are_trained(
    devices, seed, config, tmp_path
):
    made = config(*DEVICES[devices])
    coordinator, peer = peers.run(made, tmp_path / "hybrid", seed=seed)
    alone = config("rollout.hybrid=0", *DEVICES[devices])
    _, without = peers.run(alone, tmp_path / "alone", seed=seed)
    assert trained(peer) == trained(without) and len(peer.trained) == STEPS
    whole(peer)
    rows = peers.rows(tmp_path / "hybrid")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    # not in each: it may wake when all turns are taken
    assert any(row["hybrid_token_share"] > 0 and row["hybrid_idle_used"] > 0 for row in rows)
    assert all(0 <= row["hybrid_delay"] < 1 and row["borrowed_workers"] == 0 for row in rows)
    generated = coordinator.hub.workers.generated
    assert generated["hybrid"] > 0 == generated["borrowed"]
    peers.check_replay(made, tmp_path / "hybrid")
    kinds = [type(a) for entry in peers.entries(tmp_path / "hybrid") for a in entry.actions]
    assert kinds.count(ev.UseWorker) == kinds.count(ev.RestWorker) == STEPS
    # a version that was published while it was asleep is loaded by every wake
    assert kinds.count(ev.LoadWeights) == 1 + STEPS + STEPS


@pytest.mark.parametrize("batching", ["carry_over", "tail_batching", "dapo"])
def test_turns_that_run_when_the_batch_is_complete_go_on_elsewhere(batching, config, tmp_path):
    made = config(f"scheduler/batching={batching}", "algorithm=decoupled_ppo")
    coordinator, peer = peers.run(made, tmp_path)
    assert len(peer.trained) == STEPS and peer.of_hybrids["turns"] > 0
    whole(peer)
    if batching == "tail_batching":  # others have few turns too many, by chance none of them there
        assert peer.of_hybrids["moved"] > 0
    assert coordinator.scheduler.cluster.turns == {} and len(coordinator.hub.ledger) == 0


def test_an_engine_that_died_asleep_is_not_started_for_a_policy_that_leaves_it_alone(
    config, tmp_path
):
    made = config(*DEVICES["gpus"], "scheduler.provisioning.args.hybrid_wait_s=1e9")
    _, peer = peers.run(made, tmp_path, stop_when=dies_in_the_first_training)
    [rank] = peer.hybrids
    assert rank in peer.dead and len(peer.trained) == STEPS
    trainer, engine = p.Role.TRAINER, p.Role.ROLLOUT
    first = [(trainer, "sleep"), (engine, "wake"), (engine, "sleep"), (trainer, "wake")]
    assert peer.orders == first, "after the step in which all start, the trainer waits for none"


def hybrid_of(coordinator):
    [rank] = coordinator.mailbox.hybrids
    return coordinator.mailbox, rank


def dies_in_the_first_training(coordinator):
    """Kill the sleeping hybrid engine once, in the first training; never stop the run."""
    peer, rank = hybrid_of(coordinator)
    asleep = coordinator.progress.step == 0 and peer.training and peer.asleep(rank)
    if asleep and rank not in peer.dead:
        peer.died = True
        peer.dies(rank)
    return False


def rolling_out(coordinator):
    """True once three steps are done and the hybrid engine has generated a token since."""
    worker = coordinator.hub.workers.get("rollout-1")
    return coordinator.progress.step == 3 and worker is not None and worker.tokens > 0


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("when", ["asleep", "waking", "generating"])
def test_a_hybrid_engine_that_is_killed_works_again(when, devices, config, tmp_path):
    died_at = []

    def is_there(coordinator, peer, rank):
        worker = coordinator.hub.workers.get("rollout-1")
        if when == "asleep":
            return peer.training and peer.asleep(rank)
        if worker is None or rank not in peer.awake or not worker.alive:
            return False
        if when == "generating":
            return worker.open_turns > 0 and worker.tokens > 0
        loading = worker.version != coordinator.hub.weights.version
        return loading and coordinator.rollouts.batch is None

    def die(coordinator):
        peer, rank = hybrid_of(coordinator)
        there = coordinator.progress.step == 1 and is_there(coordinator, peer, rank)
        if there and not died_at:
            died_at.append(peer.of_hybrids["turns"])
            peer.dies(rank)
        return False

    coordinator, peer = peers.run(config(*DEVICES[devices]), tmp_path, stop_when=die)
    assert died_at and peer.of_hybrids["turns"] > died_at[0]
    assert coordinator.hub.workers.restarts == 1 and coordinator.hub.workers["rollout-1"].tokens > 0
    assert len(peer.trained) == STEPS
    whole(peer)


class SlowStarts(peers.Peers):
    """An engine that has died isn't up before its turn is over."""

    died = False

    def __init__(self, *args):
        self.attempts, self.starting = [], set()  # the step done before each; ranks
        super().__init__(*args)

    def starts(self, rank):
        if not self.died:
            return super().starts(rank)
        self.starting.add(rank)
        self.attempts.append(self.step)

    def _Sleep(self, rank, m):
        self.dead |= {rank} & self.starting
        self.starting.discard(rank)
        super()._Sleep(rank, m)


def at_second(method, seconds):
    """The method with another time, its last argument."""
    return lambda starts, *others: method(starts, *others[:-1], seconds)


def test_a_start_that_outlasts_a_rollout_is_said_and_not_begun_at_every_step(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(peers, "Peers", SlowStarts)
    # Every rollout takes a minute, and is a turn of the engines, however busy the machine.
    fixed = {"wake_ordered": 0.0, "update": 30.0, "sleep_ordered": 60.0, "rolled_out": 60.0}
    for name, seconds in fixed.items():
        monkeypatch.setattr(HybridStarts, name, at_second(getattr(HybridStarts, name), seconds))
    made = config(*DEVICES["gpus"])
    _, peer = peers.run(made, tmp_path, stop_when=dies_in_the_first_training)
    assert peer.attempts == [1] and len(peer.trained) == STEPS
    assert [row["starts_broken_off"] for row in peers.rows(tmp_path)] == [0, 1, 0, 0]
    faults = peers.rows(tmp_path, "fault")
    [said] = [row["detail"] for row in faults if row["what"] == "hybrid engine not started"]
    assert said.startswith("rollout-1: its start was cancelled after 60.0 s")
    assert peer.orders.count((p.Role.TRAINER, "sleep")) == 2, "it keeps its devices from then on"


class Starts:
    def __init__(self):
        self.up, self.faults = {7}, []
        said = (lambda: self.up, True, lambda what, detail: self.faults.append(detail))
        self.starts = HybridStarts({7: "rollout-1"}, *said)

    def rollout(self, seconds, up_after=None, turn=None):
        """Whether the rank gets its turn."""
        worth = self.starts.worth(7)
        if worth:
            self.starts.wake_ordered([7], 100.0)
        if worth and up_after is not None:
            self.up = {7}
            self.starts.update(100.0 + up_after)
        self.starts.sleep_ordered(100.0 + (turn or seconds))
        self.starts.devices_released()
        self.starts.rolled_out(seconds)
        return worth


def test_an_engine_is_started_again_when_rollouts_are_longer_than_a_start_is_known_to_need():
    made = Starts()
    assert made.rollout(60.0) and not made.starts.any_worth
    made.up = set()
    assert made.starts.any_worth and made.rollout(50.0)
    for length in (60.0, 50.0) * RECENT:
        assert not made.rollout(length) and not made.starts.any_worth
    assert len(made.faults) == made.starts.take_cancelled() == 1
    for _ in range(RECENT):
        assert not made.rollout(61.0)
    assert made.rollout(80.0, up_after=70.0) and made.starts.take_cancelled() == 0
    assert "after 50.0 s" in made.faults[0] and "more than 50.0 s" in made.faults[0]
    made.up = set()
    assert made.rollout(30.0), "it got up, so that the next is tried"
    assert "cancelled after 30.0 s" in made.faults[1] and "more than 70.0 s" in made.faults[1]
    for length in (65.0, 69.0, 65.0):
        assert not made.rollout(length)
    for _ in range(RECENT):
        assert not made.rollout(71.0)
    assert not made.rollout(75.0), "as long as it took once is not longer"
    for _ in range(RECENT - 1):
        assert not made.rollout(75.0)
    assert made.rollout(75.0)


def test_a_turn_that_was_ended_early_once_bars_no_start_and_a_habit_does():
    made = Starts()
    for _ in range(RECENT):
        assert made.rollout(300.0, turn=200.0)
    made.up = set()
    assert made.rollout(300.0, turn=10.0), "its device was free for a moment only"
    assert made.rollout(290.0, turn=10.0) and made.rollout(295.0, turn=10.0)
    assert not made.rollout(299.0) and "more than 10.0 s" in made.faults[-1]
    assert len(made.faults) == RECENT


def of_ranks(made, up, send, fault=pytest.fail):
    """The devices of trainer ranks from 2 on, and of the engines behind them."""
    trainers, engines = made.trainer.ranks, made.rollout.workers + made.rollout.hybrid
    ranks = {p.Role.TRAINER: {i: 2 + i for i in range(trainers)}}
    ranks[p.Role.ROLLOUT] = {i: 2 + trainers + i for i in range(engines)}
    hub = SimpleNamespace(workers=SimpleNamespace(hybrids_up=up))
    return HybridDevices(made, ranks, send, NullRecorder(), hub, fault)


def answer(turns, rank, order):
    awake = isinstance(order, p.Wake)
    turns.received(p.DeviceChanged(rank, order.turn, awake, 0.1, 1.0, 2.0, 3.0))


async def test_beside_an_engine_that_works_one_that_has_no_time_to_start_gets_no_turn(
    config, monkeypatch
):
    sent, now, up, faults, woken = [], [0.0], {5, 6}, [], []
    monkeypatch.setattr(hybrid_devices, "time", SimpleNamespace(time=lambda: now[0]))
    made = config("cluster=gpus", "cluster.gpus=3", "trainer.ranks=2", "rollout.hybrid=2")

    def send(rank, order):
        sent.append((rank, type(order)))
        answer(turns, rank, order)

    turns = of_ranks(made, lambda: up, send, lambda *fault: faults.append(fault))
    for _ in range(4):
        sent.clear()
        await turns.to(p.Role.ROLLOUT)
        woken.append([rank for rank, order in sent if order is p.Wake])
        now[0] += 50.0
        up = {5}
        turns.engine_changed()
        now[0] += 10.0
        sent.clear()
        await turns.to(p.Role.TRAINER)
        assert [rank for rank, order in sent if order is p.Sleep] == [5, 6]
        turns.starts.rolled_out(60.0)
    # it died late in its first turn, and had the second in vain
    assert woken == [[5, 6], [5, 6], [5], [5]] and len(faults) == 2
    up = {5, 6}  # whoever is up has its turn
    await turns.to(p.Role.ROLLOUT)
    assert [rank for rank, order in sent if order is p.Wake][-2:] == [5, 6]


@pytest.mark.parametrize("devices", DEVICES)
def test_a_stop_saves_the_step_whatever_a_hybrid_engine_does(
    devices, config, tmp_path, monkeypatch
):
    """On GPUs its engine dies, and another is up before it is asleep; on CPUs it says nothing."""
    sleep = peers.Peers._Sleep

    def told_to_sleep(peer, rank, order):
        if rank not in peer.hybrids or peer.step < 3:
            sleep(peer, rank, order)
        elif devices == "gpus":
            peer.dies(rank)
            sleep(peer, rank, order)

    monkeypatch.setattr(peers.Peers, "_Sleep", told_to_sleep)
    made = config(*DEVICES[devices], "trainer.checkpoint_every=100")
    assert checkpoint.step_of(peers.stopped(made, tmp_path, rolling_out)) == 3


async def test_a_batch_that_is_complete_while_engines_wake_breaks_that_off(config):
    sent, made = [], config(*DEVICES["gpus"])
    [hybrid] = hybrid_ranks(made).values()
    turns = of_ranks(made, lambda: {hybrid}, lambda *order: sent.append(order))

    async def answers():
        for _ in range(5):
            await asyncio.sleep(0)
        answer(turns, *sent[-1])

    turns.begin(p.Role.ROLLOUT)
    await answers()  # the trainer sleeps; the engine wakes, and takes its time
    await asyncio.sleep(0)
    turning = asyncio.create_task(turns.to(p.Role.TRAINER))
    await answers()
    turns.begin(p.Role.ROLLOUT)  # an engine has joined: not now
    await answers()
    await turning
    await turns.before_save()
    turns.begin(p.Role.ROLLOUT)  # nor where the trainer is to save
    await asyncio.sleep(0)
    assert turns.holder is p.Role.TRAINER
    expected = [(2, p.Sleep), (hybrid, p.Wake), (hybrid, p.Sleep), (2, p.Wake)]
    assert [(rank, type(m)) for rank, m in sent] == expected
