"""Groups in progress: the same tasks for the same seed, every trajectory counted once."""

import pytest

from rose.protocol import Phase, Trajectory
from rose.rollout.control import Groups, TooManyFailures, eval_seed, train_seed
from rose.rollout.filter import teaches


def trajectory(name, reward=0.0, tokens=1):
    return Trajectory(name, name.split(".")[0], Phase.TRAIN, b"", b"", b"", b"", reward, reward > 0, 1, tokens)


def test_a_group_is_complete_when_its_last_member_is_in():
    groups = Groups(1, 3, seeded=True)
    starts = groups.open("g4", Phase.TRAIN, 99, 3)
    assert [s.id for s in starts] == ["g4.0", "g4.1", "g4.2"] and {s.env_seed for s in starts} == {99}
    assert len({s.sampling_seed for s in starts}) == 3
    assert {s.sampling_seed for s in Groups(1, 3, seeded=False).open("g4", Phase.TRAIN, 99, 3)} == {None}
    assert groups.finished(trajectory("g4.2")) is None and groups.finished(trajectory("g4.0")) is None
    assert groups.finished(trajectory("g4.2")) is None  # a second word about it changes nothing
    assert [t.id for t in groups.finished(trajectory("g4.1"))] == ["g4.0", "g4.1", "g4.2"]
    assert groups.running == 0


def test_the_first_that_are_in_make_a_group_and_its_spare_trajectories_are_late():
    groups = Groups(1, 3, seeded=True)
    assert len(groups.open("g4", Phase.TRAIN, 99, 2, spare=2)) == 4
    groups.finished(trajectory("g4.3"))
    assert [t.id for t in groups.finished(trajectory("g4.1"))] == ["g4.1", "g4.3"]
    assert groups.late("g4") == ["g4.0", "g4.2"] and groups.running == 0
    assert groups.finished(trajectory("g4.0")) is None  # a late word changes nothing


def test_a_failed_trajectory_is_replaced_within_its_group():
    groups = Groups(1, 5, seeded=True)
    groups.open("g0", Phase.TRAIN, 9, 2)
    again = groups.failed_trajectory("g0.1", "g0", "boom")
    assert again.id == "g0.1r1" and again.env_seed == 9
    assert groups.failed_trajectory("g0.1r1", "g0", "boom").id == "g0.1r2"
    assert groups.finished(trajectory("g0.1")) is None
    groups.finished(trajectory("g0.0"))
    assert [t.id for t in groups.finished(trajectory("g0.1r2"))] == ["g0.0", "g0.1r2"]
    assert groups.failed == 2


def test_too_many_failures_in_a_row_stop_with_the_cause():
    groups = Groups(1, 2, seeded=False)
    groups.open("g0", Phase.TRAIN, 9, 3)
    groups.failed_trajectory("g0.0", "g0", "boom")
    groups.finished(trajectory("g0.1"))  # a success in between
    groups.failed_trajectory("g0.2", "g0", "boom")
    with pytest.raises(TooManyFailures, match=r"2 environments failed in a row .*max_failures_in_row=2.*g0.2r\d: disk gone"):
        groups.failed_trajectory("g0.2r2", "g0", "disk gone")


def test_a_dropped_group_is_forgotten():
    groups = Groups(1, 5, seeded=True)
    groups.open("g0", Phase.TRAIN, 9, 2)
    groups.finished(trajectory("g0.0"))
    running, done = groups.drop("g0")
    assert running == ["g0.1"] and [t.id for t in done] == ["g0.0"] and groups.drop("g0") == ([], [])
    assert groups.finished(trajectory("g0.1")) is None
    assert groups.failed_trajectory("g0.1", "g0", "late") is None


def test_tasks_depend_on_the_seed_and_the_index_alone():
    assert train_seed(1, 5) == train_seed(1, 5) != train_seed(2, 5)
    train, held_out = {train_seed(1, i) for i in range(2000)}, {eval_seed(1, i) for i in range(2000)}
    assert len(train) == len(held_out) == 2000 and not train & held_out


@pytest.mark.parametrize("rewards, dynamic, keeps", [
    ([0, 1], True, True), ([1, 1], True, False), ([0, 0], True, False), ([1, 1], False, True)])
def test_dynamic_sampling_drops_groups_without_a_gradient(rewards, dynamic, keeps):
    assert teaches([trajectory(f"g0.{i}", r) for i, r in enumerate(rewards)], dynamic) is keeps


def test_a_group_without_any_token_teaches_nothing():
    assert not teaches([trajectory("g0.0", 1, tokens=0)], False)
