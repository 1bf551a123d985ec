"""What the benchmark reads from a journal."""

import pytest

from rose.coordinator.journal import Entry
from rose.scheduler import events as ev
from scripts.lending import bench_elastic
from tests.scheduler.said import asked, joined


def entry(event, *actions):
    return Entry(event, list(actions))


def turn(name, at, worker, context=10):
    return entry(asked(name, at, context), ev.AssignTurn(name, worker, 1))


def words(name, at, tokens):
    return entry(ev.TurnProgressed(at=at, turn=name, attempt=1, tokens=tokens))


def test_first_token_loss_and_reroute():
    lost = ev.WorkerLost(at=17.0, worker="b", reason="silent", ended=[])
    journal = [
        entry(joined("b", kind="cooperative", at=10.0)),
        turn("t1", 11.0, "b"),
        words("t1", 13.0, 4),
        turn("t2", 13.0, "b", context=20),
        words("t2", 14.0, 6),
        turn("t3", 14.0, "a"),
        entry(lost, ev.AssignTurn("t1", "a", 2)),
        entry(ev.Tick(at=18.0), ev.AssignTurn("t2", "a", 2)),
        words("t3", 19.0, 1),
    ]
    story = bench_elastic.read(journal, killed={"b": 15.0})
    assert (story.joined, story.first_token) == ({"b": 10.0}, {"b": 13.0, "a": 19.0})
    loss = story.losses["b"]
    assert (loss.notice, loss.reroute, loss.turns) == (2.0, 3.0, 2)
    assert loss.again == 10 + 4 + 20 + 6
    assert loss.lost == pytest.approx(bench_elastic.REPORT_S * (4 + 6) / bench_elastic.RATE_S)
