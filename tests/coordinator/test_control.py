"""Groups in progress: the same tasks for the same seed, every trajectory counted once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.config import Branching
from rose.coordinator import control
from rose.coordinator.control import (
    Bounds,
    Groups,
    Replaced,
    Task,
    TooManyFailures,
    chosen,
    eval_task,
    fork_points,
    teaches,
    train_task,
)
from rose.protocol import Phase
from tests.made import trajectory as drawn


def trajectory(name, reward=0.0, tokens=1, domain="lake"):
    return drawn(name, reward=reward, response_tokens=tokens, domain=domain)


def opened(most, seeded, share=0.2):
    """No groups yet, of two domains; `most` failures in a row give a task of either up."""
    names = ("lake", "sums")
    return Groups(1, {name: Bounds(most, share, f"env.members.{name}") for name in names}, seeded)


def fails(groups, trajectory, error="boom", **more):
    return groups.failed_trajectory(trajectory, trajectory.split(".")[0], error, **more)


def test_a_group_is_complete_when_its_last_member_is_in():
    groups = opened(3, seeded=True)
    starts = groups.open("g4", Phase.TRAIN, Task("lake", 99), 3)
    assert [s.id for s in starts] == ["g4.0", "g4.1", "g4.2"]
    assert {s.env_seed for s in starts} == {99}
    assert len({s.sampling_seed for s in starts}) == 3
    assert {
        s.sampling_seed
        for s in opened(3, seeded=False).open("g4", Phase.TRAIN, Task("lake", 99), 3)
    } == {None}
    assert groups.finished(trajectory("g4.2")) is None
    assert groups.finished(trajectory("g4.0")) is None
    assert groups.finished(trajectory("g4.2")) is None  # a second word about it changes nothing
    assert [t.id for t in groups.finished(trajectory("g4.1"))] == ["g4.0", "g4.1", "g4.2"]
    assert groups.running == 0


def test_the_first_that_are_in_make_a_group_and_its_spare_trajectories_are_late():
    groups = opened(3, seeded=True)
    assert len(groups.open("g4", Phase.TRAIN, Task("lake", 99), 2, spare=2)) == 4
    groups.finished(trajectory("g4.3"))
    assert [t.id for t in groups.finished(trajectory("g4.1"))] == ["g4.1", "g4.3"]
    assert groups.late("g4") == ["g4.0", "g4.2"] and groups.running == 0
    assert groups.finished(trajectory("g4.0")) is None  # a late word changes nothing


def test_a_failed_trajectory_is_replaced_within_its_group():
    groups = opened(5, seeded=True)
    groups.open("g0", Phase.TRAIN, Task("lake", 9), 2)
    [again] = fails(groups, "g0.1").starts
    assert again.id == "g0.1r1" and again.env_seed == 9 and again.domain == "lake"
    assert [start.id for start in fails(groups, "g0.1r1").starts] == ["g0.1r2"]
    assert groups.finished(trajectory("g0.1")) is None
    groups.finished(trajectory("g0.0"))
    assert [t.id for t in groups.finished(trajectory("g0.1r2"))] == ["g0.0", "g0.1r2"]
    assert groups.failed == 2 and groups.given_up == 0


def test_a_task_that_fails_each_time_is_given_up_and_another_drawn():
    """The group begins again, whole, under its own name."""
    groups = opened(3, seeded=True)
    groups.open("g0", Phase.TRAIN, Task("lake", 98), 3)
    groups.finished(trajectory("g0.1"))
    fails(groups, "g0.0")
    fails(groups, "g0.0r1")
    after = fails(groups, "g0.2", "disk gone (row 7 of rows.jsonl)")
    parts = ("lake with seed 98 (group g0)", "3 failures in a row", "g0.2: disk gone (row 7 of")
    for part in parts:
        assert part in after.given_up
    assert after.running == ["g0.0r2"] and [t.id for t in after.done] == ["g0.1"]
    assert [start.id for start in after.starts] == ["g0.0r3", "g0.1r3", "g0.2r3"]
    [seed] = {start.env_seed for start in after.starts}
    assert seed != 98 and seed % 2 == 0 and {s.domain for s in after.starts} == {"lake"}
    assert groups.given_up == 1 and groups.failed == 3 and groups.running == 3
    assert groups.finished(trajectory("g0.0r2")) is None  # late, and of the task before
    for name in ("g0.0r3", "g0.2r3"):
        groups.finished(trajectory(name))
    assert [start.id for start in fails(groups, "g0.1r3").starts] == ["g0.1r4"]
    assert len(groups.finished(trajectory("g0.1r4"))) == 3


def test_a_held_out_task_is_given_up_for_another_held_out_one():
    groups = opened(3, seeded=True)
    groups.open("e0-1", Phase.EVAL, Task("lake", 99), 1)
    name, drawn = "e0-1.0", set()
    for _ in range(6):
        [start] = groups.failed_trajectory(name, "e0-1", "boom").starts
        assert start.phase is Phase.EVAL and start.env_seed % 2 == 1
        name = start.id
        drawn.add(start.env_seed)
    assert len(drawn) == 3 and groups.given_up == 2


def test_one_trajectory_that_ends_well_shows_that_the_task_can_be_played():
    groups = opened(3, seeded=False)
    groups.open("g0", Phase.TRAIN, Task("lake", 98), 8)
    for member in range(7):
        assert not fails(groups, f"g0.{member}").given_up
    groups.finished(trajectory("g0.7"))
    for member in range(7):
        assert not fails(groups, f"g0.{member}r{member + 1}").given_up
    assert groups.given_up == 0


def test_a_task_that_can_not_begin_is_given_up_at_once_and_so_is_one_that_kills_its_hosts_again():
    groups = opened(20, seeded=False)
    groups.open("g0", Phase.TRAIN, Task("lake", 98), 8)
    assert fails(groups, "g0.3", certain=True).given_up
    groups.open("g1", Phase.TRAIN, Task("lake", 96), 8)
    assert not fails(groups, "g1.0", lost=True).given_up
    assert not fails(groups, "g1.1", lost=True).given_up  # both may have come from outside
    assert fails(groups, "g1.0r1", lost=True).given_up


def test_a_given_up_tree_grows_again_among_the_new_members():
    branching = Branching(ways=[2], at=[1], depth=1)
    groups = Groups(1, {"lake": Bounds(1, 0.2, "env")}, False, branching)
    groups.open("g4", Phase.TRAIN, Task("lake", 98), 2, spare=1)
    starts = fails(groups, "g4.0", certain=True).starts
    expected = [("g4.0r1", "", 0), ("g4.1r1", "g4.0r1", 1), ("g4.2r1", "", 0)]
    assert [(s.id, s.follows, s.fork) for s in starts] == expected


def test_a_few_bad_tasks_among_many_never_end_the_run():
    """However fast they fail beside others, which take their time."""
    groups = opened(3, seeded=False)
    for index in range(600):
        name = f"g{index}"
        groups.open(name, Phase.TRAIN, Task("lake", 2 * index), 2)
        if index % 10 == 3:
            again = groups.failed_trajectory(f"{name}.0", name, "long", certain=True).starts
        else:
            again = [None, None]
        for member, start in enumerate(again):
            groups.finished(trajectory(start.id if start else f"{name}.{member}"))
    assert groups.given_up == 60 and groups.running == 0


@pytest.mark.parametrize("size, at_once", [(1, 64), (2, 4), (8, 4)])
def test_an_environment_of_which_every_task_fails_ends_the_run_soon_with_the_cause(size, at_once):
    groups = opened(3, seeded=False)
    left = []
    for index in range(at_once):
        left += groups.open(f"g{index}", Phase.TRAIN, Task("sums", 2 * index), size)
    with pytest.raises(
        TooManyFailures,
        match=r"tasks of sums fail each time \(env\.members\.sums\.max_failed_tasks=0\.2\); the "
        r"last, g\d+\.\d+.*: disk gone",
    ):
        while True:
            start = left.pop(0)
            after = groups.failed_trajectory(start.id, start.group, "disk gone")
            left = [each for each in left if each.id not in after.running] + after.starts
    assert groups.failed <= (at_once + 8) * 3 * size


def test_an_environment_that_breaks_in_the_middle_ends_the_run_too():
    """Hundreds of tasks that went well before don't hide it."""
    groups = opened(3, seeded=False)
    for index in range(500):
        groups.open(f"g{index}", Phase.TRAIN, Task("lake", 2 * index), 1)
        groups.finished(trajectory(f"g{index}.0"))
    with pytest.raises(TooManyFailures, match="of the last 101 tasks"):
        name = groups.open("g500", Phase.TRAIN, Task("lake", 2), 1)[0].id
        while True:
            name = groups.failed_trajectory(name, "g500", "gone").starts[0].id
    assert groups.failed < 100


