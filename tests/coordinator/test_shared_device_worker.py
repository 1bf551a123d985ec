"""A rollout rank whose GPU is a trainer rank's too: its engine starts, wakes and sleeps in its
turn, also when it dies in between."""

import asyncio
from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.comm.tasks import Tasks
from rose.engine import rank as rollout
from rose.engine.activation import Moved
from rose.engine.vllm_engine import EngineDied, Stats
from rose.observe.recorder import NullRecorder

DEADLINE_S = 120.0


class FakeEngine:
    """Keeps what was asked of it, of all engines, in `log`."""

    log, starting, drafts = [], None, True
    hardware, kv_tokens, pid, description = "cpu", 100, 4242, []

    def __init__(self, args):
        self.args, self.version, self.asleep, self.alive = args, -1, False, True
        self.failed = False  # vLLM may report that while the process still lives.
        self.died = asyncio.get_running_loop().create_future()
        self.learns = asyncio.Event()

    @classmethod
    async def start(cls, folder, settings, model, **_):
        cls.log.append("start")
        if cls.starting is not None:
            await cls.starting.wait()
        cls.log.append("up")
        cls.last = cls(settings.engine_args)
        return cls.last

    @property
    def lost(self):
        return self.failed

    def kill(self):
        self.log.append("kill")
        asyncio.get_running_loop().call_soon(self.die)

    def die(self):
        self.alive = False
        self.died.set_result(None)

    async def sleep(self):
        self.log.append("sleep")
        self.asleep = True
        return Moved(7.0, 20.0, 24.0)

    async def wake_weights(self):
        self.log.append("weights")
        if self.failed or not self.alive:
            raise EngineDied("gone")
        return Moved(-1.0, 15.0, 24.0)

    async def wake(self):
        self.log.append("kv_cache")
        self.asleep = False
        return Moved(-6.0, 14.0, 24.0)

    async def load_version(self, version, *_):
        self.log.append(f"load {version}")
        self.version = version
        return SimpleNamespace(nbytes=1, route=[], mirrored=0, pause_s=0.0)

    async def call_workers(self, method, *args):
        self.log.append((method, *args))
        await self.learns.wait()

    async def shutdown(self):
        pass

    def stats(self):
        return Stats(0, 0, 0.0, 0, 0, 0, 0, 0, 0)


class Scene:
    """The coordinator's side of one rank."""

    rank = 3

    def __init__(self, config):
        self.inbox, self.sent = asyncio.Queue(), []
        named = ("rollout-0", self, NullRecorder())
        self.worker = rollout.RolloutWorker(config, *named, hybrid=config.hybrids > 0)
        self.turn = 0

    def send(self, _, message):
        self.sent.append(message)

    async def receive(self):
        return 0, await self.inbox.get()

    def tell(self, order, *args):
        self.turn += order is not p.LoadVersion
        self.inbox.put_nowait(order(*args) if args else order(self.turn))

    async def told(self, kind, count=1):
        """The `count`-th message of this kind."""

        async def there():
            while len(found := [m for m in self.sent if isinstance(m, kind)]) < count:
                await asyncio.sleep(0.001)
            return found[count - 1]

        return await asyncio.wait_for(there(), DEADLINE_S)

    async def answer(self, order):
        """Send an order to wake or to sleep; return the answer to it."""
        self.tell(order)
        return await self.told(p.DeviceChanged, self.turn)


@pytest.fixture
def play(make_config, monkeypatch, tmp_path):
    """play(scene): runs scene(Scene) beside the rank; what was asked of its engines."""
    monkeypatch.setattr(rollout, "resolve", lambda model: tmp_path)
    monkeypatch.setattr(rollout, "Engine", FakeEngine)
    monkeypatch.setattr(rollout, "DEATH_NOTICE_S", 0.01)
    FakeEngine.log, FakeEngine.starting = [], None

    def play(scene, *overrides):
        async def both():
            sides = overrides if "rollout.hybrid=1" in overrides else ("colocate=true", *overrides)
            made = Scene(make_config("rollout.workers=1", *sides))
            running = asyncio.create_task(made.worker.run())
            await asyncio.wait_for(scene(made), DEADLINE_S)
            made.inbox.put_nowait(p.Shutdown("over"))
            await asyncio.wait_for(running, DEADLINE_S)

        asyncio.run(both())
        return FakeEngine.log

    return play


async def settle():
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_the_engine_starts_in_its_first_turn_and_new_weights_come_before_the_kv_cache(play):
    async def scene(world):
        await settle()
        assert FakeEngine.log == [], "it would have taken the device in the trainer's turn"
        assert (await world.answer(p.Wake)).awake
        assert [type(m) for m in world.sent] == [p.WorkerReady, p.DeviceChanged]
        slept = await world.answer(p.Sleep)
        assert (slept.turn, slept.awake, slept.moved_gib, slept.free_gib) == (2, False, 7.0, 20.0)
        world.tell(p.LoadVersion, 5, "store")
        await settle()
        assert FakeEngine.log[-1] == "sleep", "staging reads the live weights"
        woken = await world.answer(p.Wake)
        assert (woken.moved_gib, woken.free_gib) == (7.0, 14.0)
        assert (await world.told(p.VersionLoaded)).version == 5

    expected = ["start", "up", "sleep", "weights", "load 5", "kv_cache"]
    assert play(scene, "cluster=gpus", "cluster.gpus=1") == expected
    assert FakeEngine.last.args == {"enable_sleep_mode": True}


