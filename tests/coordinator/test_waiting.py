"""Waits for states: what ends one."""

import asyncio
from types import SimpleNamespace

import pytest

from rose.coordinator import waiting
from rose.coordinator.waiting import Changes, RunFailed

STEPS_OF_THE_LOOP = range(6)  # a change needs less to get from the event to the task that waits
SILENT = "no token and no trajectory for {} s"


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
    """The process is suspended from 110 s to 5000 s; that time does not count as silence."""
    monkeypatch.setattr(waiting, "POLL_S", 0.001)
    times, now = iter([0, *range(0, 115, 5), *range(5000, 5110, 5)]), [0]

    def monotonic():
        now[0] = next(times)
        return now[0]

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=monotonic))
    shown, said = [], []
    with pytest.raises(RunFailed, match=r"for 105 s while 64 run; in their .*: g0\.1"):
        changes = Changes(shown.append)
        names = "; in their environments (lake): g0.1"
        await changes.while_progressing(
            lambda: False, lambda: now[0] >= 75, 100.0, lambda: f"64 run{names}", said.append
        )
    assert [words.split(" while")[0] for words in said] == [SILENT.format(65)] * 2
    assert shown.count("") == 2 and shown[0].startswith(f"progress: {SILENT.format(35)} while 64")