def test_a_domain_that_works_does_not_hide_another_that_is_broken():
    groups = opened(3, seeded=False)
    for index in range(100):
        groups.open(f"g{index}", Phase.TRAIN, Task("lake", 2 * index), 1)
        groups.finished(trajectory(f"g{index}.0"))
    name = groups.open("g100", Phase.TRAIN, Task("sums", 9), 1)[0].id
    with pytest.raises(TooManyFailures, match="tasks of sums fail each time"):
        for _ in range(40):
            name = groups.failed_trajectory(name, "g100", "boom").starts[0].id


def test_a_dropped_group_is_forgotten():
    groups = opened(5, seeded=True)
    groups.open("g0", Phase.TRAIN, Task("lake", 9), 2)
    groups.finished(trajectory("g0.0"))
    running, done = groups.drop("g0")
    assert running == ["g0.1"] and [t.id for t in done] == ["g0.0"]
    assert groups.drop("g0") == ([], [])
    assert groups.finished(trajectory("g0.1")) is None
    assert fails(groups, "g0.1", "late") == Replaced()


def test_tasks_depend_on_the_seed_and_the_index_alone():
    def train(seed, index):
        return train_task(seed, index, {"lake": 1.0}).seed

    assert train(1, 5) == train(1, 5) != train(2, 5)
    trained, held_out = (
        {train(1, i) for i in range(2000)},
        {eval_task(1, i, {"lake": 1.0}).seed for i in range(2000)},
    )
    assert len(trained) == len(held_out) == 2000 and not trained & held_out
    assert {train_task(1, i, {"lake": 1.0}).domain for i in range(100)} == {"lake"}
    mixed = {"lake": 3.0, "sums": 1.0}
    assert [train_task(1, i, mixed).seed for i in range(100)] == [train(1, i) for i in range(100)]


