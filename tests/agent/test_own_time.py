"""A trajectory's own time is bounded, and its waits for the model don't count."""

import asyncio

import pytest

from rose.agent.guard import EnvironmentFailure
from rose.agent.own_time import OwnTime

SHORT_S, LONG_S = 0.2, 60.0


async def test_what_goes_on_for_ever_ends_with_the_key_the_limit_and_what_was_made_by_then():
    with pytest.raises(EnvironmentFailure) as failure:
        async with OwnTime("g0.1", SHORT_S, "env.members.lake"):
            try:
                await asyncio.sleep(LONG_S)
            except BaseException as error:
                error.made, error.output = "a trajectory", "words"
                raise
    words = "g0.1: it took 0.2 s besides the model's turns (env.members.lake.trajectory_timeout_s)"
    assert words in str(failure.value)
    assert (failure.value.made, failure.value.output) == ("a trajectory", "words")


async def test_waits_for_turns_do_not_count_also_where_several_overlap():
    async def turn(own, seconds):
        with own.paused():
            await asyncio.sleep(seconds)

    async with OwnTime("g0.1", SHORT_S, "env") as own:
        await asyncio.gather(*(turn(own, SHORT_S * k) for k in (0.5, 1, 2)))
        # A trajectory that forks off another waits for it.
        found = await own.waiting(asyncio.sleep(2 * SHORT_S, "forked"))
    assert found == "forked"


async def test_time_before_a_turn_is_not_given_back_by_it():
    with pytest.raises(EnvironmentFailure):
        async with OwnTime("g0.1", SHORT_S, "env") as own:
            while True:
                await asyncio.sleep(SHORT_S / 10)
                with own.paused():
                    await asyncio.sleep(0)


async def test_errors_and_cancellations_pass_through_and_late_turns_are_no_error():
    async def within():
        async with OwnTime("g0.1", LONG_S, "env"):
            await asyncio.sleep(LONG_S)

    with pytest.raises(TimeoutError, match="of its own"):
        async with OwnTime("g0.1", LONG_S, "env"):
            raise TimeoutError("of its own")
    async with OwnTime("g0.1", LONG_S, "env") as own:
        late = own.paused()
        late.__enter__()
    late.__exit__(None, None, None)
    waits = asyncio.create_task(within())
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
