"""Waits for states: what ends one."""

import asyncio

import pytest

from rose.coordinator import waiting
from rose.coordinator.waiting import Changes, RunFailed

STEPS_OF_THE_LOOP = range(6)  # a change needs less to get from the event to the task that waits


@pytest.mark.parametrize("steps", STEPS_OF_THE_LOOP)
async def test_a_cancellation_ends_a_wait_however_near_to_a_change_it_comes(steps):
    """`asyncio.wait_for` of Python 3.11 loses one that comes between a change and its being seen: a
    run that was told to stop took another step."""
    changes = Changes(lambda what: None)
    waits = asyncio.create_task(changes.until(lambda: False, 30.0, lambda: "nothing"))
    await asyncio.sleep(0)
    changes.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    waits.cancel()
    await asyncio.wait([waits], timeout=25.0)
    found = waits.cancelled()
    assert found


async def test_a_silence_is_shown_and_said_once_before_it_ends_the_run(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_S", 0.001)
    seconds = iter([1, 29, 31, 45, 61, 70, 5, 6, 40, 62, 99, 101])
    shown, said = [], []
    with pytest.raises(RunFailed, match=r"for 101 s while 64 run; in their .*: g0\.1"):
        changes = Changes(shown.append)
        names = "; in their environments (lake): g0.1"
        await changes.while_progressing(
            lambda: False, lambda: next(seconds), 100.0, lambda: f"64 run{names}", said.append
        )
    expected = ["no token and no trajectory for 61 s", "no token and no trajectory for 62 s"]
    assert [words.split(" while")[0] for words in said] == expected
    assert shown.count("") == 1 and "progress: no token and no trajectory for 31 s" in shown[0]
