"""Trainer ranks and engines that share devices: never both awake, whatever happens in between."""

import asyncio

import pytest

from rose import protocol as p
from rose.coordinator.shared_devices import Devices
from rose.coordinator.waiting import Changes, RunFailed
from rose.observe.recorder import NullRecorder
from rose.trainer import checkpoint
from tests.coordinator import peers

STEPS = 4


@pytest.fixture
def config(make_config):
    run = f"{peers.SHORT} trainer.steps={STEPS} trainer.checkpoint_every=2 eval.episodes=3"
    return lambda *overrides: make_config(run, "eval.every=2 colocate=true", *overrides)


def turns(peer):
    """The orders, those to several ranks of a role once."""
    found = []
    for order in peer.orders:
        if not found or found[-1] != order:
            found.append(order)
    return [(role.value, what) for role, what in found]


TO_ROLLOUT = [("trainer", "sleep"), ("rollout", "wake")]
TO_TRAINER = [("rollout", "sleep"), ("trainer", "wake")]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_changes_turns_twice_a_step_and_trains_as_without(seed, config, tmp_path):
    _, peer = peers.run(config(), tmp_path / "shared", seed=seed)
    _, alone = peers.run(config("colocate=false"), tmp_path / "alone", seed=seed)
    assert turns(peer) == TO_ROLLOUT + STEPS * (TO_TRAINER + TO_ROLLOUT)
    assert peer.turns_asleep == 0
    groups, those_alone = (
        {step: sorted(t.id for t in rows) for step, rows in each.trained.items()}
        for each in (peer, alone)
    )
    assert groups == those_alone and len(groups) == STEPS
    saved = checkpoint.complete(tmp_path / "shared")
    assert [checkpoint.step_of(folder) for folder in saved] == [2, 4]
    rows = peers.rows(tmp_path / "shared")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    seconds = rows[-1]["seconds_sleep"], rows[-1]["seconds_wake"]
    assert seconds == pytest.approx((0.2, 0.4))
    assert rows[-1]["trainer_sleep_free_gib"] == 20.0 and rows[-1]["rollout_wake_gib"] == 3.0


def test_stopped_in_the_engines_turn_the_trainer_takes_its_own_and_saves(config, tmp_path):
    def rolling_out(coordinator):
        return coordinator.progress.step == 3 and coordinator.hub.workers["rollout-0"].tokens > 0

    made = config("trainer.checkpoint_every=100")
    saved = peers.stopped(made, tmp_path, rolling_out)
    assert checkpoint.step_of(saved) == 3
    _, peer = peers.run(made, tmp_path, attempt=2, resume_from=saved)
    assert list(peer.trained) == [4] and turns(peer) == TO_ROLLOUT + TO_TRAINER + TO_ROLLOUT


def devices(config, send, until=None):
    """The devices of a trainer at rank 2 and engines at ranks 3 and 4."""
    ranks = {p.Role.TRAINER: {0: 2}, p.Role.ROLLOUT: {0: 3, 1: 4}}
    return Devices(config, ranks, send, until, NullRecorder())


def answer(device, rank, turn, awake=False):
    device.received(p.DeviceChanged(rank, turn, awake, 0.1, 1.0, 2.0, 3.0))


async def test_a_rank_that_does_not_answer_is_named_with_what_was_waited_for(config):
    changes = Changes(lambda what: None)

    async def until(ready, deadline_s, what):
        assert deadline_s > 240  # an engine may have to be started
        await changes.until(ready, 0.01, what)

    def send(rank, order):
        if rank == 3:
            answer(device, rank, order.turn)

    device = devices(config(), send, until)
    device.holder = p.Role.ROLLOUT
    words = "rollout ranks to release their devices' memory: no `DeviceChanged` of 1"
    with pytest.raises(RunFailed, match=words):
        await device.to(p.Role.TRAINER)
    assert device.holder is None


async def test_an_order_that_broke_off_is_given_again_and_late_answers_count_for_nothing(config):
    sent = []
    changes = Changes(lambda what: None)
    device = devices(config(), lambda *order: sent.append(order), changes.until)
    first = asyncio.create_task(device.to(p.Role.ROLLOUT))
    await asyncio.sleep(0)
    first.cancel()  # a stop, as the trainer gives its device back
    await asyncio.gather(first, return_exceptions=True)
    again = asyncio.create_task(device.to(p.Role.TRAINER))
    await asyncio.sleep(0)
    answer(device, 3, sent[-1][1].turn)
    answer(device, 4, sent[0][1].turn)  # the order before
    changes.set()
    await asyncio.sleep(0)
    assert [type(m) for _, m in sent] == [p.Sleep] * 3
    answer(device, 4, sent[-1][1].turn)
    changes.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert isinstance(sent[-1][1], p.Wake) and sent[-1][0] == 2
    answer(device, 2, sent[-1][1].turn, awake=True)
    changes.set()
    await again
    assert device.holder is p.Role.TRAINER


async def test_without_sharing_nobody_is_told_anything(config):
    device = devices(config("colocate=false"), lambda *order: pytest.fail(f"told {order}"))
    await device.to(p.Role.ROLLOUT)
    assert device.row({}, 0.0) == {}
