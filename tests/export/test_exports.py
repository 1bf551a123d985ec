"""Folders that a run writes beside its steps: by real processes, one at a time, and none that ends
the run or outlives it."""

import asyncio

import psutil
import pytest
from safetensors.torch import load_file

from rose import config as configuration
from rose.coordinator.exports import Exports
from tests import processes
from tests.transfer.worlds import same

DEADLINE_S = 240


@pytest.fixture
def exports(run, monkeypatch):
    """exports(export_every=2, ...) -> those of this run; what they told is in `.told`."""

    monkeypatch.setattr("rose.coordinator.exports.LOWEST", 0)  # other tests have the cores

    def make(**trainer) -> Exports:
        tree = configuration.to_dict(configuration.load(run.run / "config.json"))
        tree["trainer"] |= {"export_every": 1, "export_keep": 1, "step_timeout_s": DEADLINE_S}
        tree["trainer"] |= trainer
        told: list[tuple[str, str]] = []
        made = Exports(configuration.from_dict(tree), run.run, lambda *words: told.append(words))
        made.told = told
        return made

    return make


def left(run) -> set[str]:
    return {path.name for path in (run.run / "exports").iterdir()}


@pytest.mark.slow
async def test_a_step_is_written_and_the_newest_are_kept(run, exports):
    made = exports()
    made.offer(1, str(run.store))
    await made.finish()
    assert left(run) == {"step_1"}
    for step in (2, 3):  # the third is there before the second was begun
        made.offer(step, str(run.store))
    await made.finish()
    assert made.told == [("export left out", "step 2: step 3 was ready before it began")]
    assert left(run) == {"step_3"}
    written = load_file(run.run / "exports" / "step_3" / "model.safetensors")
    assert same(written, run.weights_of[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, within_s, why",
    [
        (9, DEADLINE_S, "step 9 can't be had; there are:"),
        (3, 0.05, "not written within 0.05 s (trainer.step_timeout_s)"),
    ],
)
async def test_what_fails_or_takes_too_long_is_told_and_ended(run, exports, step, within_s, why):
    made = exports(step_timeout_s=within_s)
    made.offer(step, str(run.store))
    while made._tasks:
        await asyncio.sleep(0.01)
    [(what, detail)] = made.told
    assert what == "export failed" and detail.startswith(f"step {step}: {why}")
    assert children() == [] and left(run) == set()


async def test_the_end_of_a_run_waits_for_one_deadline(run, exports):
    after = "not written 0.05 s (trainer.step_timeout_s) after the last step"
    expected = [("export failed", f"step {step}: {after}") for step in (2, 3)]
    made = exports(step_timeout_s=0.05)
    async with made._one_at_a_time:  # A hanging export holds this lock.
        made.offer(2, str(run.store))
        made.offer(3, str(run.store))
        await made.finish()
    assert sorted(made.told) == expected
    exports()  # removes links that were being made
    assert left(run) == set()


@pytest.mark.slow
async def test_a_users_folder_stays_and_a_lost_attempts_takes_no_place(run, exports):
    for name in ("step_1", "step_9", "step_1_good"):
        (run.run / "exports" / name).mkdir(parents=True)
    made = exports()
    made.resume(3, str(run.store))
    await made.finish()
    assert made.told == []
    assert left(run) == {"step_3", "step_9", "step_1_good"}


async def test_what_cannot_be_removed_is_told_and_costs_the_run_nothing(run, exports, monkeypatch):
    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    made = exports()
    monkeypatch.setattr("rose.coordinator.exports._remove", refuse)
    async with made._one_at_a_time:
        made.offer(2, str(run.store))
        made.offer(3, str(run.store))
        made._newest = 4
        await asyncio.sleep(0)
    await made.finish()
    assert sorted({what for what, _ in made.told}) == ["export left out", "export not removed"]
    assert any(".step_3.store" in detail for _, detail in made.told)


def children() -> list[psutil.Process]:
    """Of this process: what exports."""
    return [each for each in processes.children() if "rose.export" in processes.words(each)]


@pytest.mark.slow
async def test_the_end_of_a_run_ends_what_is_being_written(run, exports):
    made = exports()
    made.offer(3, str(run.store))
    while not children():
        await asyncio.sleep(0.01)
    await made.close()
    assert children() == [] and made.told == []
    assert "step_3" not in left(run)
    exports()  # the next attempt
    assert left(run) == set()


@pytest.fixture
def begun(monkeypatch):
    """The steps that would be written."""
    steps: list[int] = []

    async def note(self, step, store):
        steps.append(step)

    monkeypatch.setattr(Exports, "_export", note)
    return steps


async def test_only_the_steps_that_are_due_are_offered(run, exports, begun):
    made = exports(export_every=4, steps=10)
    for step in range(11):
        made.offer(step, str(run.store))
    await made.finish()
    never = exports(export_every=0, steps=10)
    never.offer(10, str(run.store))
    never.resume(4, str(run.store))
    await never.finish()
    assert begun == [4, 8, 10]


async def test_the_last_step_of_a_run_that_ends_early_is_written_once(run, exports, begun):
    for offered, stopped in ((4, 7), (4, 8), (8, 8)):
        made = exports(export_every=4, steps=10)
        made.offer(offered, str(run.store))
        made.stopped(stopped, str(run.store))
        await made.finish()
    assert begun == [4, 7, 4, 8, 8]


async def test_a_continued_run_writes_the_step_that_is_missing(run, exports, begun):
    made = exports()
    made.resume(3, str(run.store))
    (run.run / "exports" / "step_2").mkdir(parents=True)
    made.resume(2, str(run.store))
    made.resume(0, str(run.store))
    await made.finish()
    assert begun == [3]
