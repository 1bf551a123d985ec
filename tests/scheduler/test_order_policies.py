"""Order policies, which choose the waiting turn that goes first: longest_first, mlfq."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.rivals.causal_tree import GENERATION, WINDOW, CausalTree
from rose.parts.rivals.libra import Mlfq
from rose.parts.rivals.seer import LongestFirst
from rose.policies.plain import Fixed, LeastLoaded
from rose.policies.verl import Synchronous
from rose.scheduler import events as ev
from rose.scheduler.core import Scheduler
from tests.scheduler.said import asked, joined

ORDERS = {
    "longest_first": LongestFirst,
    "mlfq short": lambda: Mlfq(limits=[100], first="short", patience=1000),
    "mlfq long": lambda: Mlfq(limits=[50, 200], first="long", patience=1000),
}


class Rollout:
    """A scheduler with one worker for `sequences` turns. Turns are named group.member.turn."""

    def __init__(self, order, sequences=1):
        self.scheduler = Scheduler(Fixed(), LeastLoaded(), order, Synchronous(4.0), 0.0, 1e9)
        self.scheduler.handle(ev.VersionPublished(at=0.0, version=0))
        self.scheduler.handle(joined("a", sequences, 10**6))
        self.started: list[str] = []
        self.made: dict[str, int] = {}

    def feed(self, event):
        actions = self.scheduler.handle(event)
        self.started += [a.turn for a in actions if isinstance(a, ev.AssignTurn)]

    def request(self, *turns, outcome="", context=10):
        for turn in turns:
            self.feed(asked(turn, context=context, outcome=outcome))

    def end(self, turn, tokens, last=False):
        trajectory = turn.rpartition(".")[0]
        self.made[trajectory] = self.made.get(trajectory, 0) + tokens
        self.feed(ev.TurnEnded(at=0.0, turn=turn, tokens=tokens))
        if last:
            made = self.made.pop(trajectory)
            self.feed(ev.TrajectoryEnded(at=0.0, trajectory=trajectory, tokens=made))

    def cancel(self, turn):
        self.feed(ev.TurnEnded(at=0.0, turn=turn))
        self.feed(ev.TrajectoryEnded(at=0.0, trajectory=turn.rpartition(".")[0]))

    def queue(self):
        """Return the waiting turns in the order in which they would start."""
        turns = self.scheduler.cluster.turns
        before = len(self.started)
        while any(turn.worker is None for turn in turns.values()):
            self.feed(ev.TurnEnded(at=0.0, turn=self.started[-1]))
        return self.started[before:]


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_turn_starts_once_if_others_end_are_cancelled_or_lose_their_worker(name, seed):
    random, rollout, asked = Random(seed), Rollout(ORDERS[name](), sequences=3), []
    # Trajectory -> number of turns left
    turns = {f"g{i % 5}.{i // 5}": random.randint(1, 4) for i in range(25)}
    for trajectory in turns:
        asked.append(f"{trajectory}.0")
        rollout.request(asked[-1])
    while rollout.scheduler.cluster.turns:
        turn = random.choice([t.turn for t in rollout.scheduler.cluster.turns.values() if t.worker])
        trajectory = turn.rpartition(".")[0]
        turns[trajectory] -= 1
        if random.random() < 0.1:
            rollout.cancel(turn)
            continue
        rollout.end(turn, random.randint(1, 90), last=turns[trajectory] <= 0)
        if turns[trajectory] > 0:
            asked.append(f"{trajectory}.{turns[trajectory]}")
            outcome, context = random.choice(["", "ok", "failed"]), random.randint(10, 9000)
            rollout.request(asked[-1], outcome=outcome, context=context)
    assert sorted(rollout.started) == sorted(asked)


def test_one_probe_of_each_group_goes_before_all_others():
    rollout = Rollout(LongestFirst())
    rollout.request("g99.0.0")  # fills the worker
    rollout.request("g0.0.0", "g0.1.0", "g1.0.0", "g1.1.0")
    assert rollout.queue() == ["g0.0.0", "g1.0.0", "g0.1.0", "g1.1.0"]


def test_the_group_whose_finished_trajectory_was_longest_goes_first():
    rollout = Rollout(LongestFirst(), sequences=3)
    rollout.request("g0.0.0", "g1.0.0", "g2.0.0")
    rollout.end("g0.0.0", 50, last=True), rollout.end("g1.0.0", 400, last=True)
    rollout.request("g8.0.0", "g9.0.0")  # take the worker
    rollout.request("g0.1.0", "g1.1.0", "g2.1.0", "g2.2.0")
    # No trajectory of g2 has finished, so it counts as the longest.
    assert rollout.queue() == ["g2.1.0", "g2.2.0", "g1.1.0", "g0.1.0"]


def test_turns_that_wait_move_when_a_trajectory_of_their_group_ends():
    rollout = Rollout(LongestFirst(), sequences=2)
    rollout.request("g0.0.0", "g1.0.0", "g0.1.0", "g1.1.0")
    rollout.request("g7.0.0", "g8.0.0")  # probes, which go first
    rollout.end("g0.0.0", 50, last=True), rollout.end("g1.0.0", 60, last=True)
    assert rollout.started[-2:] == ["g7.0.0", "g8.0.0"]
    assert rollout.queue() == ["g1.1.0", "g0.1.0"]


def test_among_probes_the_one_with_the_fewest_tokens_goes_first():
    rollout = Rollout(LongestFirst(), sequences=2)
    rollout.request("g0.0.0", "g1.0.0")
    rollout.end("g0.0.0", 300), rollout.end("g1.0.0", 20)
    rollout.request("g8.0.0", "g9.0.0")  # take the worker
    rollout.request("g0.0.1", "g1.0.1")
    assert rollout.queue() == ["g1.0.1", "g0.0.1"]


def test_another_trajectory_becomes_the_probe_when_the_first_is_cancelled():
    rollout = Rollout(LongestFirst())
    rollout.request("g0.0.0", "g0.1.0", "g0.2.0", "g1.0.0", "g1.1.0")
    rollout.cancel("g0.0.0")
    assert rollout.started == ["g0.0.0", "g1.0.0"]
    assert rollout.queue() == ["g0.1.0", "g0.2.0", "g1.1.0"]


def learn(rollout, outcome, lengths):
    """Finish trajectories whose tool returned `outcome` after 10 tokens, and that then generated
    the given tokens."""
    for i, length in enumerate(lengths):
        name = f"g{1000 + i}.{outcome}"
        rollout.request(f"{name}.0"), rollout.end(f"{name}.0", 10)
        rollout.request(f"{name}.1", outcome=outcome), rollout.end(f"{name}.1", length, last=True)


def queue_after(order, *outcomes):
    """Return the order of trajectories that each had a turn of 10 tokens and then its outcome."""
    rollout = Rollout(order, sequences=8)
    learn(rollout, "ok", [5] * 20)
    learn(rollout, "failed", [500] * 20)
    for i in range(len(outcomes)):
        rollout.request(f"g{i}.0.0"), rollout.end(f"g{i}.0.0", 10)
    rollout.request(*(f"g{90 + i}.0.0" for i in range(8)))  # take the worker
    for i, outcome in enumerate(outcomes):
        rollout.request(f"g{i}.0.1", outcome=outcome)
    return [int(turn[1:].partition(".")[0]) for turn in rollout.queue()]


def test_outcomes_that_were_followed_by_much_work_lead_to_a_lower_level():
    assert queue_after(Mlfq([100], "short", 1000), "failed", "ok", "failed", "ok") == [1, 3, 0, 2]
    reverse = queue_after(Mlfq([100], "long", 1000), "ok", "failed", "ok", "failed")
    assert reverse == [1, 3, 0, 2]


def test_a_level_yields_only_to_as_many_arrivals_as_patience_allows():
    assert queue_after(Mlfq([100], "short", 2), "failed", "ok", "ok", "ok") == [1, 0, 2, 3]
    assert queue_after(Mlfq([100], "short", 0), "failed", "ok", "ok", "ok") == [0, 1, 2, 3]


def test_without_evidence_a_trajectory_above_its_levels_limit_sinks():
    rollout = Rollout(Mlfq([100], "short", 1000), sequences=2)
    rollout.request("g0.0.0", "g1.0.0")
    rollout.end("g0.0.0", 150), rollout.end("g1.0.0", 50)
    rollout.request("g8.0.0", "g9.0.0", "g0.0.1", "g1.0.1")
    assert rollout.queue() == ["g1.0.1", "g0.0.1"]


def test_a_node_has_the_mean_and_the_90th_percentile_of_the_tokens_left():
    tree = CausalTree()
    for left in range(1, 11):
        tree.add(["failed"], [7], 7 + 10 * left)
    assert tree.left(["failed"]) == (55.0, 100)
    assert tree.left([]) == (62.0, 107)


def test_an_unknown_sequence_is_looked_up_by_its_longest_known_prefix():
    tree = CausalTree()
    assert tree.left(["ok"]) is None
    tree.add(["ok", "ok"], [10, 20], 50)
    assert tree.left(["ok", "failed"]) == (40.0, 40)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3 * WINDOW))
def test_a_node_forgets_what_is_older_than_its_window(lengths):
    tree = CausalTree()
    for length in lengths:
        tree.add([], [], length)
    recent = sorted(lengths[-WINDOW:])
    mean, p90 = tree.left([])
    assert mean == pytest.approx(sum(recent) / len(recent))
    assert p90 == recent[min(len(recent) - 1, len(recent) * 9 // 10)]


def test_lengths_under_an_early_policy_are_forgotten_after_two_generations():
    tree = CausalTree()
    tree.add(["failed"], [0], 900)
    for _ in range(2 * GENERATION):
        tree.add(["ok"], [0], 5)
    assert tree.left(["failed"]) == (5.0, 5), "the root's values"
