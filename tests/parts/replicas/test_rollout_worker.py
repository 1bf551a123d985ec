"""The rollout rank of an engine with a replica: the replica has the device while the engine sleeps,
and loads each version after the engine."""

import asyncio

from rose import protocol as p
from rose.engine import rank
from rose.observe.recorder import NullRecorder
from rose.parts.replicas import rollout_worker
from tests.coordinator.test_shared_device_worker import DEADLINE_S, FakeEngine, Scene


class FakeReplica:
    def __init__(self, *_):
        self.keep = asyncio.Event().wait

    def order(self, message):
        FakeEngine.log.append(type(message))

    async def leave_device(self):
        FakeEngine.log.append("leave")


async def ends(engine):
    if engine.alive:
        engine.die()


async def test_an_engine_that_fails_to_sleep_ends_and_another_starts_behind_the_replica(
    make_config, monkeypatch, tmp_path
):
    for name, fake in (("resolve", lambda _: tmp_path), ("Engine", FakeEngine)):
        monkeypatch.setattr(rank, name, fake)
    monkeypatch.setattr(rank, "DEATH_NOTICE_S", 0.01)
    monkeypatch.setattr(rollout_worker, "Replica", FakeReplica)
    monkeypatch.setattr(FakeEngine, "sleep", lambda _: 1 / 0)
    monkeypatch.setattr(FakeEngine, "shutdown", ends)
    FakeEngine.log, FakeEngine.starting = [], None
    made = make_config("trainer.elastic_replicas=1 rollout.workers=2 cluster=gpus cluster.gpus=3")
    world = Scene(made)
    world.worker = rollout_worker.build(tmp_path, 0, made, "rollout-0", world, NullRecorder())
    running = asyncio.create_task(world.worker.run())
    await world.told(p.WorkerReady)
    assert FakeEngine.last.args == {"enable_sleep_mode": True}
    world.tell(p.LoadVersion, 5, "store")
    await world.told(p.VersionLoaded)
    world.tell(p.Sleep)
    assert (await world.told(p.DeviceChanged)).moved_gib == 0.0
    world.tell(p.ComputeGradient, 6, 5, "store", "file")
    world.tell(p.Wake)
    assert (await world.told(p.WorkerReady, 2)).incarnation == 2
    world.inbox.put_nowait(p.Shutdown("over"))
    await asyncio.wait_for(running, DEADLINE_S)
    orders = [p.LoadVersion, p.ComputeGradient]
    assert FakeEngine.log == ["start", "up", "load 5", *orders, "leave", "start", "up"]
