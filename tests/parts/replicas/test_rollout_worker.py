"""The rollout rank of an engine with a replica: the replica has the device while the engine sleeps,
and loads each version after the engine."""

import asyncio

from rose import protocol as p
from rose.engine import rank
from rose.parts.replicas import rollout_worker
from tests.coordinator.test_shared_device_worker import FakeEngine, play  # noqa: F401


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


def test_an_engine_that_fails_to_sleep_ends_and_another_starts_behind_the_replica(
    play,  # noqa: F811
    monkeypatch,
    tmp_path,
):
    def build(*arguments, hybrid):
        return rollout_worker.build(tmp_path, 0, *arguments)

    monkeypatch.setattr(rank, "RolloutWorker", build)
    monkeypatch.setattr(rollout_worker, "Replica", FakeReplica)
    monkeypatch.setattr(FakeEngine, "sleep", lambda _: 1 / 0)
    monkeypatch.setattr(FakeEngine, "shutdown", ends)

    async def scene(world):
        await world.told(p.WorkerReady)
        assert FakeEngine.last.args == {"enable_sleep_mode": True}
        world.tell(p.LoadVersion, 5, "store")
        await world.told(p.VersionLoaded)
        world.tell(p.Sleep)
        assert (await world.told(p.DeviceChanged)).moved_gib == 0.0
        world.tell(p.ComputeGradient, 6, 5, "store", "file")
        world.tell(p.Wake)
        assert (await world.told(p.WorkerReady, 2)).incarnation == 2

    on_gpus = ("colocate=false", "trainer.elastic_replicas=1", "cluster=gpus", "cluster.gpus=2")
    orders = [p.LoadVersion, p.ComputeGradient]
    expected = ["start", "up", "load 5", *orders, "leave", "start", "up"]
    assert play(scene, *on_gpus) == expected
