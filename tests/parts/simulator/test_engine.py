"""The fast-forwarded engine against one that takes every step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.simulator import spec
from rose.parts.simulator.engine import Sequence, SimEngine
from tests.parts.simulator.stepwise import first_and_last

STEP = spec.StepTime(0.01, 2e-5, 1e-8, 3e-4, 1e-6, 0.002)


def engine(sequences=8, batched=512, kv=100_000, caches=True, step=STEP):
    return SimEngine(spec.Engine(step, sequences, batched, kv, caches))


def sequence(key, context, tokens, group=None, prompt=0):
    found = Sequence(key, group or key, prompt)
    found.context, found.left = context, tokens
    return found


def after(engine, at, *sequence_of, **more):
    """`engine`, when it has run a sequence that came at this time."""
    engine.add(at, sequence(*sequence_of, **more))
    run(engine)
    return engine


def run(engine, until=math.inf):
    """[(time, key)] of all that ends by then."""
    ended = []
    while not engine.idle and engine.due <= until:
        at = engine.due
        ended += [(at, seq.key) for seq in engine.step()]
    return ended


arrival = st.tuples(st.floats(0, 3), st.integers(1, 900), st.integers(1, 60))
arrivals = st.lists(arrival, min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(1, 5), st.integers(64, 700))
def test_every_sequence_ends_when_it_would_if_each_step_were_taken(drawn, sequences, batched):
    drawn = sorted((at, f"s{i}", context, tokens) for i, (at, context, tokens) in enumerate(drawn))
    fast, ended = engine(sequences, batched, caches=False), []
    for at, key, context, tokens in drawn:
        ended += run(fast, at)
        fast.add(at, sequence(key, context, tokens))
    ended += run(fast)
    requests = [(at, context, tokens) for at, _, context, tokens in drawn]
    taken = first_and_last(requests, STEP, sequences, batched, at_once=1e-9)
    expected = {key: last for (_, key, *_), (_, last) in zip(drawn, taken, strict=True)}
    assert {key: at for at, key in ended} == pytest.approx(expected, abs=1e-6)


def test_a_turn_after_another_prefills_only_what_is_new():
    e = after(engine(), 0.0, "a", 1000, 10)
    assert after(e, 10.0, "a", 1000 + 10 + 50, 1).prefilled == 1000 + 50


def test_a_groups_prompt_is_computed_and_held_once():
    e = engine(batched=10_000)
    for name in "abcd":
        e.add(0.0, sequence(name, 500, 5, group="g", prompt=500))
    run(e)
    assert e.prefilled == 500 + 3  # the last token of each is computed


def test_without_prefix_caching_everything_is_computed_again():
    e = engine(caches=False)
    for at in (0.0, 10.0):
        after(e, at, "a", 300, 2, group="g", prompt=300)
    assert e.prefilled == 600


@pytest.mark.parametrize("again, computed", [("b", 1), ("a", 506)])
def test_the_least_recently_used_context_goes_from_its_end_on(again, computed):
    """The engine has no room for 506 of the 3 x 1,002 tokens, and c takes some of a's place."""
    e = engine(kv=2500)
    for at, name in enumerate("abc"):
        after(e, 10.0 * at, name, 1000, 2)
    before = e.prefilled
    assert after(e, 30.0, again, 1002, 1).prefilled == before + computed


def test_a_full_cache_preempts_the_newest_which_computes_again_what_was_taken():
    e = engine(kv=1000)
    first, second = sequence("a", 400, 300), sequence("b", 400, 300)
    e.add(0.0, first)
    e.add(0.0, second)
    ended = run(e)
    assert [key for _, key in ended] == ["a", "b"]
    assert e.preemptions >= 1 and first.attempt_tokens == second.attempt_tokens == 300
    # with a's 700 tokens there is room for 300 of b's
    assert 800 + 1 <= e.prefilled <= 800 + 200 + e.preemptions


def test_what_is_taken_out_while_it_is_computed_leaves_what_is_computed():
    e, first = engine(), sequence("a", 2000, 5)
    e.add(0.0, first)
    e.step()
    e.remove(e.due, first)
    assert after(e, 5.0, "a", 2000, 5).prefilled == 2000


def test_a_sequence_larger_than_the_cache_runs_alone():
    assert after(engine(kv=100), 0.0, "a", 400, 50).decoded == 50


def test_a_cache_that_shrinks_gives_back_the_newest_with_what_they_made():
    e = engine(kv=3000)
    old, new = sequence("a", 1000, 500), sequence("b", 1000, 500)
    e.add(0.0, old)
    run(e, 1.0)
    e.add(1.0, new)
    run(e, 3.0)
    assert e.set_kv(3.0, 1600) == [new]
    assert 0 < new.attempt_tokens < 500
    assert [key for _, key in run(e)] == ["a"]


def test_what_is_removed_says_what_it_made_and_the_others_go_on():
    e = engine()
    a, b = sequence("a", 100, 100), sequence("b", 100, 100)
    e.add(0.0, a)
    e.add(0.0, b)
    run(e, 0.5)
    seen = e.tokens_by(0.5, a)
    e.remove(0.5, a)
    assert 0 < seen <= a.attempt_tokens <= seen + 1
    assert [key for _, key in run(e)] == ["b"] and b.attempt_tokens == 100


def test_an_engine_that_stands_still_is_late_by_that():
    ends = []
    for pause_s in (0.0, 2.0):
        e = engine()
        e.add(0.0, sequence("a", 100, 100))
        run(e, 0.3)
        if pause_s:
            e.pause(0.3, pause_s, recompute=False, clear=False)
        ends += [at for at, _ in run(e)]
    assert ends[1] - ends[0] == pytest.approx(2.0, abs=STEP.c0 * 2)


def test_weights_that_recompute_cost_a_prefill_of_all_that_runs():
    e = engine()
    a = sequence("a", 300, 200)
    e.add(0.0, a)
    run(e, 1.0)
    e.pause(1.0, 0.5, recompute=True, clear=True)
    made = a.attempt_tokens
    run(e)
    assert a.attempt_tokens == 200 and e.prefilled == 300 + 300 + made
