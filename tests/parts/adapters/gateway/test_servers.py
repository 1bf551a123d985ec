"""The servers of a host's agents: one can't be started, or its answer can't be read."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from rose.parts.adapters.gateway import players
from rose.parts.adapters.gateway.forks import Forks
from rose.parts.adapters.gateway.program import environment

PLAYS = """
import sys, time
for text in sys.argv[1:]:
    sys.stdin.readline()
    print(text.replace("|", chr(10)), end="", flush=True)
time.sleep(600 * text.startswith("long"))
"""
FAILS_ONCE = """
import os

fork = os.fork

def fails():
    os.fork = fork
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = fails
"""


async def test_a_fork_that_fails_ends_its_own_program_alone(tmp_path):
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    (tmp_path / "agent.py").write_text("import fails_once\ndef solve(task): pass\n")
    (tmp_path / "task.json").write_text("{}")
    forks, function = Forks(), f"{tmp_path}/agent.py:solve"
    variables = environment({"ROSE_TASK": str(tmp_path / "task.json"), "ROSE_SEED": "1"}, ())
    try:
        with pytest.raises(OSError, match="no process can be forked: .*temporarily unavailable"):
            await forks.start("a", function, (), (), variables, tmp_path / "a")
        started = await forks.start("b", function, (), (), variables, tmp_path / "b")
        assert await started.code == 0, started.last_words()
    finally:
        await forks.close()


@pytest.mark.parametrize("answers", [["{"], ["long" * 1000]])
async def test_a_player_whose_first_line_can_not_be_read_is_not_started(monkeypatch, answers):
    monkeypatch.setattr(players, "LINE", 1000)
    with pytest.raises(OSError, match="its answer can't be read"):
        await players.Players().start(verifiers(*answers), {"name": "a"}, print)


@pytest.mark.parametrize("answer", ['{"name": "a"', "long" * 1000])
async def test_an_answer_that_can_not_be_read_fails_the_episodes_that_wait(monkeypatch, answer):
    monkeypatch.setattr(players, "LINE", 1000)
    host = players.Players()
    playing = await host.start(verifiers("{}|", answer), {"name": "a"}, print)
    assert await asyncio.wait_for(playing.code, 120) == 1
    assert "can't be read" in playing.last_words()
    await host.close()


def verifiers(*answers):
    """Settings of a player that answers each line with the next of these texts."""
    command = [sys.executable, "-c", PLAYS, *answers]
    return SimpleNamespace(command=command, settings="{}", environment=(), tasks={})
