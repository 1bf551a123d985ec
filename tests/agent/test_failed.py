"""A host keeps a trajectory that fails for people to look at, with its task."""

import asyncio
import time

import msgspec
import pytest

from rose import protocol as p
from rose.agent.envs import _workers
from rose.agent.own_time import OwnTime
from rose.comm import wire
from rose.observe import failed
from rose.parts.report.trajectories import read_failed
from tests.agent.hosted import DEADLINE_S, Hosted
from tests.agent.wander import START, WORDS, Wander, wandering
from tests.made import result


@pytest.fixture
def ended(make_config, chats, tmp_path):
    """ended(**env's keys) -> the last message of a trajectory whose turns are `WORDS`."""
    made = make_config("env.max_turns=8")

    def end(**changed):
        config = wandering(made, 2, **changed)

        async def scene():
            hosted = Hosted(config, chats["tiny"], failed=failed.Keeper(tmp_path))
            *_, last = await hosted.play(START, lambda request: result(request.turn, WORDS))
            await hosted.host.close()
            return last

        return asyncio.run(scene())

    return end


def test_one_that_ends_well_bears_the_name_of_its_task(ended, monkeypatch, tmp_path):
    monkeypatch.setattr(Wander, "task_name", lambda _, seed: f"walk {seed}", raising=False)
    assert ended().trajectory.task == "walk 7"
    assert read_failed(tmp_path) == ([], [])


@pytest.mark.parametrize("name", [lambda *_: 1 / 0, lambda *_: "\ud800" * 10_000, "no method"])
def test_a_task_name_that_fails_costs_nothing(ended, monkeypatch, name):
    monkeypatch.setattr(Wander, "task_name", name, raising=False)
    message = ended()
    assert len(message.trajectory.task) <= 6 * 200
    msgspec.msgpack.encode(message)


def test_waits_for_a_worker_process_are_no_time_of_the_trajectory(ended, monkeypatch):
    step, paused, pauses = Wander.step, OwnTime.paused, []

    async def calls(self, action):
        assert await _workers.call("json:dumps", obj=1) == "1"
        return await step(self, action)

    monkeypatch.setattr(OwnTime, "paused", lambda self: pauses.append(1) or paused(self))
    monkeypatch.setattr(Wander, "step", calls)
    assert ended().trajectory.turns == 2
    assert len(pauses) == 4  # two turns of the model, and two calls


async def breaks(*_):
    raise RuntimeError("the lake is dry")


def test_one_that_fails_is_kept_with_its_task_and_what_was_said(ended, monkeypatch, tmp_path):
    monkeypatch.setattr(Wander, "task_name", lambda _, seed: f"walk {seed}", raising=False)
    monkeypatch.setattr(Wander, "step", breaks)
    message = ended()
    assert isinstance(message, p.TrajectoryFailed) and "(walk 7)" in message.error
    [kept], damaged = read_failed(tmp_path)
    assert not damaged and kept.id == START.id and kept.record["task"] == "walk 7"
    assert "the lake is dry" in kept.record["cause"] and kept.record["turns"] == 1
    assert [list(part.tokens) for part in kept.samples[0].parts() if part.made] == [WORDS]
    assert time.time() - kept.record["time"] < DEADLINE_S


def test_one_that_is_too_large_for_a_message_fails_alone_and_is_kept(ended, monkeypatch, tmp_path):
    encode = wire.encode

    def narrow(message):
        with monkeypatch.context() as limited:
            if isinstance(message, p.TrajectoryFinished):
                limited.setattr(wire, "MAX_MESSAGE_BYTES", 100)
            return encode(message)

    monkeypatch.setattr(wire, "encode", narrow)
    message = ended()
    assert isinstance(message, p.TrajectoryFailed)
    assert "TrajectoryFinished has" in message.error and "lower env.max_turns=8" in message.error
    [kept], _ = read_failed(tmp_path)
    assert kept.record["turns"] == 2


def test_one_whose_time_is_up_is_kept_as_far_as_it_came(ended, monkeypatch, tmp_path):
    async def hangs(*_):
        await asyncio.sleep(2 * DEADLINE_S)

    monkeypatch.setattr(Wander, "step", hangs)
    message = ended(trajectory_timeout_s=5.0)
    assert isinstance(message, p.TrajectoryFailed) and "trajectory_timeout_s" in message.error
    [kept], _ = read_failed(tmp_path)
    assert kept.record["turns"] == 1 and kept.made == len(WORDS)
