"""trainer.stream drives the live coordinator: with every policy each group is trained once,
whatever was given to the trainer early, stops and resumes included."""

from collections import Counter

import pytest

from rose import protocol as p
from rose.coordinator.training import Training
from rose.coordinator.waiting import RunFailed
from rose.observe.recorder import NullRecorder
from rose.scheduler.groups import group_index
from rose.trainer import checkpoint
from tests.coordinator import peers
from tests.coordinator.conftest import trajectory
from tests.coordinator.test_batching_live import GROUPS, POLICIES, SIZE, STEPS, check_batches
from tests.coordinator.test_batching_live import config as config  # a fixture

STREAM = ("trainer.stream=true", "algorithm=grpo")


@pytest.mark.parametrize("policy", POLICIES)
def test_each_group_is_trained_once_and_the_journal_replays(policy, config, tmp_path):
    made = config(policy, *STREAM)
    _, peer = peers.run(made, tmp_path)
    check_batches(peer, made)
    indices = [group_index(t.group) for rows in peer.trained.values() for t in rows]
    assert sorted(Counter(indices).values()) == [SIZE] * GROUPS * STEPS
    hidden = [row["stream_hidden"] for row in peers.rows(tmp_path)]
    assert peer.rounds > 0 and 0 < max(hidden) < 1 and min(hidden) >= 0
    peers.check_replay(made, tmp_path)


def test_a_run_that_stops_with_groups_trained_ahead_repeats_the_step(config, tmp_path):
    made, first = config("synchronous", *STREAM), []

    def stop(coordinator):
        first[:] = [coordinator.mailbox]
        return coordinator.progress.step == 3 and 4 in coordinator.mailbox.begun

    found = peers.stopped(made, tmp_path, stop)
    assert checkpoint.step_of(found) == 3 and 4 in first[0].begun
    _, second = peers.run(made, tmp_path, attempt=2, seed=5, resume_from=found)
    assert sorted(second.trained) == [4, 5, 6]
    ahead = {t.group for t in first[0].trained[4]}
    again = {t.group for t in second.trained[4]}
    assert ahead < again, "the step has the same prompts, all of them"


def test_a_stop_saves_the_last_step_while_groups_of_the_next_are_trained(config, tmp_path):
    made, seen = config("synchronous", *STREAM, "trainer.checkpoint_every=100"), []

    def stop(coordinator):
        seen[:] = [coordinator.training]
        return coordinator.progress.step == 2 and bool(coordinator.training.working)

    assert checkpoint.step_of(peers.stopped(made, tmp_path, stop)) == 2
    [training] = seen
    training.working.clear()
    training.add("late", [trajectory("late.0")])
    assert not training.working, "ranks that save, or end, are given no round"


def group(name, size=2):
    return [trajectory(f"{name}.{member}") for member in range(size)]


@pytest.fixture
def training(make_config):
    config = make_config(*STREAM, "trainer.ranks=2")
    sent = []
    made = Training(config, {0: 5, 1: 6}, lambda *what: sent.append(what), NullRecorder())
    made.sent = sent
    made.begin_step(1)
    return made


def orders(training, rank):
    steps = [m for to, m in training.sent if to == rank and isinstance(m, p.TrainStep)]
    return [(m.micro_batches, m.more) for m in steps]


def test_groups_that_come_meanwhile_are_one_round_which_waits_for_every_rank(training):
    for name in ("g1", "g2"):
        training.add(name, group(name))
    assert orders(training, 5) == [([[[0]]], True)] and orders(training, 6) == [([[[1]]], True)]
    training.received(p.TrainedAhead(1, 0))
    training.received(p.TrainedAhead(0, 1))  # of a step that a stop broke off
    assert len(orders(training, 5)) == 1
    training.received(p.TrainedAhead(1, 1))
    assert orders(training, 5)[1] == ([[[2]]], True)
    training.complete(1, [group("g0"), group("g1"), group("g2")])
    assert orders(training, 6)[2] == ([[[5]]], False)
    summary = training.sent[-2][1].summary
    assert summary.groups == [0, 0, 1, 1, 2, 2]
    assert training.sent[-1][1].trajectories[0].id == "g0.1"
    training.received(p.TrainedAhead(1, 0))  # of the round before
    assert len(orders(training, 5)) == 3


def test_ranks_that_share_rows_get_the_same(make_config):
    config = make_config("trainer.ranks=4", "trainer.sequence_parallel=2", "trainer.batch_size=8")
    sent = {rank: [] for rank in range(5, 9)}
    training = Training(
        config, dict(enumerate(sent)), lambda to, what: sent[to].append(what), NullRecorder()
    )
    training.complete(1, [group("g0", size=3)])
    assert sent[5] == sent[6] != sent[7] == sent[8]
    assert sorted(row for rank in (5, 7) for row in sent[rank][-1].indices) == [0, 1, 2]


def test_a_round_has_a_limit_so_that_a_stop_can_save_soon(training, monkeypatch):
    monkeypatch.setattr("rose.coordinator.training.MICRO_BATCHES_OF_ROUND", 0)
    for name in ("g0", "g1", "g2", "g3"):
        training.add(name, group(name))
    for done in range(3):
        assert orders(training, 5)[-1] == ([[[2 * done]]], True)
        for rank in range(2):
            training.received(p.TrainedAhead(1, rank))
    assert orders(training, 5)[-1] == ([[[6]]], True)
    training.received(p.TrainedAhead(1, 0))
    training.received(p.TrainedAhead(1, 1))
    assert len(orders(training, 5)) == 4, "nothing waits"


def test_a_batch_without_a_group_that_was_trained_ahead_ends_the_run(training):
    training.add("g1", group("g1", size=1))
    assert orders(training, 6) == [([[[]]], True)], "a rank may have nothing to do"
    with pytest.raises(RunFailed, match="group g1 was trained ahead for step 1"):
        training.complete(1, [group("g0")])
