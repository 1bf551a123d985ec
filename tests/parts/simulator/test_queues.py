"""The simulated engine and scheduler against queues whose answer is known in closed form.

Means over a few thousand arrivals are off by several per cent from chance alone. So an exact
recursion on the very same arrivals serves as a control variate: its mean differs from the closed
form by the same chance.
"""

import heapq
import math

import numpy as np
import pytest

from rose.parts.simulator import probes

WITHIN = 0.02
ARRIVALS = 2500
TOKENS = 200  # mean length: a service time is whole tokens


def exponential(draw, count):
    return draw.exponential(1.0, count)


def constant(draw, count):
    return np.ones(count)


def hyperexponential(draw, count):
    """Squared coefficient of variation 4.05."""
    return np.where(draw.random(count) < 0.9, 0.5, 5.5) * draw.exponential(1.0, count)


def drawn(load, workers, seed, lengths):
    """The arrivals that `probes.queue` makes, and their service times before rounding to tokens."""
    draw = np.random.default_rng(seed)
    service = lengths(draw, ARRIVALS) * TOKENS * probes.TOKEN_S
    at = np.sort(draw.random(ARRIVALS)) * ARRIVALS * TOKENS * probes.TOKEN_S / (load * workers)
    return at, service


def first_come_first_served(at, service, workers):
    """Mean time in the system; Kiefer and Wolfowitz."""
    free, total = [0.0] * workers, 0.0
    for arrival, length in zip(at, service, strict=False):
        begin = max(arrival, heapq.heappop(free))
        heapq.heappush(free, begin + length)
        total += begin + length - arrival
    return total / len(at)


def shared_processor(at, service):
    """Mean time in the system: work is done at rate 1 / (number in the system) for each of them."""
    now, done, inside, total = 0.0, 0.0, [], 0.0  # `done`: for each, since the beginning
    arrivals = [*zip(at, service, strict=False), (math.inf, 0.0)]
    for arrival, length in arrivals:
        while inside and now + (inside[0][0] - done) * len(inside) <= arrival:
            end, came = heapq.heappop(inside)
            now += (end - done) * (len(inside) + 1)
            done = end
            total += now - came
        if inside:
            done += (arrival - now) / len(inside)
        now = arrival
        heapq.heappush(inside, (done + length, arrival))
    return total / len(at)


def erlang_c(servers, offered):
    """Probability to wait in M/M/k."""
    terms = [offered**i / math.factorial(i) for i in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return last / (sum(terms) + last)


def check(load, workers, sequences, seed, lengths, exact, closed_form):
    """Compare the simulated mean, less what chance did to the exact one, with the closed form."""
    seconds = probes.queue(load, TOKENS, workers, sequences, ARRIVALS, seed, lengths)
    chance = exact(*drawn(load, workers, seed, lengths)) - closed_form
    assert seconds.mean() - chance == pytest.approx(closed_form, rel=WITHIN)


@pytest.mark.parametrize("load, workers", [(0.3, 1), (0.7, 1), (0.8, 2), (0.8, 5)])
def test_engines_with_one_sequence_each_are_an_m_m_k_queue(load, workers):
    service = TOKENS * probes.TOKEN_S
    closed = service + erlang_c(workers, workers * load) * service / (workers * (1 - load))
    exact = lambda at, s: first_come_first_served(at, s, workers)  # noqa: E731
    check(load, workers, 1, 2, exponential, exact, closed)


@pytest.mark.parametrize("lengths", [constant, exponential, hyperexponential])
def test_a_batch_whose_steps_cost_in_proportion_shares_the_processor_whatever_the_lengths(lengths):
    closed = TOKENS * probes.TOKEN_S / (1 - 0.6)  # M/G/1-PS: insensitive to the distribution
    check(0.6, 1, 1 << 20, 3, lengths, shared_processor, closed)
