"""Siblings' turns reach the engines that draft from them."""

import asyncio
import time

import msgspec

from rose import protocol as p
from rose.parts.drafts.siblings import CONTEXT_BYTES, LEAST_BYTES, MOST_BYTES, MOST_MESSAGES, Sender
from rose.scheduler import events as ev
from tests.coordinator import conftest
from tests.coordinator import test_shared_device_worker as rank

FakeEngine, play = rank.FakeEngine, rank.play


def request(turn: str) -> p.TurnRequest:
    trajectory, group = turn.rpartition(".")[0], turn.partition(".")[0]
    tokens, sampling = p.pack_tokens(range(40)), p.Sampling(max_new_tokens=4096)
    return p.TurnRequest(turn, trajectory, group, p.Phase.TRAIN, tokens, sampling)


def content(message: p.DraftText) -> tuple[list, list[str]]:
    """The spans and the groups that ended."""
    return msgspec.msgpack.decode(message.content)


class World:
    def __init__(self) -> None:
        self.sent: list[tuple[list, list[str]]] = []
        self.sender = Sender(None, lambda rank, message: self.sent.append(content(message)))

    def got(self, turn: str, worker: str, count: int) -> None:
        self.sender.add_tokens(request(turn), worker, p.pack_tokens([7] * count))

    def flushed(self, worker: str = "b", groups=("g0",)) -> list[tuple[str, int, int]]:
        """(turn, start, tokens) of what it was sent."""
        self.sent.clear()
        self.sender.flush(worker, 1, groups)
        return [(t, at, len(new) // 4) for spans, _ in self.sent for t, at, _, new in spans]


def test_an_engine_gets_what_its_groups_turns_got_elsewhere_once():
    world = World()
    world.got("g0.0.t0", "a", 20)
    world.got("g1.0.t0", "a", 20)
    assert world.flushed(groups=[]) == []
    assert world.flushed() == [("g0.0.t0", 0, 20)]
    assert len(world.sent[0][0][0][2]) == CONTEXT_BYTES
    assert world.flushed() == [] and world.sent == []
    world.got("g0.0.t0", "a", 16)
    assert world.flushed() == [("g0.0.t0", 20, 16)]
    assert world.flushed("a") == []  # the worker that generated them


def test_few_tokens_of_an_open_turn_wait_for_more_and_its_end():
    world = World()
    world.got("g0.0.t0", "a", LEAST_BYTES // 4 - 1)
    assert world.flushed() == []
    world.sender.turn_ended("g0.0.t0")
    assert world.flushed() == [("g0.0.t0", 0, LEAST_BYTES // 4 - 1)]
    assert world.flushed() == []
    world.sender.forget_worker("b")  # It has started again.
    assert world.flushed() == [("g0.0.t0", 0, LEAST_BYTES // 4 - 1)]


def test_a_turn_that_moved_is_known_to_the_engine_that_goes_on_with_it():
    world = World()
    world.got("g0.0.t0", "a", 20)
    world.got("g0.0.t0", "b", 20)
    assert world.flushed("b") == []
    assert world.flushed("a") == [("g0.0.t0", 20, 20)]
    # A message is bounded and the rest follows.
    world.got("g0.1.t0", "a", MOST_BYTES // 4 + 100)
    assert world.flushed() == [("g0.1.t0", 0, MOST_BYTES // 4)]
    assert world.flushed() == [("g0.1.t0", MOST_BYTES // 4, 100)]


def test_a_group_that_ended_is_forgotten_here_and_there():
    world = World()
    world.got("g0.0.t0", "a", 20)
    world.flushed()
    world.sender.group_ended("g0")
    assert world.flushed() == [] and world.sent[0][1] == ["g0"]
    assert world.flushed() == [] and world.sent == []
    kept = world.sender._groups, *world.sender._have.values(), *world.sender._new.values()
    assert not any(kept)


def test_an_engine_gets_what_the_siblings_of_its_turns_got_on_others(tmp_path):
    """A new member of a group starts on the other engine with what the first has got."""
    world = conftest.World(tmp_path)
    world.hub.listener = Sender(world.hub, lambda *sent: world.sent.append(sent))
    world.hub.weights.publish(0, "v0/manifest.json")
    world.ready("rollout-0", sequences=1)
    world.ready("rollout-1", sequences=1)
    world.request(new=30)
    world.request("g0.1.t0", new=30)
    [(first, asked), _] = world.taken(p.GenerateTurn)
    world.progress(list(range(20)), turn=asked.turn, rank=first)
    other = {10: 11, 11: 10}[first]
    world.hub.feed(ev.Tick(at=time.time()))
    [(rank, message)] = world.taken(p.DraftText)
    span = [asked.turn, 0, p.pack_tokens([1, 2, 3]), p.pack_tokens(range(20))]
    assert rank == other and content(message) == [[span], []]
    world.finish(list(range(20, 25)), turn=asked.turn, rank=first)  # few, but the turn has ended
    world.hub.feed(ev.Tick(at=time.time()))
    [(rank, message)] = world.taken(p.DraftText)
    span = [asked.turn, 20, span[2], p.pack_tokens(range(20, 25))]
    assert rank == other and content(message) == [[span], []]
    world.hub.group_ended("g0")
    world.hub.feed(ev.Tick(at=time.time()))
    ended = [(rank, content(m)) for rank, m in world.taken(p.DraftText)]
    assert sorted(ended) == [(10, [[], ["g0"]]), (11, [[], ["g0"]])]
    world.journal.close()


def test_an_engine_learns_from_siblings_in_one_call_at_a_time(play):
    def span(number):
        return (f"t{number}", 0, b"before", b"new")

    def hint(world, number):
        content = msgspec.msgpack.encode(([span(number)], [f"g{number}"]))
        world.inbox.put_nowait(p.DraftText(content))

    async def calls(count):
        while len(FakeEngine.log) < 2 + count:
            await asyncio.sleep(0.001)

    async def scene(world):
        world.tell(p.Wake)
        await world.told(p.DeviceChanged)
        hint(world, 0)
        await calls(1)
        for number in range(1, MOST_MESSAGES + 2):
            hint(world, number)
        while not world.inbox.empty():
            await asyncio.sleep(0.001)
        FakeEngine.last.learns.set()
        await calls(2)

    kept, ended = range(2, MOST_MESSAGES + 2), range(1, MOST_MESSAGES + 2)
    passed = ([span(0)], ["g0"]), ([span(i) for i in kept], [f"g{i}" for i in ended])
    expected = [("rose_learn_siblings", *call) for call in passed]
    assert play(scene, "rollout/draft=group")[2:] == expected


def test_an_engine_that_drafts_otherwise_needs_no_siblings(play):
    """A rank of `rose serve` may have a method of its own in a run with rollout/draft=group."""

    async def scene(world):
        world.tell(p.Wake)
        await world.told(p.DeviceChanged)
        world.inbox.put_nowait(p.DraftText(msgspec.msgpack.encode(([], ["g0"]))))
        world.tell(p.Sleep)
        await world.told(p.DeviceChanged, 2)

    assert not [call for call in play(scene) if call[0] == "rose_learn_siblings"]
