"""A method that blocks the event loop is named, and costs its trajectory."""

import asyncio
import os
import re
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from rose.agent import blocked, rank
from rose.agent.blocked import SIGNAL, Blocked, LoopWatch, called
from rose.agent.envs.base import Action, Step
from rose.agent.guard import EnvironmentFailure, Guard

LIMIT_S = 0.4
DEADLINE_S = 60.0


@pytest.fixture
def watched(monkeypatch):
    """watched(coroutine function) -> (its result, what was said): beside a `LoopWatch`, while
    another process sends the signal as the host's rank does. A thread would need the lock."""
    monkeypatch.setattr(blocked, "BEAT_S", 0.2)  # It speaks from LIMIT_S on.
    before = signal.getsignal(SIGNAL)
    ask = ["sh", "-c", f"read go; while kill -{int(SIGNAL)} {os.getpid()}; do sleep 0.1; done"]

    def run(scene):
        said = []
        # Started before the watch, since a start takes long on a busy machine.
        asking = subprocess.Popen(ask, stdin=subprocess.PIPE)

        async def beside():
            watch = asyncio.create_task(LoopWatch(lambda: None, said.append).run())
            await asyncio.sleep(0)
            asking.stdin.write(b"\n")
            asking.stdin.flush()
            try:
                return await scene()
            finally:
                asking.kill()
                asking.communicate()
                watch.cancel()

        return asyncio.run(beside()), said

    yield run
    signal.signal(SIGNAL, before)


def sleeps(*_):
    time.sleep(DEADLINE_S)


def searches():
    """Backtracks for longer than anybody waits; never leaves C, and keeps the interpreter lock."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def swallows():
    try:
        sleeps()
    except Exception:
        sleeps()


@pytest.mark.parametrize("blocks", [sleeps, searches, swallows])
def test_a_step_that_blocks_fails_its_trajectory_and_others_go_on(watched, blocks):
    class Slow:
        async def step(self, action):
            blocks()
            return Step("late")

    class Quick:
        async def step(self, action):
            await asyncio.sleep(0)
            return Step("well", done=True)

    async def scene():
        slow = asyncio.create_task(Guard(Slow(), "g0.0", LIMIT_S, "env").step(Action("")))
        await asyncio.sleep(0)
        quick = await Guard(Quick(), "g0.1", DEADLINE_S, "env").step(Action(""))
        with pytest.raises(EnvironmentFailure) as failure:
            await slow
        return quick, str(failure.value)

    began = time.monotonic()
    (quick, words), said = watched(scene)
    assert time.monotonic() - began < DEADLINE_S and quick.observation == "well"
    assert "g0.0: Slow.step blocked the event loop" in words and "asyncio.to_thread" in words
    [sentence] = said
    assert sentence.startswith("Slow.step has blocked the event loop")


@pytest.mark.parametrize("awaits", [True, False])
def test_a_task_of_a_method_that_blocks_is_named_and_ended(watched, awaits):
    class Polls:
        async def step(self, action):
            polling = asyncio.create_task(self.poll())
            await (polling if awaits else asyncio.sleep(0))
            return Step("well", done=True)

        async def poll(self):
            await asyncio.sleep(0)
            sleeps()

    async def scene():
        guard = Guard(Polls(), "g0.0", LIMIT_S, "env")
        if awaits:
            with pytest.raises(EnvironmentFailure, match=r"Polls\.step blocked the event loop"):
                await guard.step(Action(""))
        else:
            assert (await guard.step(Action(""))).observation == "well"

    began = time.monotonic()
    _, [sentence] = watched(scene)
    assert time.monotonic() - began < DEADLINE_S
    assert sentence.startswith("a task of Polls.step has blocked the event loop")


def test_a_constructor_and_a_property_that_block_are_named_too(watched):
    class Counts:
        stats = property(sleeps)

    async def scene():
        with pytest.raises(Blocked):
            called("slow's constructor", LIMIT_S, sleeps)
        with pytest.raises(EnvironmentFailure, match=r"Counts\.stats raised Blocked"):
            Guard(Counts(), "g0.0", LIMIT_S, "env").stats()

    _, said = watched(scene)
    assert [words.split(" has ")[0] for words in said] == ["slow's constructor"]


def test_what_is_not_an_environment_s_is_named_by_its_place_and_not_ended(watched):
    async def scene():
        time.sleep(2 * LIMIT_S)
        return "went on"

    went, [words] = watched(scene)
    assert went == "went on" and words.startswith("test_blocked.py:") and "(scene)" in words


class Asked:
    """A host's process as its rank sees it: beats stay away from the first on."""

    def __init__(self, answers, silent_s=0.0):
        self.silent_s, self.signals, self.answers = silent_s, [], answers

    def signal(self, number):
        self.signals.append(number)
        if number == self.answers:
            self.silent_s = 0.0


@pytest.fixture
def watching(make_config, monkeypatch):
    """watching(process, until) -> what it was sent."""
    short = {"WATCH_S": 0.001, "SILENT_S": 0.03, "ASK_S": 0.01, "END_SILENT_S": 0.05, "END_S": 0.02}
    for name, seconds in short.items():
        monkeypatch.setattr(rank, name, seconds)
    config = make_config("env.step_timeout_s=0.1")

    async def scene(process, until):
        made = rank.HostRank(config, "run", 1, SimpleNamespace(rank=1), SimpleNamespace())
        made._process = process
        watching = asyncio.create_task(made._watch())
        async with asyncio.timeout(DEADLINE_S):
            while not until(process):
                await asyncio.sleep(0)
        watching.cancel()
        return process.signals

    return lambda *args: asyncio.run(scene(*args))


def test_a_silent_process_is_asked_again_and_again_then_aborted_then_killed(watching):
    sent = watching(Asked(None), lambda process: signal.SIGKILL in process.signals)
    assert set(sent) == {SIGNAL, signal.SIGABRT, signal.SIGKILL}
    assert sent == sorted(sent, key=[SIGNAL, signal.SIGABRT, signal.SIGKILL].index)
    assert 5 < sent.count(SIGNAL) < 15


def test_one_that_goes_on_when_it_is_asked_lives_and_one_that_has_not_begun_is_left_alone(watching):
    sent = watching(Asked(SIGNAL), lambda process: len(process.signals) == 20)
    assert set(sent) == {SIGNAL}
    looks = iter(range(2000))
    assert watching(Asked(None, silent_s=None), lambda _: next(looks, None) is None) == []
