"""A rollout rank's replica: a real process that is started again when it dies, and that is off the
device before the engine wakes."""

import asyncio

import psutil
import pytest

from rose import config
from rose import protocol as p
from rose.parts.replicas.rollout_worker import Replica
from tests.trainer import tiny_world

pytestmark = pytest.mark.slow

DEADLINE_S = 300.0


class Scene:
    def __init__(self, made, folder):
        config.save(made, folder / "config.json")
        self.said: list[p.Message] = []
        model = tiny_world.save_model(folder / "model")
        self.replica = Replica(made, folder, model, "rollout-0", self.said.append)

    async def told(self, kind, count=1):
        """The `count`-th message of this kind."""

        async def there():
            while len(found := [m for m in self.said if isinstance(m, kind)]) < count:
                await asyncio.sleep(0.01)
            return found[count - 1]

        return await asyncio.wait_for(there(), DEADLINE_S)


async def test_a_replica_that_dies_starts_again_and_one_at_work_is_ended(make_config, tmp_path):
    made = make_config("rollout.engine_restarts=1", "trainer.elastic_replicas=1")
    world = Scene(made, tmp_path)
    keeping = asyncio.create_task(world.replica.keep())
    first = await world.told(p.ReplicaReady)
    await asyncio.wait_for(world.replica.leave_device(), DEADLINE_S)
    assert psutil.pid_exists(first.pid), "it computes nothing: it stays"
    psutil.Process(first.pid).kill()
    lost = await world.told(p.ReplicaLost)
    assert (lost.error, lost.restarting) == ("killed by SIGKILL", True)

    second = await world.told(p.ReplicaReady, 2)
    process = psutil.Process(second.pid)
    process.suspend()
    world.replica.order(p.ComputeGradient(1, 0, str(tmp_path), str(tmp_path / "sum")))
    await asyncio.wait_for(world.replica.leave_device(), DEADLINE_S)
    assert not process.is_running()
    last = await world.told(p.ReplicaLost, 2)
    assert (last.error, last.restarting) == ("killed by SIGKILL", False)
    await asyncio.wait_for(keeping, DEADLINE_S)
    world.replica.order(p.ComputeGradient(2, 0, str(tmp_path), str(tmp_path / "sum")))
    await asyncio.wait_for(world.replica.leave_device(), DEADLINE_S)
    assert not list(tmp_path.glob("sum*"))


async def test_one_that_is_given_up_ends_at_work_and_none_is_started(make_config, tmp_path):
    made = make_config("rollout.engine_restarts=3", "trainer.elastic_replicas=1")
    world = Scene(made, tmp_path)
    keeping = asyncio.create_task(world.replica.keep())
    ready = await world.told(p.ReplicaReady)
    process = psutil.Process(ready.pid)
    process.suspend()
    world.replica.order(p.ComputeGradient(1, 0, str(tmp_path), str(tmp_path / "sum")))
    world.replica.stop()
    await asyncio.wait_for(world.replica.leave_device(), DEADLINE_S)
    assert not process.is_running()
    await asyncio.wait_for(keeping, DEADLINE_S)
    world.replica.stop()
    assert world.said == [ready] and ready.nbytes > 0


async def test_what_a_replica_raises_is_the_reason_of_its_loss(make_config, tmp_path):
    made = make_config("rollout.engine_restarts=0", "trainer.elastic_replicas=1")
    world = Scene(made, tmp_path)
    keeping = asyncio.create_task(world.replica.keep())
    await world.told(p.ReplicaReady)
    world.replica.order(p.ComputeGradient(1, 0, str(tmp_path / "none"), "sum"))
    world.replica.order(p.TrainStep(1, p.BatchSummary([], [], [], []), [[[]]], False, 0))
    lost = await world.told(p.ReplicaLost)
    assert "TransferError" in lost.error or "Missing" in lost.error
    assert str(tmp_path / "none") in lost.error and not lost.restarting
    await asyncio.wait_for(keeping, DEADLINE_S)