def test_an_engine_that_dies_asleep_is_restarted_in_its_next_turn_and_not_before(play):
    async def scene(world):
        await world.answer(p.Wake)
        await world.answer(p.Sleep)
        FakeEngine.last.die()
        assert (await world.told(p.WorkerDown)).restarting
        await world.answer(p.Sleep)  # asked again: what is dead has given everything back
        await settle()
        assert FakeEngine.log == ["start", "up", "sleep"]
        await world.answer(p.Wake)
        assert [m.incarnation for m in world.sent if isinstance(m, p.WorkerReady)] == [1, 2]

    assert play(scene) == ["start", "up", "sleep", "start", "up"]


def test_an_engine_that_vllm_gave_up_and_that_lives_on_is_killed_and_another_starts(
    play, monkeypatch
):
    monkeypatch.setattr(rollout, "DEATH_NOTICE_S", 0.0)

    async def scene(world):
        await world.answer(p.Wake)
        await world.answer(p.Sleep)
        FakeEngine.last.failed = True
        assert (await world.answer(p.Wake)).awake
        assert await world.told(p.WorkerDown)

    assert play(scene) == ["start", "up", "sleep", "weights", "kill", "start", "up"]


def test_told_to_sleep_while_it_starts_again_it_answers_when_it_has_been_put_to_sleep(play):
    async def scene(world):
        await world.answer(p.Wake)
        FakeEngine.starting = asyncio.Event()
        FakeEngine.last.die()
        await world.told(p.WorkerDown)
        world.tell(p.Sleep)
        await settle()
        answers = [m for m in world.sent if isinstance(m, p.DeviceChanged)]
        assert len(answers) == 1, "it holds memory as it starts"
        FakeEngine.starting.set()
        assert not (await world.told(p.DeviceChanged, 2)).awake

    assert play(scene) == ["start", "up", "start", "up", "sleep"]


HYBRID = ("rollout.hybrid=1", "scheduler/provisioning=all_idle")
ON_GPUS = (*HYBRID, "cluster=gpus", "cluster.gpus=2", "trainer.ranks=1")


def test_a_hybrid_engine_on_cpus_starts_beside_the_trainer_and_never_holds_its_turn_up(play):
    async def scene(world):
        await world.told(p.WorkerReady)
        FakeEngine.starting = asyncio.Event()
        FakeEngine.last.die()
        await world.told(p.WorkerDown)
        assert not (await world.answer(p.Sleep)).awake, "there is memory for both"
        FakeEngine.starting.set()
        await world.told(p.WorkerReady, 2)
        assert (await world.answer(p.Wake)).awake
        world.tell(p.LoadVersion, 5, "store")
        await world.told(p.VersionLoaded)
        assert not (await world.answer(p.Sleep)).awake

    assert play(scene, *HYBRID) == ["start", "up", "start", "up", "load 5", "sleep"]


def test_a_hybrid_engine_on_gpus_that_is_being_started_gives_way_to_the_trainer(play):
    async def scene(world):
        FakeEngine.starting = asyncio.Event()
        world.tell(p.Wake)
        while not FakeEngine.log:
            await asyncio.sleep(0.001)
        assert not (await world.answer(p.Sleep)).awake
        await settle()
        assert FakeEngine.log == ["start"], "it comes again in its turn, and not before"
        FakeEngine.starting.set()
        world.tell(p.Wake)
        assert (await world.told(p.WorkerReady)).incarnation == 1
        assert FakeEngine.last.args == {"enable_sleep_mode": True}

    assert play(scene, *ON_GPUS) == ["start", "start", "up"]


def test_a_version_that_is_there_after_its_turn_is_loaded_in_the_next(play):
    async def scene(world):
        mirrored = asyncio.Event()
        world.worker._mirrored = lambda edge: mirrored.wait()  # as a node's mirror fills
        world.tell(p.Wake)
        await world.told(p.WorkerReady)
        world.tell(p.LoadVersion, 5, "store")
        await settle()
        await world.answer(p.Sleep)
        mirrored.set()
        await settle()
        assert FakeEngine.log[-1] == "sleep", "its weights are not on the device"
        await world.answer(p.Wake)
        assert (await world.told(p.VersionLoaded)).version == 5

    assert play(scene, *ON_GPUS) == ["start", "up", "sleep", "weights", "load 5", "kv_cache"]


async def test_a_borrowed_rank_waits_for_no_shared_turn(make_config, monkeypatch, tmp_path):
    from rose.parts.lending.rank.worker import BorrowedWorker

    monkeypatch.setattr(rollout, "resolve", lambda model: tmp_path)
    worker = BorrowedWorker(make_config("colocate=true"), "borrowed-1", NullRecorder())
    worker._asked_to_leave.cancel()
    loaded, words = [], [p.LoadVersion(3, "store"), p.Shutdown("over")]

    async def receive():
        await settle()
        return 0, words.pop(0)

    async def load_version(version, *_):
        loaded.append(version)
        return SimpleNamespace(nbytes=1, route=[], mirrored=0, pause_s=0.0)

    worker.mailbox = SimpleNamespace(receive=receive, send=lambda *_: None)
    worker.engine = SimpleNamespace(version=-1, load_version=load_version)
    worker._tasks = Tasks()
    await asyncio.wait_for(worker._receive(), DEADLINE_S)
    assert loaded == [3]


def test_an_engine_whose_death_vllm_sees_first_is_asleep_all_the_same(play, monkeypatch):
    async def dies(engine):
        asyncio.get_running_loop().call_later(0.001, engine.die)
        raise RuntimeError("EngineCore encountered an issue")  # as vLLM's own client says it

    async def scene(world):
        await world.answer(p.Wake)
        monkeypatch.setattr(FakeEngine, "sleep", dies)
        monkeypatch.setattr(rollout, "DEATH_NOTICE_S", DEADLINE_S)
        changed = await world.answer(p.Sleep)
        assert not changed.awake and changed.moved_gib == 0.0

    play(scene)
