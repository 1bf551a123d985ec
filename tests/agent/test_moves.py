"""A host releases a trajectory once all is saved; the next one asks for the same turn and tokens."""

import asyncio
import threading

import pytest

from rose import protocol as p
from rose.agent.moves import Moves
from rose.agent.snapshots import Snapshots
from tests.agent.hosted import DEADLINE_S, Hosted
from tests.agent.wander import START, WORDS, Wander, wandering
from tests.made import result


class Host(Hosted):
    def __init__(self, config, chat, folder, rank=1):
        saved = lambda snapshot: self.host.saved(snapshot)  # noqa: E731
        snapshots = Snapshots(folder, 1, config, lambda _: None, saved)
        self.moves = Moves(rank, lambda message: self.words.put_nowait(message))
        super().__init__(config, chat, snapshots, self.moves)

    async def begun(self):
        """Answer the first turn; the trajectory waits for the second one then."""
        self.handle(START)
        self.answer(await self.next(p.TurnRequest))
        return await self.next(p.TurnRequest)

    def answer(self, request):
        self.handle(result(request.turn, WORDS))


async def all_tasks():
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


@pytest.fixture
def config(make_config):
    return wandering(make_config("env.max_turns=8"), 3)


async def test_it_leaves_before_the_turn_that_it_waits_for_and_goes_on(config, chats, tmp_path):
    old, new = (Host(config, chats["tiny"], tmp_path, rank) for rank in (1, 2))
    old.handle(START)
    old.handle(p.ReleaseTrajectory(START.id))
    old.answer(await old.next(p.TurnRequest))  # nothing is saved before the first turn
    asked = await old.next(p.TurnRequest)
    saved = await old.next(p.TrajectorySaved)
    assert (saved.rank, saved.id, saved.turns) == (1, START.id, 1) and saved.commands_s > 0
    assert await old.next(p.TrajectoryReleased) == p.TrajectoryReleased(1, START.id)
    assert old.words.empty(), "its last word"
    new.handle(START)
    again = await new.next(p.TurnRequest)
    assert (again.turn, again.tokens) == (asked.turn, asked.tokens)
    for _ in range(2):
        new.answer(again)
        again = await new.next(p.TurnRequest, p.TrajectoryFinished)
    assert again.trajectory.turns == 3
    old.handle(p.ReleaseTrajectory(START.id))
    assert old.words.empty(), "it is gone"


async def test_it_stays_while_others_could_not_read_it(config, chats, tmp_path, monkeypatch):
    stored = asyncio.Event()

    async def settled(env):
        await stored.wait()
        return True

    monkeypatch.setattr(Wander, "settled", settled, raising=False)
    host = Host(config, chats["tiny"], tmp_path)
    await host.begun()
    host.handle(p.ReleaseTrajectory(START.id))
    while not (tmp_path / START.id / "a001-t0001").exists():
        await asyncio.sleep(0.01)
    for _ in range(10):
        await asyncio.sleep(0)
    assert host.words.empty()
    stored.set()
    await host.next(p.TrajectoryReleased)


async def test_no_snapshot_of_a_cancelled_trajectory_is_left(config, chats, tmp_path, monkeypatch):
    """Though one is written after the coordinator has removed its folder."""
    begins, goes_on, write = threading.Event(), threading.Event(), Snapshots._write

    def late(self, snapshot):
        begins.set()
        assert goes_on.wait(DEADLINE_S)
        write(self, snapshot)
        assert (tmp_path / START.id).exists()

    monkeypatch.setattr(Snapshots, "_write", late)
    host = Host(config, chats["tiny"], tmp_path)
    await host.begun()
    assert await asyncio.to_thread(begins.wait, DEADLINE_S)
    host.handle(p.CancelTrajectory(START.id))
    goes_on.set()
    await all_tasks()
    assert not (tmp_path / START.id).exists()


async def test_one_that_is_cancelled_as_it_may_leave_is_released_by_nobody(config, chats, tmp_path):
    host = Host(config, chats["tiny"], tmp_path)
    await host.begun()
    await host.next(p.TrajectorySaved)
    host.moves.request_move(START.id)
    host.handle(p.CancelTrajectory(START.id))
    host.host._release(START.id)
    await all_tasks()
    assert host.words.empty()


async def test_the_load_is_the_machines_tasks_on_all_of_its_cores(monkeypatch):
    monkeypatch.setattr("rose.agent.moves.LOAD_SAMPLE_S", 0.01)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})  # the host's share
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    said = asyncio.Queue()
    telling = asyncio.create_task(Moves(3, said.put_nowait).report_load())
    load = await asyncio.wait_for(said.get(), DEADLINE_S)
    telling.cancel()
    assert (load.rank, load.running) == (3, 0)
    assert load.cores == 64 and load.cpu >= 0 and 0 < load.memory <= 1
