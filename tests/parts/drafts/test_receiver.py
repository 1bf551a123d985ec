"""The rank of an engine passes on what siblings got elsewhere."""

import asyncio

import msgspec

from rose import protocol as p
from rose.parts.drafts.receiver import HINTS
from tests.coordinator.test_shared_device_worker import FakeEngine, play  # noqa: F401


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
        for number in range(1, HINTS + 2):
            hint(world, number)
        while not world.inbox.empty():
            await asyncio.sleep(0.001)
        FakeEngine.last.learns.set()
        await calls(2)

    kept, ended = range(2, HINTS + 2), range(1, HINTS + 2)
    passed = ([span(0)], ["g0"]), ([span(i) for i in kept], [f"g{i}" for i in ended])
    expected = [("rose_learn_siblings", *call) for call in passed]
    assert play(scene, "rollout/draft=group")[2:] == expected
