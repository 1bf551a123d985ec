"""Every token of a turn is counted once, whoever made it and however late the words arrive."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose import protocol as p
from rose.coordinator.borrowed import Borrowed
from rose.coordinator.ledger import Ledger
from tests.coordinator.conftest import packed, request, tokens

CONTEXT = [1, 2, 3]


def opened(new=10):
    ledger = Ledger()
    ledger.open(request(tokens=CONTEXT, new=new, seed=5), host=7)
    return ledger


def progress(attempt, tokens, version=0):
    return p.TurnProgress("g0.0.t0", attempt, *packed(tokens), version)


def test_experts_go_on_where_the_attempts_that_ended_left_them():
    """Two bytes a token; the trajectory knows those of its first token. What a lost attempt had is
    told by the next one, whose prompt it is."""
    ledger = opened()
    ledger.open(msgspec.structs.replace(ledger.request_of("g0.0.t0"), routed=1), host=7)
    assert ledger.dispatch("g0.0.t0", "a", 1).routed == 1
    given = msgspec.structs.replace(progress(1, [4, 5]), experts=b"abcdef", routed=3)
    assert ledger.add(given) == 2
    assert ledger.dispatch("g0.0.t0", "b", 2).routed == 4
    ledger.add(progress(2, [6]))  # and is lost
    assert ledger.dispatch("g0.0.t0", "a", 3).routed == 4
    last = progress(3, [7])
    with pytest.raises(ValueError, match="g0.0.t0: 6 bytes of experts for 3 tokens more, of 7"):
        ledger.add(msgspec.structs.replace(last, experts=b"ghijkl", routed=3))
    ledger.add(msgspec.structs.replace(last, experts=b"ghij", routed=2))
    result = ledger.close("g0.0.t0", p.FinishReason.STOP)[1]
    assert (result.experts, result.routed) == (b"abcdefghij", 5)


def test_tokens_without_their_logprobs_are_refused():
    ledger = opened()
    ledger.dispatch("g0.0.t0", "a", 1)
    with pytest.raises(ValueError, match="g0.0.t0: 8 bytes of tokens with 4 of log-prob"):
        ledger.add(p.TurnProgress("g0.0.t0", 1, p.pack_tokens([1, 2]), p.pack_floats([0.0]), 0))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=30))
def test_whatever_arrives_only_the_current_attempts_tokens_count(words):
    """Words of attempts 1..3 in any order; a new attempt starts when a higher number first shows
    up."""
    ledger, current, expected, serial = opened(new=1000), 1, [], 0
    ledger.dispatch("g0.0.t0", "a", 1)
    for attempt, count in words:
        if attempt > current:
            current = attempt
            assert tokens(ledger.dispatch("g0.0.t0", "a", attempt)) == CONTEXT + expected
        said = list(range(serial, serial + count))
        serial += count
        taken = ledger.add(progress(attempt, said))
        assert taken == (count if attempt == current else None)
        expected += said if attempt == current else []
    assert tokens(ledger.close("g0.0.t0", p.FinishReason.STOP)[1]) == expected


@pytest.mark.parametrize("experts", [b"\x7f" * 383, b"\x80" * 384], ids=["too few", "none of 128"])
def test_a_borrowed_rank_tells_of_no_experts_that_the_model_has_not(make_config, tmp_path, experts):
    c = make_config("+experiment=qwen3_30b_a3b")
    hub = SimpleNamespace(weights=SimpleNamespace(version=0))
    borrowed = Borrowed(c, tmp_path, 1, 100, lambda: hub, print, print)
    borrowed._check(msgspec.structs.replace(progress(1, [4]), experts=b"\x7f" * 384, routed=1))
    with pytest.raises(ValueError, match=f"g0.0.t0: {len(experts)} bytes of experts for 1 tokens"):
        borrowed._check(msgspec.structs.replace(progress(1, [4]), experts=experts, routed=1))
