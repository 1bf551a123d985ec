"""The indexed rounds decide like the plain rule, which checks every turn against every worker."""

from copy import deepcopy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.scheduler.state import NOT_RESERVED, TurnState
from rose.scheduler.turn_queue import BLOCK, TurnQueue
from tests.scheduler.driver import KINDS, Driver
from tests.scheduler.test_properties import STEPS, play, policy, scheduler


def plain_round(cluster, queue_depth, routing, imbalance, last):
    """Return the [(turn, worker)] that a round should assign, and round robin's last worker."""
    cluster = deepcopy(cluster)
    workers = sorted(cluster.workers.values(), key=lambda w: w.worker)
    ready = [w for w in workers if w.accepts_turns and w.version == cluster.version]
    ready = [w for w in ready if not (w.loading or w.draining or w.resting)]
    given, turns = [], sorted(cluster.turns.values(), key=lambda t: t.sequence)
    for turn in [turn for turn in turns if turn.worker is None]:
        fitting = [w for w in ready if w.room(queue_depth) >= turn.kv_need]
        if not fitting:
            ready = [w for w in ready if w.largest_turn < turn.kv_need]
            continue
        fitting = [w for w in fitting if w.worker != turn.avoid] or fitting
        fitting = [w for w in fitting if not w.revoked] or fitting
        worker = min(fitting, key=lambda w: (w.load, w.worker))
        if routing == "round_robin":
            worker = next((w for w in fitting if w.worker > last), fitting[0])
            last = worker.worker
        elif routing == "cache_affine":
            by_name = {w.worker: w for w in fitting}
            shared = by_name.get(cluster.group_home.get(turn.group))
            if shared is not None and shared.load - worker.load <= imbalance:
                worker = shared
            worker = by_name.get(cluster.home.get(turn.trajectory), worker)
        worker.hold(turn)
        cluster.home[turn.trajectory] = worker.worker
        cluster.group_home.setdefault(turn.group, worker.worker)
        given.append((turn.turn, worker.worker))
    return given, last


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin", "cache_affine"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([0.0, 0.5]),
    st.lists(st.integers(0, 79), min_size=3, max_size=12),
    st.lists(STEPS, max_size=80),
)
def test_a_round_places_the_turns_that_the_plain_rule_places(routing, queue_depth, lengths, steps):
    names = {"provisioning": "fixed", "routing": routing, "order": "fifo"}
    names |= {"batching": "bounded_staleness"}
    s = scheduler(names, queue_depth)
    imbalance = policy("routing", "cache_affine").args["imbalance"]
    indexed, last = s._queue.round, ""

    def checked(at, tick):
        nonlocal last
        expected, last = plain_round(s.cluster, queue_depth, routing, imbalance, last)
        actions = indexed(at, tick)
        assert [(a.turn, a.worker) for a in actions] == expected
        return actions

    s._queue.round = checked
    driver = Driver(s, queue_depth, staleness=100, lengths=lengths)
    for name in KINDS:
        driver.join(name, 0)
    for step in steps:
        play(driver, *step)
    driver.restore()
    driver.settle()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), max_size=60), st.data())
def test_the_queue_finds_the_first_turn_that_fits_and_the_smallest_before_it(turns, data):
    queue, entries = TurnQueue(), []
    for sequence, (key, need) in enumerate(turns):
        turn = TurnState(f"t{sequence}", "", "", 0, 0, sequence, 0.0, kv_need=need)
        queue.add(turn, key)
        entries.append((key, sequence, turn))
    removed = st.lists(st.sampled_from(entries), unique_by=id) if entries else st.just([])
    for _, _, turn in data.draw(removed):
        queue.remove(turn)
        entries = [e for e in entries if e[2] is not turn]
    entries.sort()
    after, room = data.draw(st.sampled_from([None, *entries])), data.draw(st.integers(0, 60))
    behind = entries[entries.index(after) + 1 :] if after else entries
    found = next((e for e in behind if e[2].kv_need <= room), None)
    before = behind[: behind.index(found)] if found else behind
    expected = (found, min((e[2].kv_need for e in before), default=NOT_RESERVED))
    assert queue.first(room, after) == expected
    assert len(queue) == len(entries)


def test_a_long_queue_is_cut_and_loses_nothing():
    queue, count = TurnQueue(), 5 * BLOCK
    turns = [TurnState(f"t{i}", "", "", 0, 0, i, 0.0, kv_need=1 + i % 7) for i in range(count)]
    for turn in turns:
        queue.add(turn, -turn.sequence % 1000)
    seen, entry = [], None
    while (entry := queue.first(3, entry)[0]) is not None:
        seen.append(entry[2])
    small = [turn for turn in turns if turn.kv_need <= 3]
    assert seen == sorted(small, key=lambda turn: (-turn.sequence % 1000, turn.sequence))
    for turn in turns:
        queue.remove(turn)
    assert len(queue) == 0 and queue.first() == (None, NOT_RESERVED)
