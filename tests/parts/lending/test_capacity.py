"""What a co-serving engine can take is said when it changes, and only then."""

import os

import pytest

from rose.parts.lending.board import Rollout, Writer
from rose.parts.lending.rank.capacity import PROBE_S, SHUT_S, Capacity, CapacityWatch, EngineBoard
from tests import processes

WHOLE, SEQUENCES = 1000, 8
ALL = Capacity(WHOLE, SEQUENCES, 0.0, False)
SHUT = Capacity(WHOLE, 0, -1.0, False)


@pytest.fixture
def watch():
    return CapacityWatch(WHOLE, SEQUENCES)


@pytest.fixture
def said(watch):
    """said(at, open=0, ...) -> what is said of a board that has this now, else all is lent."""
    whole = {"open": 1, "running": 1, "kv_total": 4000, "kv_budget": 4000}
    return lambda at, **changes: watch.update(at, Rollout(**whole | {"beat": at} | changes))


def test_the_first_look_says_what_there_is_and_the_next_ones_nothing(watch, said):
    assert said(0.0) == ALL
    assert [said(t, steps=t) for t in (0.1, 0.2, 5.0)] == [None] * 3
    watch.repeat()
    assert said(6.0) == ALL


def test_the_budget_in_bytes_is_said_in_tokens_when_it_has_changed_by_more_than_little(said):
    said(0.0)
    assert said(0.1, kv_budget=3900) is None
    assert said(0.2, kv_budget=3000) == Capacity(750, SEQUENCES, -1.0, False)
    assert said(0.3, kv_budget=2900) is None
    # little by little is a change, too
    assert said(0.4, kv_budget=2700).kv_tokens == 675
    # Memory that was taken back and may not grow.
    assert said(0.5, kv_budget=2000, frozen=1) == Capacity(500, SEQUENCES, -1.0, True)
    assert said(0.6, kv_budget=0, frozen=1) == Capacity(0, 0, -1.0, True)
    assert said(0.7) == ALL


def test_a_gate_that_is_shut_for_long_is_said_and_its_opening_at_once(said):
    said(0.0)
    assert said(0.1, open=0) is None is said(0.1 + SHUT_S, open=0)
    assert said(0.2 + SHUT_S, open=0) == SHUT
    assert said(9.0) == ALL
    # A gate that opens for moments is not shut.
    assert [said(9 + t / 2, open=0, open_s=t) for t in range(1, 10)] == [None] * 9
    # The online engine has let a step go, so that it ends.
    assert said(14.0, open=0, open_s=9, steps=9) is None
    assert said(14.1 + SHUT_S, open=0, open_s=9, steps=10).max_sequences == 0


def test_the_next_opening_is_expected_as_the_last_ones_came(said):
    assert [said(t, open=0) for t in (0.0, 3.9)][1].expected_s == -1.0
    said(4.0)
    said(5.0, open=0)
    assert said(6.5, open=0) == Capacity(WHOLE, 0, pytest.approx(2.5), False)


def test_one_turn_may_try_whether_the_gate_of_an_idle_engine_is_still_shut(said):
    """vLLM's scheduler does not run without requests: a shut gate would be shut for ever."""
    said(0.0, open=0)
    assert said(1.1, open=0).max_sequences == 0
    assert said(2.0, open=0, running=0) is None
    assert said(2.1 + PROBE_S, open=0, running=0).max_sequences == 1
    assert said(5.0, open=0).max_sequences == 0  # the gate lets nothing in
    assert said(6.0).max_sequences == SEQUENCES
    assert said(9.0, running=0) is None
    said(9.1, running=0, open=0, kv_budget=0)
    # no memory: nothing to try
    assert said(20.0, running=0, open=0, kv_budget=0) is None


def test_without_a_board_it_takes_nothing(watch, said):
    assert watch.update(0.0, None) == Capacity(0, 0, -1.0, False)
    assert watch.update(0.1, None) is None
    assert said(0.2) == ALL


def test_a_board_counts_once_it_is_there_if_it_is_the_engines_and_whole(tmp_path, capsys):
    path = tmp_path / "rollout"
    board = EngineBoard(path, os.getpid())
    assert board.read() is None and board.read() is None
    writer = Writer(path, Rollout)
    writer.state.kv_budget = 7
    writer.write()
    assert board.read().kv_budget == 7
    assert EngineBoard(path, os.getpid() + 1).read() is None
    path.write_bytes(bytes(path.stat().st_size))
    assert board.read() is None
    absent, foreign, damaged = capsys.readouterr().out.splitlines()
    for _ in range(50):
        EngineBoard(path, os.getpid()).read()
    assert processes.opened(path) == 2  # the writer's, and that of `board`
    assert "No such file" in absent and "does it run ROSE's scheduler?" in foreign
    assert "not a board of Rollout" in damaged
