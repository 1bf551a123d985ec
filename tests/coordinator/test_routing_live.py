"""Routing policies drive the live coordinator: each member of a mixture is generated on the
hardware that is declared for it, and trajectories wait whole where engines have little memory."""

import msgspec
import pytest

from rose.scheduler import events as ev
from tests.coordinator import peers

HARDWARE = {"frozen_lake": "H800", "calculator": "H20"}
WORKERS = {"H800": "rollout-0", "H20": "rollout-1"}
# KV tokens of an engine that takes 4 turns. A trajectory needs at least 100 KV tokens.
KV_TOKENS = 500


@pytest.mark.parametrize("seed", range(3))
def test_every_turn_of_a_member_goes_to_its_own_hardware(make_config, tmp_path, seed):
    config = make_config(
        "env=games env.members.calculator.weight=2 scheduler/routing=rollart rollout.workers=2",
        *(f"+scheduler.routing.args.hardware.{domain}={name}" for domain, name in HARDWARE.items()),
        peers.SHORT,
        "trainer.steps=4 trainer.batch_size=4 eval.episodes=3",  # fewer than an engine takes
    )
    peers.run(config, tmp_path, seed=seed, hardware=list(WORKERS))
    domain, went = {}, {name: set() for name in HARDWARE}
    for entry in peers.entries(tmp_path):
        if isinstance(entry.event, ev.TurnRequested):
            domain[entry.event.turn] = entry.event.domain
        for action in entry.actions:
            if isinstance(action, ev.AssignTurn):
                went[domain[action.turn]].add(action.worker)
    assert went == {name: {WORKERS[hardware]} for name, hardware in HARDWARE.items()}


def test_trajectories_wait_for_memory_and_the_run_goes_on(make_config, tmp_path, monkeypatch):
    def small(self, rank, incarnation):
        return msgspec.structs.replace(ready(self, rank, incarnation), kv_tokens=KV_TOKENS)

    ready = peers.Peers.ready
    monkeypatch.setattr(peers.Peers, "ready", small)
    config = make_config(
        peers.SHORT,
        "scheduler/routing=thunder scheduler/order=shortest_first",
        "scheduler.routing.args.period_s=0.001 scheduler.routing.args.half_life_s=1e9",
        "trainer.steps=2 trainer.batch_size=16 rollout.group_size=4 env.max_new_tokens=8",
    )
    peers.run(config, tmp_path, seed=1)
    assert [row["step"] for row in peers.rows(tmp_path)] == [1, 2]
    peers.check_replay(config, tmp_path)
    waited, running = 0, set()
    for entry in peers.entries(tmp_path):
        given = {a.turn for a in entry.actions if isinstance(a, ev.AssignTurn)}
        running |= given
        match entry.event:
            case ev.TurnRequested(turn=turn):
                waited += turn not in given and len(running) < 4
            case ev.TurnEnded(turn=turn):
                running.discard(turn)
    assert waited, "an engine had places for turns that waited: it was memory that they waited for"
