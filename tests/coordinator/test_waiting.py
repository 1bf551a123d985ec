"""Waits for states: what ends one."""

import asyncio

import pytest

from rose.coordinator.waiting import Changes

STEPS_OF_THE_LOOP = range(6)  # a change needs less to get from the event to the task that waits


@pytest.mark.parametrize("steps", STEPS_OF_THE_LOOP)
def test_a_cancellation_ends_a_wait_however_near_to_a_change_it_comes(steps):
    """`asyncio.wait_for` of Python 3.11 loses one that comes between a change and its being seen: a
    run that was told to stop took another step."""

    async def scene():
        changes = Changes(lambda what: None)
        waits = asyncio.create_task(changes.until(lambda: False, 30.0, lambda: "nothing"))
        await asyncio.sleep(0)
        changes.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits], timeout=25.0)
        return waits.cancelled()

    assert asyncio.run(scene())
