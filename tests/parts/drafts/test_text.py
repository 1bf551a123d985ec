"""Drafts from what a group has said, and how long they are."""

from types import SimpleNamespace

import numpy as np
import pytest

from rose.parts.drafts import gain
from rose.parts.drafts.proposer import GroupProposer
from rose.parts.drafts.text import Text, acceptance

MOST = 6


def ints(*tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def draft(text: Text, tail: int) -> list[int]:
    """By one to whom drafts have always been right."""
    path, chances = np.zeros((2, MOST), np.int32), np.zeros(MOST)
    overall = acceptance(prior=True)
    overall[:] = 1
    count = text.draft(tail, MOST, overall, path, chances)
    assert (np.diff(chances[:count]) <= 0).all() and (chances[:count] > 0).all()
    return path[0, :count].tolist()


def test_a_draft_is_what_followed_the_same_words_before():
    text = Text()
    tail = text.begin(ints(5, 6, 7, 8, 9, 1, 2, 5, 6))
    assert draft(text, tail) == [7, 8, 9, 1, 2, 5]
    assert draft(text, text.extend(tail, ints(50))) == []
    # The longest match and the most frequent continuation win.
    text = Text()
    for _ in range(3):
        text.extend(-1, ints(1, 2, 3, 4, 10, 11, 12))
    text.extend(-1, ints(9, 2, 3, 4, 20, 21, 22))
    assert draft(text, text.begin(ints(40, 3, 4)))[:2] == [10, 11]
    assert draft(text, text.begin(ints(9, 2, 3, 4)))[:2] == [20, 21]


def test_a_prompt_that_siblings_share_is_there_once_and_they_learn_from_each_other():
    text, prompt = Text(), ints(*range(100, 200))
    first = text.begin(prompt)
    other = text.begin(prompt)
    assert (first, other, len(text)) == (99, 99, 100)
    first = text.extend(first, ints(1, 2, 3, 4))
    assert draft(text, other) == [1, 2, 3, 4]
    other = text.extend(other, ints(1, 2))
    text.extend(first, ints(5, 6))
    assert draft(text, other) == [3, 4, 5, 6]


def test_a_text_that_outgrows_its_room_forgets_nothing():
    text, rng = Text(), np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 20_000).astype(np.int32)
    tail = text.begin(tokens)
    assert text.nbytes < 50 * len(tokens)
    for at in rng.integers(0, 19_000, 20):
        again = text.extend(tail, tokens[at : at + 8])
        assert draft(text, again) == tokens[at + 8 : at + 8 + MOST].tolist()


def test_chances_follow_what_was_accepted_in_the_group():
    text, overall = Text(), acceptance(prior=True)
    path, chances = np.zeros((2, MOST), np.int32), np.zeros(MOST)
    tail = text.begin(ints(1, 2, 3, 4, 5, 1, 2))
    count = text.draft(tail, MOST, overall, path, chances)
    before = chances[0]
    for _ in range(5):
        text.learn(path, count, ints(30), overall)  # the first was rejected, the rest not tried
    text.draft(tail, MOST, overall, path, chances)
    assert chances[0] < before / 2
    assert text.accepted[path[1, 0]].tolist() == [0, 5] and text.accepted[:, 1].sum() == 5


FREE = (10e-3, 1e-3, 0.0, 0.0)  # seconds: of a step, of a request, of a drafted token, of drafting


@pytest.mark.parametrize(
    "fitted, wanted",
    [
        (FREE, [3, 2]),
        ((10e-3, 1e-3, 1e-3, 0.0), [3, 1]),
        ((10e-3, 1e-3, 20e-3, 0.0), [0, 0]),
        ((10e-3, 1e-3, 0.0, 30e-3), [0, 0]),
    ],
)
def test_drafts_are_as_long_as_tokens_per_second_rise(fitted, wanted):
    chances = np.array([[0.9, 0.8, 0.5, 0.0], [0.6, 0.1, 0.0, 0.0]])
    assert gain.lengths(chances, fitted).tolist() == wanted
    # The more requests share what a step costs anyway, the less a draft saves of it.
    full, one = (10e-3, 0.5e-3, 1e-3, 0.0), np.tile([0.5, 0.25, 0.12, 0.06], (1, 1))
    assert gain.lengths(one, full)[0] > gain.lengths(np.tile(one, (32, 1)), full).max()


def test_step_times_are_fitted_to_steps_with_and_without_drafts():
    times, rng = gain.StepTimes(), np.random.default_rng(3)
    for i in range(400):
        requests, drafted = int(rng.integers(1, 17)), int(rng.integers(1, 60)) if i % 2 else 0
        seconds = 5e-3 + 1e-3 * requests + 0.2e-3 * drafted + 2e-3 * (drafted > 0)
        late = 50 if i % 97 == 0 else 1  # a page fault
        times.observe(requests, drafted, late * seconds * rng.uniform(0.95, 1.05))
    np.testing.assert_allclose(times.fitted, (5e-3, 1e-3, 0.2e-3, 2e-3), rtol=0.25)


class Engine:
    """vLLM's batch around a proposer: rows of token ids."""

    def __init__(self, adaptive: bool = False, memory_bytes: int = 2**26) -> None:
        speculative = SimpleNamespace(num_speculative_tokens=MOST)
        self.proposer = GroupProposer(SimpleNamespace(speculative_config=speculative))
        self.batch = SimpleNamespace(req_ids=[])
        self.proposer.begin(SimpleNamespace(input_batch=self.batch), adaptive, memory_bytes)

    def step(self, **rows: list[int]) -> list[list[int]]:
        """One more step of requests `g0_1_t2` with these tokens, the last of them new."""
        self.batch.req_ids = [f"{name.replace('_', '.')}#1#1-ab" for name in rows]
        ids = np.zeros((len(rows), 200), np.int32)
        for i, tokens in enumerate(rows.values()):
            ids[i, : len(tokens)] = tokens
        counts = np.array([len(tokens) for tokens in rows.values()])
        return self.proposer.propose([[t[-1]] for t in rows.values()], counts, ids)


