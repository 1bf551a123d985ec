"""Domains are alive in a live run: each member of a mixture is generated on the hardware that is
declared for it."""

import pytest

from rose.coordinator import journal
from rose.scheduler import events as ev
from tests.coordinator import peers

HARDWARE = {"frozen_lake": "H800", "calculator": "H20"}
WORKERS = {"H800": "rollout-0", "H20": "rollout-1"}
# fewer trajectories than an engine takes
ROOM = ("trainer.batch_size=4", "rollout.group_size=2", "eval.episodes=3")


@pytest.mark.parametrize("seed", range(3))
def test_every_turn_of_a_member_goes_to_its_own_hardware(make_config, tmp_path, seed):
    config = make_config(
        "env=games env.members.calculator.weight=2 scheduler/routing=rollart rollout.workers=2",
        *(f"+scheduler.routing.args.hardware.{domain}={name}" for domain, name in HARDWARE.items()),
        *ROOM,
        "trainer.steps=4 serving.borrow=false observe.tensorboard=false",
        "observe.save_trajectories=false",
    )
    peers.run(config, tmp_path, seed=seed, hardware=list(WORKERS))
    [path] = (tmp_path / "journal").iterdir()
    entries = journal.read(path)
    next(entries)
    domain, went = {}, {name: set() for name in HARDWARE}
    for entry in entries:
        if isinstance(entry.event, ev.TurnRequested):
            domain[entry.event.turn] = entry.event.domain
        for action in entry.actions:
            if isinstance(action, ev.AssignTurn):
                went[domain[action.turn]].add(action.worker)
    assert went == {name: {WORKERS[hardware]} for name, hardware in HARDWARE.items()}
