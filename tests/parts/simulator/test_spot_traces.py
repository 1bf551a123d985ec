"""Availability of spot instances: who is there when, from both formats, and made."""

import numpy as np
import pytest

from rose.parts.simulator.traces import spot
from rose.parts.simulator.traces.spot import Availability


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        (tmp_path / "spot.csv").write_text(text)
        return tmp_path / "spot.csv"

    return write


NAMED = "1000,add,a\n1000,add,b\n4000,remove,a\n5000,add,a\n11000,remove,b\n"
COUNTS = ("00:00", 2), ("00:10", 3), ("00:30", 3), ("00:40", 1), ("01:00", 1)
COUNTED = "".join(f"2021-12-11, 11:{at}, {count}\n" for at, count in COUNTS)


def test_named_instances_are_there_from_being_added_until_removed_and_may_come_back(write):
    pool = spot.read(write(NAMED))
    assert list(zip(pool.begin, pool.end, strict=False)) == [(0, 3), (0, 10), (4, 10)]
    assert pool.seconds == 10
    assert pool.count(np.array([0, 2.9, 3, 4, 9.9, 10])).tolist() == [2, 2, 1, 2, 2, 0]
    assert [values.tolist() for values in pool.changes] == [[0, 3, 4], [2, 1, 2]]


def test_a_count_that_is_sampled_gives_as_many_instances_at_each_time(write):
    pool = spot.read(write(COUNTED))
    assert pool.seconds == 60
    assert pool.count(np.array([0, 9, 10, 39, 40, 59])).tolist() == [2, 2, 3, 3, 1, 1]
    assert sorted(pool.end) == [40, 40, 60]


def test_which_instances_a_falling_count_takes_is_decided_by_the_seed(write):
    path = write(COUNTED)
    pools = [spot.read(path, seed) for seed in (*range(40), 3)]
    stays = [pool.begin[pool.end == 60].item() for pool in pools]
    assert stays[3] == stays[-1]
    assert set(stays) == {0.0, 10.0}


def test_a_slice_counts_from_its_start_and_a_limit_takes_no_more_than_there_is_room_for():
    pool = Availability(np.array([0.0, 0.0, 4.0]), np.array([3.0, 10.0, 10.0]), 10.0)
    cut = pool.slice(2, 5)
    assert list(zip(cut.begin, cut.end, strict=False)) == [(0, 1), (0, 5), (2, 5)]
    assert cut.seconds == 5
    small = pool.limited(1)
    assert list(zip(small.begin, small.end, strict=False)) == [(0, 3), (4, 10)]


def test_a_made_pool_has_the_lifetimes_and_the_bulk_asked_for_and_the_seed_decides():
    made = [spot.generate(seed, 40 * 3600.0) for seed in range(6)]
    found = [pool.statistics for pool in made]
    assert np.mean([s.mean for s in found]) == pytest.approx(24, rel=0.1)
    assert np.mean([s.life_s for s in found]) == pytest.approx(1.65 * 3600, rel=0.1)
    assert np.mean([s.removed_at_once for s in found]) == pytest.approx(2.1, rel=0.1)
    assert max(s.most for s in found) <= 32
    assert spot.generate(3, 3600.0).end.tolist() == spot.generate(3, 3600.0).end.tolist()
