"""A borrowed worker on a real vLLM; only the way to the coordinator is a list."""

import asyncio
from functools import partial

import pytest

from rose import protocol as p
from rose.observe.recorder import NullRecorder
from rose.parts.lending.board import Epoch, Reader, Rollout, Writer
from tests import processes

pytestmark = pytest.mark.slow
DEADLINE_S = 240.0


def publish(store, folder):
    """Version 1: the folder's weights."""
    from transformers import AutoModelForCausalLM

    from tests.transfer.worlds import World

    model = AutoModelForCausalLM.from_pretrained(folder).float()
    world = World(store, {name: each.data.clone() for name, each in model.named_parameters()}, {})
    world.publish(1)
    return str(world.store)


def turn(name, tokens, new):
    sampling = p.Sampling(max_new_tokens=new, temperature=0.0)
    return p.GenerateTurn(name, 1, p.pack_tokens(range(2, tokens)), sampling)


class Coordinator:
    """A mailbox: `tell` sends to the worker, `said` is what it said."""

    def __init__(self):
        self.said, self.told = [], asyncio.Queue()
        self.tell = self.told.put_nowait

    def send(self, _, message):
        self.said.append(message)

    async def receive(self):
        return 0, await self.told.get()

    def silent_s(self):
        return 0.0

    async def until(self, condition):
        while not condition():  # DEADLINE_S is each test's
            await asyncio.sleep(0.01)

    def of(self, kind):
        return [m for m in self.said if isinstance(m, kind)]


async def start(config, path, *more):
    """(the worker with its engine, its coordinator, a function that writes the engine's board)"""
    from rose.parts.lending.rank.worker import BorrowedWorker

    worker = BorrowedWorker(config, "borrowed-1", NullRecorder(), path, *more)
    await worker.start_engine()
    worker.mailbox = coordinator = Coordinator()
    board = Writer(path, Rollout)

    def say(**fields):
        board.state = Rollout(worker.engine.pid, 0, 0, kv_total=2**20, **fields)
        board.write()

    return worker, coordinator, say


async def test_an_evicted_turn_and_what_the_engine_can_take_are_told(make_config, tmp_path):
    evicting = "{scheduler_cls: tests.engine.schedulers.EvictingScheduler}"
    config, versions = make_config(f"rollout.engine_args={evicting}"), []
    worker, coordinator, say = await start(config, tmp_path / "rollout", versions.append)
    say(open=1, kv_budget=2**20)
    running = asyncio.create_task(worker.run())
    capacities = partial(coordinator.of, p.WorkerCapacity)
    await coordinator.until(capacities)
    [ready] = coordinator.of(p.WorkerReady)
    whole = p.WorkerCapacity("borrowed-1", 1, ready.kv_tokens, ready.max_sequences, 0.0, False)
    assert coordinator.said.index(ready) < coordinator.said.index(whole)

    coordinator.tell(turn("evict.0.t0", 101, 200))
    ended = partial(coordinator.of, p.TurnFinished)
    await coordinator.until(lambda: coordinator.of(p.TurnReturned) or ended())
    [returned] = coordinator.of(p.TurnReturned)
    words = [*coordinator.of(p.TurnProgress), returned]
    assert sum(len(m.tokens) for m in words) == sum(len(m.logprobs) for m in words) == 4
    assert (returned.turn, returned.attempt, ended()) == ("evict.0.t0", 1, [])
    await coordinator.until(lambda: len(capacities()) >= 2)
    assert capacities()[1] == whole
    assert coordinator.said.index(returned) < len(coordinator.said) - 1

    say(open=1, kv_budget=2**19, frozen=1)
    await coordinator.until(lambda: len(capacities()) >= 3)
    tokens, sequences = ready.kv_tokens // 2, ready.max_sequences
    assert capacities()[2] == p.WorkerCapacity("borrowed-1", 1, tokens, sequences, -1.0, True)

    store = publish(tmp_path / "store", worker.folder)
    coordinator.tell(p.LoadVersion(1, store))
    await coordinator.until(lambda: coordinator.of(p.VersionLoaded) and versions == [1])
    coordinator.tell(p.Shutdown("done"))
    await running


def test_a_loaded_version_is_the_boards_epoch(make_config, tmp_path, monkeypatch):
    from rose.engine import plugin
    from rose.parts.lending.rank import member

    monkeypatch.setenv(plugin.FOLDER, str(tmp_path))
    path, on_version = member._boards()
    epoch = Reader(tmp_path / "epoch", Epoch)
    assert path == tmp_path / "rollout" and epoch.read().epoch == -1
    on_version(3)
    assert epoch.read().epoch == 3
    monkeypatch.delenv(plugin.FOLDER)
    assert member._boards()[0] is None


async def test_an_engine_of_which_nothing_is_lent_gives_its_memory_back_and_comes_again(
    make_config, tmp_path, monkeypatch
):
    from rose.parts.lending.rank import worker as workers
    from rose.parts.lending.rules.gate import Reason

    monkeypatch.setattr(workers, "INACTIVE_AFTER_S", 0.1)
    worker, coordinator, say = await start(make_config(), path := tmp_path / "rollout")
    of = coordinator.of
    say(open=1, kv_budget=2**20)
    running = asyncio.create_task(worker.run())
    await coordinator.until(lambda: of(p.WorkerCapacity))
    say(shut_by=float(Reason.STOPPED))
    await coordinator.until(lambda: not worker.engine.active)
    coordinator.tell(turn("a.0.t0", 30, 8))  # sent before the word that it takes nothing
    coordinator.tell(p.LoadVersion(1, "nowhere"))
    await coordinator.until(lambda: of(p.TurnReturned))
    say(open=1, kv_budget=2**20)
    await coordinator.until(lambda: len(of(p.WorkerReady)) >= 2)
    first, second = of(p.WorkerReady)
    assert second.incarnation == first.incarnation + 1 and second.version == -1
    assert not of(p.VersionFailed) and not of(p.WorkerDown)
    coordinator.tell(turn("a.0.t0", 30, 8))
    await coordinator.until(lambda: of(p.TurnFinished))
    # this test's, and one of each of the worker's two watches
    assert processes.opened(path) <= 3
    coordinator.tell(p.Shutdown("the end"))
    await running
