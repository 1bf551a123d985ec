"""What the benchmark reads from a journal."""

import pytest

from rose.coordinator.journal import Entry
from rose.scheduler import events as ev
from scripts.lending import bench_elastic


def entry(event, *actions):
    return Entry(event, list(actions))


def join(worker, at):
    return entry(
        ev.WorkerJoined(
            at=at, worker=worker, kind="cooperative", max_sequences=4, kv_tokens=100, version=0
        )
    )


def turn(name, at, worker=None, context=10):
    return entry(
        ev.TurnRequested(
            at=at, turn=name, trajectory=name, group="g", context_tokens=context, max_new_tokens=9
        ),
        *([ev.AssignTurn(name, worker, 1)] if worker else []),
    )


def words(name, at, tokens):
    return entry(ev.TurnProgressed(at=at, turn=name, attempt=1, tokens=tokens))


def test_first_token_loss_and_reroute():
    story = bench_elastic.read(
        [
            join("b", 10.0),
            turn("t1", 11.0, "b"),
            words("t1", 13.0, 4),
            turn("t2", 13.0, "b", context=20),
            words("t2", 14.0, 6),
            turn("t3", 14.0, "a"),
            entry(
                ev.WorkerLost(at=17.0, worker="b", reason="silent", ended=[]),
                ev.AssignTurn("t1", "a", 2),
            ),
            entry(ev.Tick(at=18.0), ev.AssignTurn("t2", "a", 2)),
            words("t3", 19.0, 1),
        ],
        killed={"b": 15.0},
    )
    assert (story.joined, story.first_token) == ({"b": 10.0}, {"b": 13.0, "a": 19.0})
    loss = story.losses["b"]
    assert (loss.notice, loss.reroute, loss.turns) == (2.0, 3.0, 2)
    assert loss.again == 10 + 4 + 20 + 6
    assert loss.lost == pytest.approx(bench_elastic.REPORT_S * (4 + 6) / bench_elastic.RATE_S)
