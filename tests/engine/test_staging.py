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
        self.answers, self.asked, self._took_s, self.killed = list(answers), [], {}, 0

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
NO_ANSWER = EngineError("no answer")
ERRORS = [TransferError("damaged"), EngineError("late"), asyncio.CancelledError("ended")]


async def breaks_off(engine, error):
    with pytest.raises(type(error), match=str(error)):
        async with engine._session(5.0):
            raise error


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("answers", [(STAGING, STAGING, FAILED), (NO_ANSWER, STAGING, STAGED)])
async def test_whatever_breaks_a_load_off_the_next_one_waits_for_the_workers(error, answers):
    """An engine that does not answer is asked again, and the first error is told."""
    engine = Engine(*answers)
    await breaks_off(engine, error)
    assert engine.asked == ["rose_abandon"]
    for _ in range(2):  # A load that ended well asks for nothing.
        async with engine._session(5.0):
            assert engine.asked == ["rose_abandon"] * 3, "it began while the last was being staged"


async def test_workers_that_go_on_for_too_long_are_named_and_a_late_mixture_ends_the_engine():
    engine = Engine(CHECKING, CHECKING, FAILED | {"mixture": True})
    await breaks_off(engine, asyncio.CancelledError("ended"))
    with pytest.raises(EngineError, match="process 4242 is busy for over 0 s with a version"):
        await engine._end_session(0.0)
    with pytest.raises(EngineDied, match="its weights were a mixture: Corrupted: block 7"):
        await engine._end_session(5.0)
    assert engine.killed == 1


@pytest.mark.parametrize("answer", [*ERRORS, FAILED])
async def test_an_engine_of_which_nobody_knows_which_weights_it_has_is_ended(answer):
    """A flip that was taken back ends nothing."""
    engine = Engine(answer)
    with pytest.raises(TransferError if answer is FAILED else type(answer)):
        await engine._flip_staged(5.0)
    assert engine.killed == (answer is not FAILED)


class Worker:
    """Stages by a clock that only sleeping moves: `took_s` a version."""

    def __init__(self, monkeypatch):
        self.now, self.took_s = 0.0, 0.0
        monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(staging.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds):
        self.now += seconds

    def wait(self, engine, state, done, figure):
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


STATES = [("staging", "staged", "stage_s"), ("checking", "loaded", "check_s")]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("before_s", [0.01, 40.0])
@pytest.mark.parametrize("took_s", [0.004, 0.2, 4.0, 40.0])
def test_few_questions_are_asked_and_the_end_is_noticed_soon(monkeypatch, before_s, took_s, state):
    worker, engine = Worker(monkeypatch), Engine(STAGED)
    worker.took_s = before_s
    worker.wait(engine, *state)
    worker.took_s = took_s
    soon = 1.5 * took_s + staging.SHORTEST_POLL_S
    seconds, _ = worker.wait(engine, *state)
    assert seconds <= max(soon, staging.LONGEST_FIRST_POLL_S * (before_s > took_s))
    for _ in range(5):
        seconds, asked = worker.wait(engine, *state)
        assert seconds <= 1.25 * took_s and asked <= 20
