"""How an engine follows its workers from one version to the next, with workers that only say their
state."""

import asyncio
from types import SimpleNamespace

import pytest

from rose.engine import staging
from rose.engine.start import EngineDied, EngineError
from rose.transfer import TransferError


class Engine(staging.Staging):
    """`answers`: of its one worker to each question in turn, the last one for good; an exception is
    raised."""

    pid = 4242

    def __init__(self, *answers):
        self.answers, self.asked, self._took_s = list(answers), [], {}
        self.killed = 0

    def kill(self):
        self.killed += 1

    async def _worker(self, method, timeout_s, *args):
        self.asked.append(method)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return [answer]


STAGING, STAGED, CHECKING = ({"state": s} for s in ("staging", "staged", "checking"))
FAILED = {"state": "failed", "error": "Corrupted: block 7", "mixture": False}


async def breaks_off(engine, error):
    async with engine._session(5.0):
        raise error


@pytest.mark.parametrize(
    "error", [TransferError("damaged"), EngineError("too late"), asyncio.CancelledError()]
)
async def test_whatever_breaks_a_load_off_the_next_one_waits_for_the_workers(error):
    engine = Engine(STAGING, STAGING, FAILED)
    with pytest.raises(type(error)):
        await breaks_off(engine, error)
    assert engine.asked == ["rose_abandon"]
    async with engine._session(5.0):
        assert engine.asked == ["rose_abandon"] * 3, (
            "the next version began while the last was being staged"
        )
    async with engine._session(5.0):
        pass
    assert engine.asked == ["rose_abandon"] * 3, "a load that ended well asks for nothing"


async def test_an_engine_that_does_not_answer_is_asked_before_the_next_load_and_the_first_error_is_told():
    engine = Engine(EngineError("no answer"), STAGED)
    with pytest.raises(EngineError, match="too late"):
        await breaks_off(engine, EngineError("too late"))
    async with engine._session(5.0):
        assert engine.asked == ["rose_abandon"] * 2


async def test_workers_that_go_on_for_too_long_are_named():
    engine = Engine(CHECKING)
    with pytest.raises(TransferError):
        await breaks_off(engine, TransferError("damaged"))
    with pytest.raises(EngineError, match="process 4242 is busy for over 0 s with a version"):
        await engine._end_session(0.0)


async def test_a_mixture_that_shows_after_the_load_was_cancelled_ends_the_engine_too():
    engine = Engine(CHECKING, FAILED | {"mixture": True})
    with pytest.raises(asyncio.CancelledError):
        await breaks_off(engine, asyncio.CancelledError())
    with pytest.raises(EngineDied, match="its weights were a mixture: Corrupted: block 7"):
        await engine._end_session(5.0)
    assert engine.killed == 1


@pytest.mark.parametrize(
    "error", [EngineError("no answer"), TransferError("?"), asyncio.CancelledError()]
)
def test_an_engine_of_which_nobody_knows_which_weights_it_has_is_ended(error):
    engine = Engine(error)
    with pytest.raises(type(error)):
        asyncio.run(engine._flip_staged(5.0))
    assert engine.killed == 1


def test_a_flip_that_was_taken_back_ends_nothing():
    engine = Engine(FAILED)
    with pytest.raises(TransferError, match="block 7"):
        asyncio.run(engine._flip_staged(5.0))
    assert engine.killed == 0


class Worker:
    """Stages by a clock that only sleeping moves: `took_s` a version."""

    def __init__(self, monkeypatch):
        self.now, self.took_s = 0.0, 0.0
        monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(staging.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds):
        self.now += seconds

    def wait(self, engine, state="staging", done="staged", figure="stage_s"):
        """(seconds until the engine knows of the end, questions)."""
        began, asked = self.now, 0

        async def answer(method, timeout_s):
            nonlocal asked
            asked += 1
            over = self.now - began >= self.took_s
            return [{"state": done if over else state, figure: self.took_s}]

        engine._worker = answer
        asyncio.run(engine._wait_while(state, 600.0))
        return self.now - began, asked


def test_a_version_that_is_staged_fast_is_noticed_fast_also_after_a_slow_one(monkeypatch):
    worker, engine = Worker(monkeypatch), Engine(STAGED)
    worker.took_s = 40.0
    worker.wait(engine)
    worker.took_s = 0.2
    assert worker.wait(engine)[0] <= staging.LONGEST_FIRST_POLL_S
    for _ in range(3):
        assert worker.wait(engine)[0] <= 1.25 * 0.2


@pytest.mark.parametrize(
    "state", [("staging", "staged", "stage_s"), ("checking", "loaded", "check_s")]
)
@pytest.mark.parametrize("took_s", [0.004, 0.2, 4.0, 40.0])
def test_few_questions_are_asked_and_the_end_is_noticed_soon(monkeypatch, took_s, state):
    worker, engine = Worker(monkeypatch), Engine(STAGED)
    worker.took_s = 0.01
    worker.wait(engine, *state)
    worker.took_s = took_s
    assert worker.wait(engine, *state)[0] <= 1.5 * took_s + staging.SHORTEST_POLL_S
    for _ in range(5):
        seconds, asked = worker.wait(engine, *state)
        assert seconds <= 1.25 * took_s and asked <= 20