@given(
    weights=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 20.0), min_size=1),
    seed=st.integers(0, 2**31),
    begin=st.integers(0, 10**9),
    size=st.integers(1, 64),
)
def test_any_few_neighbouring_groups_have_each_domain_in_its_share(weights, seed, begin, size):
    def stream(weights):
        return [chosen(weights, seed, index) for index in range(begin, begin + size)]

    found = stream(weights)
    for name, weight in weights.items():
        assert abs(found.count(name) - size * weight / sum(weights.values())) < 3
    assert (
        stream(dict(reversed(weights.items())))
        == found
        == stream({n: 4 * w for n, w in weights.items()})
    )


def test_over_a_run_the_shares_are_the_weights_and_seeds_have_orders_of_their_own():
    def stream(seed):
        return [chosen({"lake": 2, "sums": 1, "words": 0.5}, seed, index) for index in range(3500)]

    assert all(
        abs(stream(1).count(name) - n) <= 3
        for name, n in (("lake", 2000), ("sums", 1000), ("words", 500))
    )
    assert len({tuple(stream(seed)[:16]) for seed in range(20)}) > 5
    assert chosen({"lake": 1e308, "sums": 1e308, "words": 5e-324}, 1, 0) in ("lake", "sums")


@pytest.mark.parametrize(
    "rewards, dynamic, keeps",
    [
        ([0, 1], True, True),
        ([1, 1], True, False),
        ([0, 0], True, False),
        ([1, 1], False, True),
        ([0.1 + 0.1 + 0.1, 0.3], True, False),
        ([2.0**24, 2.0**24 + 1], True, True),
    ],
)
def test_dynamic_sampling_drops_groups_without_a_gradient(rewards, dynamic, keeps):
    assert teaches([trajectory(f"g0.{i}", r) for i, r in enumerate(rewards)], dynamic) is keeps


def test_a_group_without_any_token_teaches_nothing():
    assert not teaches([trajectory("g0.0", 1, tokens=0)], False)


def test_a_groups_members_are_trees_whose_forks_are_known_when_it_begins():
    branching = Branching(ways=[3, 2], at=[2, 5], depth=1)
    of_first = {1: (0, 5), 2: (0, 2), 3: (2, 5), 4: (0, 2), 5: (4, 5)}
    of_second = {7: (6, 5), 8: (6, 2), 9: (8, 5), 10: (6, 2), 11: (10, 5)}
    expected = {n: (f"g4.{of}", turn) for n, (of, turn) in (of_first | of_second).items()}
    assert fork_points(branching, 1, "g4", 12) == expected


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.integers(3, 9), st.integers(1, 3))
def test_forks_are_drawn_by_name_and_lead_back_to_the_trees_first(ways, depth, trees):
    branching = Branching(ways=ways, at=None, depth=depth)
    size = trees * branching.leaves
    points = fork_points(branching, 7, "g4", size)
    assert points == fork_points(branching, 7, "g4", size)
    assert len(points) == size - trees
    for first in range(0, size, branching.leaves):
        turns = {points[m][1] for m in range(first + 1, first + branching.leaves)}
        assert len(turns) == len(ways) and turns <= set(range(1, depth + 1))
        for member in range(first + 1, first + branching.leaves):
            fork = depth + 1
            while member != first:
                name, turn = points[member]
                assert turn < fork, "a trajectory forks off before those that fork off it"
                member, fork = int(name.removeprefix("g4.")), turn
    of_others = [fork_points(branching, 7, f"g{group}", size) for group in range(40)]
    drawn = {tuple(sorted({turn for _, turn in points.values()})) for points in of_others}
    assert len(drawn) > 1 or depth == len(ways), "not every tree forks at the same turns"


def test_spare_members_and_held_out_tasks_never_fork():
    groups = Groups(1, {"lake": Bounds(3, 0.2, "env")}, False, Branching(ways=[2], at=[1], depth=1))
    starts = groups.open("g4", Phase.TRAIN, Task("lake", 99), 4, spare=1)
    expected = [("", 0), ("g4.0", 1), ("", 0), ("g4.2", 1), ("", 0)]
    assert [(s.follows, s.fork) for s in starts] == expected
    [alone] = groups.open("e0-1", Phase.EVAL, Task("lake", 99), 1)
    assert alone.follows == ""
    [replaced] = fails(groups, "g4.1", "broken").starts
    assert (replaced.id, replaced.follows) == ("g4.1r1", "")


def test_a_name_with_an_r_of_its_own_keeps_it():
    assert control.first_name("g12r1.3r2") == "g12r1.3"
    assert control.first_name("g12.3") == "g12.3"
