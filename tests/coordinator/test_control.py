"""Groups in progress: the same tasks for the same seed, every trajectory counted once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.config import Branching
from rose.coordinator import control
from rose.coordinator.control import Bounds, Groups, Task, TooManyFailures, fork_points
from rose.protocol import Phase
from tests.made import trajectory as drawn


def trajectory(name, reward=0.0, tokens=1):
    return drawn(name, reward=reward, response_tokens=tokens)


def opened(most=3, seeded=False):
    """No groups yet, of two domains; `most` failures in a row give a task of either up."""
    names = ("lake", "sums")
    return Groups(1, {name: Bounds(most, 0.2, f"env.members.{name}") for name in names}, seeded)


def trains(groups, index=0, size=2, seed=98, domain="lake"):
    """The starts of training group `index`."""
    return groups.open(f"g{index}", Phase.TRAIN, Task(domain, seed), size)


def fails(groups, trajectory, error="boom", **more):
    return groups.failed_trajectory(trajectory, trajectory.split(".")[0], error, **more)


def test_members_have_the_tasks_seed_and_one_of_their_own_for_sampling_where_a_run_is_seeded():
    groups = opened(seeded=True)
    starts = trains(groups, index=4, size=3)
    assert {s.env_seed for s in starts} == {98} and len({s.sampling_seed for s in starts}) == 3
    assert {s.sampling_seed for s in trains(opened())} == {None}
    for name in ("g4.2", "g4.0", "g4.2"):  # a second message about it changes nothing
        assert groups.finished(trajectory(name)) is None
    assert [t.id for t in groups.finished(trajectory("g4.1"))] == ["g4.0", "g4.1", "g4.2"]


def test_a_task_that_fails_each_time_is_given_up_and_another_drawn():
    """The group begins again, whole, under its own name."""
    groups = opened()
    trains(groups, size=3)
    groups.finished(trajectory("g0.1"))
    fails(groups, "g0.0")
    fails(groups, "g0.0r1")
    after = fails(groups, "g0.2", "disk gone (row 7 of rows.jsonl)")
    for part in (
        "lake with seed 98 (group g0)",
        "3 failures in a row",
        "g0.2: disk gone (row 7 of",
    ):
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
    groups = opened()
    [start], drawn = groups.open("e0-1", Phase.EVAL, Task("lake", 99), 1), set()
    for _ in range(6):
        [start] = fails(groups, start.id).starts
        assert start.phase is Phase.EVAL and start.env_seed % 2 == 1
        drawn.add(start.env_seed)
    assert len(drawn) == 3 and groups.given_up == 2


def test_one_trajectory_that_ends_well_shows_that_the_task_can_be_played():
    groups = opened()
    trains(groups, size=8)
    for member in range(7):
        assert not fails(groups, f"g0.{member}").given_up
    groups.finished(trajectory("g0.7"))
    for member in range(7):
        assert not fails(groups, f"g0.{member}r{member + 1}").given_up
    assert groups.given_up == 0


def test_a_task_that_can_not_begin_is_given_up_at_once_and_so_is_one_that_kills_its_hosts_again():
    groups = opened(20)
    trains(groups, size=8)
    assert fails(groups, "g0.3", certain=True).given_up
    trains(groups, index=1, size=8)
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
    groups = opened()
    for index in range(600):
        starts = trains(groups, index, seed=2 * index)
        if index % 10 == 3:
            starts = fails(groups, f"g{index}.0", certain=True).starts
        for start in starts:
            groups.finished(trajectory(start.id))
    assert groups.given_up == 60 and groups.running == 0


@pytest.mark.parametrize("size, at_once", [(1, 64), (2, 4), (8, 4)])
def test_an_environment_of_which_every_task_fails_ends_the_run_soon_with_the_cause(size, at_once):
    groups = opened()
    left = []
    for index in range(at_once):
        left += trains(groups, index, size, 2 * index, "sums")
    why = r"tasks of sums fail each time \(env\.members\.sums\.max_failed_tasks=0\.2\); the last, "
    with pytest.raises(TooManyFailures, match=why + r"g\d+\.\d+.*: disk gone"):
        while True:
            after = fails(groups, left.pop(0).id, "disk gone")
            left = [each for each in left if each.id not in after.running] + after.starts
    assert groups.failed <= (at_once + 8) * 3 * size


@pytest.mark.parametrize(
    "domain, words",
    [("lake", "of the last 101 tasks of lake"), ("sums", "tasks of sums fail each time")],
)
def test_an_environment_that_breaks_in_the_middle_ends_the_run_too(domain, words):
    """Hundreds of tasks that went well before don't hide it, of its domain or of another."""
    groups = opened()
    for index in range(500):
        trains(groups, index, size=1, seed=2 * index)
        groups.finished(trajectory(f"g{index}.0"))
    [start] = trains(groups, 500, size=1, domain=domain)
    with pytest.raises(TooManyFailures, match=words):
        while True:
            [start] = fails(groups, start.id).starts
    assert groups.failed < 100


def test_tasks_depend_on_the_seed_and_the_index_alone():
    def train(seed, index, **others):
        return control.train_task(seed, index, {"lake": 3.0} | others).seed

    assert train(1, 5) == train(1, 5) != train(2, 5)
    trained = {train(1, i) for i in range(2000)}
    held_out = {control.eval_task(1, i, {"lake": 1.0}).seed for i in range(2000)}
    assert len(trained) == len(held_out) == 2000 and not trained & held_out
    assert {control.train_task(1, i, {"lake": 1.0}).domain for i in range(100)} == {"lake"}
    assert all(train(1, i, sums=1.0) == train(1, i) for i in range(100))


def stream(weights, seed, begin, size):
    return [control.chosen(weights, seed, index) for index in range(begin, begin + size)]


@given(
    weights=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 20.0), min_size=1),
    seed=st.integers(0, 2**31),
    begin=st.integers(0, 10**9),
    size=st.integers(1, 64),
)
def test_any_few_neighbouring_groups_have_each_domain_in_its_share(weights, seed, begin, size):
    found = stream(weights, seed, begin, size)
    for name, weight in weights.items():
        assert abs(found.count(name) - size * weight / sum(weights.values())) < 3
    assert stream(dict(reversed(weights.items())), seed, begin, size) == found
    assert stream({name: 4 * each for name, each in weights.items()}, seed, begin, size) == found


def test_over_a_run_the_shares_are_the_weights_and_seeds_have_orders_of_their_own():
    weights = {"lake": 2, "sums": 1, "words": 0.5}
    for name, weight in weights.items():
        assert abs(stream(weights, 1, 0, 3500).count(name) - 1000 * weight) <= 3
    assert len({tuple(stream(weights, seed, 0, 16)) for seed in range(20)}) > 5
    assert control.chosen({"lake": 1e308, "sums": 1e308, "words": 5e-324}, 1, 0) in ("lake", "sums")


def test_a_group_without_a_token_is_dropped_and_by_dynamic_sampling_one_without_a_gradient():
    def teaches(*rewards, tokens=1, dynamic=True):
        group = [trajectory(f"g0.{i}", reward, tokens) for i, reward in enumerate(rewards)]
        return control.teaches(group, dynamic)

    assert teaches(0, 1) and teaches(2.0**24, 2.0**24 + 1) and teaches(1, 1, dynamic=False)
    assert not (teaches(1, 1) or teaches(0, 0) or teaches(0.1 + 0.1 + 0.1, 0.3))
    assert not teaches(0, 1, tokens=0, dynamic=False)


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