def test_groups_learn_from_their_own_turns_alone():
    engine = Engine()
    prompt = [1, 2, 3]
    engine.step(g0_0_t0=[*prompt, 7])
    engine.step(g0_0_t0=[*prompt, 7, 8])
    engine.step(g0_0_t0=[*prompt, 7, 8, 9])
    assert engine.step(g0_1_t0=[*prompt, 7]) == [[8, 9]]
    assert engine.step(g1_0_t0=[*prompt, 7]) == [[]]


def test_a_trajectorys_next_turn_goes_on_where_it_ended():
    engine = Engine()
    engine.step(g0_0_t0=[1, 2, 3, 7, 8])
    text = engine.proposer.texts["g0"]
    engine.step(g0_0_t1=[1, 2, 3, 7, 8, 40, 41, 42])
    assert len(text) == 8
    engine.step(g0_0_t2=[1, 2, 3, 50, 51, 52, 53, 54, 55])  # its agent has edited the history
    assert len(text) == 14


def test_siblings_elsewhere_are_heard_whether_late_twice_or_with_a_gap():
    engine = Engine()
    engine.step(g0_0_t0=[1, 2, 3])
    before, made = ints(1, 2, 3).tobytes(), ints(*range(20, 60))
    feed = engine.proposer.feed
    feed("g0.1.t0", 0, before, made[:10].tobytes())
    feed("g0.1.t0", 0, before, made[:10].tobytes())
    feed("g0.1.t0", 5, before, made[5:20].tobytes())
    assert len(engine.proposer.texts["g0"]) == 3 + 3 + 20
    assert engine.step(g0_0_t0=[1, 2, 3, 20, 21]) == [[22, 23, 24, 25, 26, 27]]
    feed("g0.1.t0", 30, before, made[30:].tobytes())
    assert engine.step(g0_0_t0=[1, 2, 3, 20, 21, 52, 53])[0][:3] == [54, 55, 56]
    engine.proposer.drop(["g0"])
    assert not engine.proposer.texts
    feed("g0.1.t0", 40, before, ints(1).tobytes())  # its group has ended: a text that goes in turn
    assert list(engine.proposer.texts) == ["g0"]


def test_memory_is_bounded_by_dropping_the_groups_used_least():
    engine = Engine(memory_bytes=3 * Text().nbytes)
    for group in range(12):
        engine.step(**{f"g{group}_0_t0": [1, 2, 3]})
        if group:
            engine.step(g0_0_t0=[1, 2, 3, *range(group)])
    assert len(engine.proposer.texts) <= 4 and "g0" in engine.proposer.texts
    assert len(engine.proposer._last) <= 4


def test_drafts_that_are_never_accepted_end_by_themselves():
    """With steps that take longer the more is drafted, as seen by the gate; looks get rarer, too."""
    gate, rng = gain.Gate(adaptive=True), np.random.default_rng(0)
    chances, drafted, looks = np.full((4, MOST), 0.05), [], 0
    for _ in range(600):
        length = 0
        if gate.looks_up():
            looks += 1
            length = int(gate.decide(chances).sum())
        drafted.append(length)
        gate.observe(4, length, (4e-3 + 0.5e-3 * length) * rng.uniform(0.9, 1.1))
    assert sum(n > 0 for n in drafted[100:]) <= 5 and looks < 200


def simulated(requests: int, accepted: float, times: tuple, seed: int = 0) -> float:
    """Tokens per second over those without drafts, where steps take a, b, c, d (see `gain`) with a
    noise of a quarter, and chances are thought to be a third higher than they are."""
    a, b, c, d = times
    gate, rng, tokens, seconds = gain.Gate(adaptive=True), np.random.default_rng(seed), 0, 0.0
    for _ in range(800):
        each = np.clip(rng.beta(2 * accepted, 2 - 2 * accepted, requests), 0.01, 0.99)
        thought = np.clip(each * rng.uniform(1.0, 1.6, requests), 0.01, 0.97)
        chances = np.cumprod(np.tile(thought[:, None], MOST), axis=1)
        lengths = gate.decide(chances) if gate.looks_up() else np.zeros(requests, int)
        right = sum(
            int(np.cumprod(rng.random(n) < p).sum()) for n, p in zip(lengths, each, strict=True)
        )
        drafted = int(lengths.sum())
        took = a + b * requests + c * drafted + d * (drafted > 0)
        gate.accepted(right)
        gate.observe(requests, drafted, took * rng.lognormal(0, 0.25))
        tokens, seconds = tokens + requests + right, seconds + took
    return tokens / seconds / (requests / (a + b * requests))


MACHINES = {  # milliseconds: SmolLM2 on one core, a model of 0.4M there, what a GPU could be like
    "smollm2": (80, 25, 17, 5),
    "tiny": (2, 0.08, 0.06, 1.2),
    "gpu": (10, 0.02, 0.02, 0.5),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("requests", [1, 12])
def test_drafts_never_cost_more_than_three_percent_and_gain_where_they_can(machine, requests):
    times = MACHINES[machine]
    found = [simulated(requests, accepted, times) for accepted in (0.05, 0.3, 0.8)]
    assert min(found) > 0.97 and found[-1] > 1.15
