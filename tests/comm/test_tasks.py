"""A rank's tasks: none fails unseen, and a loop that stands still says where."""

import asyncio
import subprocess
import sys

import pytest

from rose.comm.tasks import Tasks

STANDS_STILL = """
import asyncio, os, time
from rose.comm import tasks
tasks._HUNG_S = 0.2

async def inside_a_call_that_does_not_return():
    while not os.fstat(2).st_size:  # until the stacks are written
        time.sleep(0.01)

async def main():
    await tasks.Tasks().run_until(inside_a_call_that_does_not_return())

asyncio.run(main())
"""


def test_a_loop_that_stands_still_writes_where(tmp_path):
    with (tmp_path / "said").open("w") as said:
        subprocess.run([sys.executable, "-c", STANDS_STILL], stderr=said, timeout=120, check=True)
    assert "in inside_a_call_that_does_not_return" in (tmp_path / "said").read_text()


async def test_the_first_task_that_raises_ends_all():
    async def fails():
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        tasks = Tasks()
        try:
            await tasks.run_until(asyncio.Event().wait(), fails())
        finally:
            await tasks.close(1.0)
