"""Which Slurm jobs the coordinator asks for while rewards wait, and which it gives back."""

import asyncio
from types import SimpleNamespace

import pytest

from rose.coordinator import provisioner
from rose.launch import lent
from rose.parts.rewards import reward_jobs
from rose.protocol import RewardDemand
from rose.scheduler import events as ev


@pytest.fixture
def now(monkeypatch):
    clock = SimpleNamespace(at=1000.0, monotonic=lambda: clock.at)
    monkeypatch.setattr(reward_jobs, "time", clock)
    return clock


@pytest.fixture
def begin(make_config, tmp_path, now):
    """An attempt of the run."""

    def begun():
        settings = ("cluster=dev", "reward=function", "reward.args.path=mine.py:score")
        config = make_config(*settings, "reward.max_jobs=3", "cluster.slurm.reward.cpus_per_task=2")
        made = reward_jobs.RewardJobs(config, tmp_path, print, print)
        made.asked = []
        made._do = made.asked.append
        return made

    return begun


@pytest.fixture
def jobs(begin):
    return begin()


def waits(count, waited_s=6.0, joined=0, pool=0):
    return RewardDemand(pool, count, waited_s, joined)


def ask(*names):
    return [ev.RequestCapacity(name) for name in names]


def test_a_long_queue_asks_for_as_many_as_it_has_answers_and_max_jobs_allows(jobs):
    jobs.demand(waits(3, waited_s=4.9))
    assert jobs.asked == []
    jobs.demand(waits(3))
    jobs.demand(waits(3))  # two are on their way
    assert jobs.asked == ask("reward-0-1", "reward-0-2")
    jobs.feed(ev.CapacityGranted(at=0.0, request="reward-0-1"))
    jobs.demand(waits(3, joined=2))  # one computes, one is on its way
    assert jobs.running == 1 and jobs.asked[2:] == ask("reward-0-3")
    jobs.demand(waits(50, joined=2))
    jobs.demand(waits(50, pool=1))
    assert len(jobs.asked) == 3  # reward.max_jobs is of the run


def test_one_that_ended_is_replaced_and_after_a_refusal_the_next_waits_longer_each_time(jobs, now):
    jobs.demand(waits(1))
    jobs.feed(ev.CapacityGranted(at=0.0, request="reward-0-1"))
    jobs.feed(ev.CapacityEnded(at=0.0, request="reward-0-1"))
    jobs.demand(waits(1))
    assert jobs.asked == ask("reward-0-1", "reward-0-2")  # no name twice: the first may queue still
    jobs.feed(ev.CapacityEnded(at=0.0, request="reward-0-2"))
    for wait_s in (60, 120):
        jobs.asked.clear()
        jobs.demand(waits(6))
        assert len(jobs.asked) == 3
        for action in list(jobs.asked):  # refusals of what was asked for at once count once
            jobs.feed(ev.CapacityRefused(at=0.0, request=action.request, reason="full"))
        now.at += wait_s - 1
        jobs.demand(waits(6))
        assert len(jobs.asked) == 3
        now.at += 2
    jobs.demand(waits(6))
    assert len(jobs.asked) == 6


def test_what_still_queues_when_nothing_waits_is_given_back_and_what_runs_ends_by_itself(jobs, now):
    jobs.feed(ev.CapacityQueued(at=0.0, request="reward-0-7"))  # an earlier attempt's
    jobs.demand(waits(4))
    assert jobs.asked == ask("reward-0-1")
    jobs.feed(ev.CapacityGranted(at=0.0, request="reward-0-1"))
    jobs.demand(waits(0))
    jobs.tick()
    now.at += 31  # reward.idle_s and one
    jobs.tick()
    jobs.tick()
    assert jobs.asked[1:] == [ev.ReleaseCapacity("reward-0-7")] and jobs.running == 1


def test_jobs_of_an_earlier_attempt_keep_their_names(begin, tmp_path, monkeypatch):
    lent.note(tmp_path, {"reward-0-1": "71", "reward-0-2": "72"}, lent.REWARDS)
    jobs = begin()
    jobs.demand(waits(6))  # two may be on their way
    assert jobs.asked == ask("reward-0-3")
    monkeypatch.setattr(provisioner.state, "is_active", lambda job: job == "72")
    asyncio.run(jobs._provisioner._adopt())
    jobs.demand(waits(6))
    assert jobs.asked == ask("reward-0-3", "reward-0-4")
