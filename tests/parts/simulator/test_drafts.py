"""Simulated engines that draft, against one that takes every step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.simulator import spec
from rose.parts.simulator.drafts import DraftingEngine, Ended
from rose.parts.simulator.engine import SimEngine
from tests.parts.simulator.clusters import cluster, run
from tests.parts.simulator.test_engine import STEP, arrivals, sequence
from tests.parts.simulator.test_engine import run as ends

SIBLINGS = (0, 2)
FREE = spec.StepTime(0.01, 0.0, 0.0, 1e-4, 1e-6)  # where a drafted token costs little


def drafts(accepted, drafted=None, adaptive=False, lookup_s=0.0, siblings=SIBLINGS):
    accepted = np.array(accepted, float)
    drafted = 2 * accepted if drafted is None else np.array(drafted, float)
    return spec.Drafts(siblings, drafted, accepted, lookup_s, adaptive)


def engine(what, step=STEP, sequences=8, batched=512, kv=100_000, caches=False):
    ended = Ended()
    return DraftingEngine(spec.Engine(step, sequences, batched, kv, caches, what), ended), ended


@settings(max_examples=25, deadline=None)
@given(arrivals, st.integers(1, 5), st.integers(64, 700), st.integers(900, 3000))
def test_an_engine_that_never_finds_a_draft_is_one_without(drawn, sequences, batched, kv):
    drawn = sorted((at, f"s{i}", context, tokens) for i, (at, context, tokens) in enumerate(drawn))
    none = np.zeros((2, 3))
    found = []
    plain = SimEngine(spec.Engine(STEP, sequences, batched, kv, False))
    for each in (engine(drafts(none, adaptive=True), STEP, sequences, batched, kv)[0], plain):
        ended = []
        for at, key, context, tokens in drawn:
            ended += ends(each, at)
            each.add(at, sequence(key, context, tokens))
        found.append((dict((key, at) for at, key in ended + ends(each)), each.preemptions))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6) and found[0][1] == found[1][1]


def taken(tokens, rates, drafted, step, context):
    """{i: end} of sequences that decode from 0 on, by one loop round per step."""
    now, made, found = 0.0, np.ones(len(tokens)), {}  # the first token is the prefill's
    at = np.full(len(tokens), context + 1.0)
    while len(found) < len(tokens):
        on = np.array([i for i in range(len(tokens)) if i not in found])
        computed = len(on) + drafted[on].sum()
        now += max(step.c0 + step.c3 * computed, step.c1 * computed) + step.c5
        now += step.c4 * at[on].sum()
        made[on] += rates[on]
        at[on] += rates[on]
        found |= {int(i): now for i in on if made[i] >= tokens[i] - 1e-9}
    return found


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 300), min_size=1, max_size=8), st.floats(0, 3), st.floats(0, 3))
def test_every_sequence_ends_when_it_would_if_each_drafted_step_were_taken(tokens, few, many):
    what = drafts([[few], [many]])
    e, ended = engine(what, batched=10_000)
    groups = ["talks" if i % 2 else "new" for i in range(len(tokens))]
    ended.add("talks")
    ended.add("talks")
    for i, count in enumerate(tokens):
        e.add(0.0, sequence(str(i), 100, count, group=groups[i]))
    begun = e._prefilled_at
    found = {int(key): at - begun for at, key in ends(e)}
    level = np.array([int(group == "talks") for group in groups])
    rates, drafted = 1 + what.accepted[level, 0], what.drafted[level, 0]
    assert found == pytest.approx(taken(tokens, rates, drafted, STEP, 100), abs=1e-6)
    assert e.decoded == pytest.approx(sum(tokens))
    assert e.memory.held == pytest.approx(0, abs=1e-6) and e._attended == pytest.approx(0, abs=1e-6)


def test_a_sibling_that_ends_lets_the_others_draft_more():
    alone = engine(drafts([[1.0], [3.0]]), FREE)[0]
    alone.add(0.0, sequence("a", 100, 401, group="g"))
    (without,) = [at for at, _ in ends(alone)]
    e, ended = engine(drafts([[1.0], [3.0]]), FREE)
    e.add(0.0, sequence("a", 100, 401, group="g"))
    ends(e, 0.02)
    ended.add("g")
    assert not e.sibling_ended(0.02, "g")  # one of two
    ended.add("g")
    before = e.tokens_by(0.5, e.running()[0])
    assert e.sibling_ended(0.5, "g") and e.tokens_by(0.5, e.running()[0]) >= before
    (at,) = [at for at, _ in ends(e)]
    assert 0.5 < at < 0.5 + (without - 0.5) * 0.6
    assert not e.sibling_ended(3.0, "g")


def test_what_is_drafted_follows_the_engines_rule():
    """A full batch drafts less, and nothing where that doesn't pay."""
    curve = [[0.4, 0.7, 0.9]] * 2
    step = spec.StepTime(0.01, 0.0, 0.0, 1e-3, 0.0)
    found = []
    for count in (1, 8, 64):
        what = drafts(curve, [[0.5, 1.5, 7.0]] * 2, adaptive=True)
        e, _ = engine(what, step, sequences=64, batched=10_000)
        for i in range(count):
            e.add(0.0, sequence(str(i), 1, 100))
        e.step()
        found.append(e._drafted / count)
    assert found == [1.5, 0.5, 0.0]
    slow, _ = engine(drafts(curve, adaptive=True, lookup_s=1.0), step)
    slow.add(0.0, sequence("a", 1, 100))
    slow.step()
    assert slow._drafted == 0


def test_a_full_cache_preempts_and_no_token_is_lost():
    e, _ = engine(drafts([[1.5], [1.5]]), kv=1000)
    first, second = sequence("a", 400, 300), sequence("b", 400, 300)
    e.add(0.0, first)
    e.add(0.0, second)
    assert [key for _, key in ends(e)] == ["a", "b"]
    assert e.preemptions >= 1 and first.attempt_tokens == second.attempt_tokens == 300


def test_engines_without_drafts_are_what_they_were():
    """To the last bit: the figures of commit 2451506, before some engines drafted."""
    result, _ = run(cluster())
    assert repr(result.seconds) == "47.549183213095034"
    assert [(w.decoded, w.prefilled) for w in result.workers] == [(10360, 6743), (8807, 8382)]
    assert float(result.turn_s.sum()) == pytest.approx(204.80249, abs=1e-4)
