"""A step's trajectories travel in messages of bounded size, each row once."""

from rose import protocol as p
from rose.trainer import batching as tm
from tests.made import trajectory as drawn


def trajectory(tokens: int) -> p.Trajectory:
    return drawn("g0.0", *[[0] * tokens] * 4)


def test_large_batches_are_cut_and_small_ones_are_not(monkeypatch):
    monkeypatch.setattr(tm, "PART_BYTES", 13 * 100)
    rows = [trajectory(60), trajectory(30), trajectory(60), trajectory(200), trajectory(5)]
    summary = p.BatchSummary([0.0] * 5, [0] * 5, [0] * 5, [False] * 5)
    step, *parts = tm.train_messages(7, summary, [[[0, 1], [2]], [[3, 4]]], True, rows)
    expected = (7, [[[0, 1], [2]], [[3, 4]]], len(parts), True)
    assert (step.step, step.micro_batches, step.parts, step.trees) == expected
    assert [part.indices for part in parts] == [[0, 1], [2], [3], [4]]
    assert [part.part for part in parts] == [0, 1, 2, 3]
    assert all(part.trajectories == [rows[i] for i in part.indices] for part in parts)


def test_a_rank_without_rows_still_hears_of_the_step():
    step, part = tm.train_messages(
        1, p.BatchSummary([0.0], [0], [0], [False]), [[[]]], False, [trajectory(3)]
    )
    assert step.parts == 1 and part.indices == [] and part.trajectories == []
