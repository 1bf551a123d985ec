"""A statistical model of an environment's trajectories: turns, tokens, tool times, failures,
success, and their drift during training.

Lengths are lognormal with a Pareto tail: a few trajectories are many times as long as the median,
as all papers on rollout report. One part of the variance belongs to the prompt (Seer, arXiv
2511.14617: lengths within a group correlate), one to the trajectory, and the rest to each turn. As
the policy learns, success, turns and lengths move from their first to their last value,
exponentially in the version. rose/parts/simulator/domains.py has the environments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rose.parts.simulator.spec import Episode

# The largest `Domain.hardness`, in logits.
HARDEST = 100.0  # ours: every prompt is then solved always or never
# The largest medians, in tokens and seconds, that scaling a domain may give.
LONGEST = {
    "observation": 1e9,  # ours: more than in any environment
    "tool_s": 86400.0,  # ours: a day, more than in any environment
    "reset_s": 86400.0,  # ours: likewise
}
# The largest factor of a Pareto tail; larger ones are cut to it.
MOST_FACTOR = 50.0  # ours: beyond it max_new_tokens or the tool's timeout ends a turn


@dataclass(frozen=True)
class Drift:
    """A value by policy version: first + (last - first) (1 - exp(-version / steps))."""

    first: float
    last: float
    steps: float

    def at(self, version: int) -> float:
        return self.last + (self.first - self.last) * math.exp(-max(0, version) / self.steps)


def constant(value: float) -> Drift:
    return Drift(value, value, 1.0)


@dataclass(frozen=True)
class Heavy:
    """A heavy-tailed distribution: lognormal, with probability `tail` multiplied by a Pareto factor
    (smallest value 1, exponent `alpha`)."""

    median: float
    sigma: float  # standard deviation of the logarithm
    tail: float = 0.0
    alpha: float = 1.5  # ours: heavy, with a mean and no variance

    def of(self, normal: np.ndarray, tail: np.ndarray, pareto: np.ndarray) -> np.ndarray:
        """Compute samples from standard normal and two uniform draws (arrays that broadcast). The
        draws don't depend on drift, so drift scales samples and never reorders them."""
        factor = np.where(
            tail < self.tail, np.minimum((1 - pareto) ** (-1 / self.alpha), MOST_FACTOR), 1.0
        )
        return self.median * np.exp(self.sigma * normal) * factor


@dataclass(frozen=True)
class Domain:
    """The statistics of one environment, in tokens, seconds and shares."""

    name: str
    max_turns: int
    max_new_tokens: int  # per turn
    prompt: Heavy
    observation: Heavy
    output: Heavy  # per turn
    output_factor: Drift  # factor on the output's median
    turns: Heavy  # number of turns of a successful trajectory
    turns_factor: Drift  # factor on that number
    failed_turns: Heavy  # number of turns of a failing trajectory
    success: Drift  # mean success rate over prompts
    hardness: float  # standard deviation of the prompts' difficulty, in logits
    tool_s: Heavy
    tool_fails: Drift  # probability per call
    # factor on the output after a failed call (Libra, arXiv 2606.03077: that turn is longer)
    failed_output: float
    reset_s: Heavy
    crash: float  # probability per trajectory that the environment dies
    group_share: float  # the prompt's share in the variance of log lengths and turns
    trajectory_share: float  # the trajectory's share in the variance of log lengths

    def scaled(self, parameter: str, factor: float) -> Domain:
        """Return the domain with one parameter multiplied by `factor`: a number, a distribution's
        median or a drift's ends. Raises `ValueError` for other parameters."""
        value = getattr(self, parameter)
        if isinstance(value, Heavy):
            return replace(self, **{parameter: replace(value, median=value.median * factor)})
        if isinstance(value, Drift):
            return replace(
                self,
                **{parameter: replace(value, first=value.first * factor, last=value.last * factor)},
            )
        if isinstance(value, float):
            return replace(self, **{parameter: value * factor})
        raise ValueError(
            f"{parameter} of {self.name} is {value!r}: no parameter that can be scaled"
        )


class Environments:
    """A `rose.parts.simulator.spec.Environment` over one or more domains. The domain of each prompt
    is drawn by `weights` (as RollArt mixes tasks). An episode fails and ends when its context
    reaches `max_context` tokens. Raises `ValueError` if there is no domain, a domain's numbers are
    out of range, a weight is missing or not positive, or the context has no room for a prompt."""

    def __init__(
        self,
        domains: tuple[Domain, ...],
        max_context: int,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        weights = weights or (1.0,) * len(domains)
        if not domains or len(weights) != len(domains) or not all(w > 0 for w in weights):
            raise ValueError(
                f"{len(domains)} domains with weights {weights}: one positive weight each is needed"
            )
        for domain in domains:
            _check(domain)
        if max_context < (least := 2 * max(d.prompt.median for d in domains)):
            raise ValueError(
                f"max_context={max_context}: twice a prompt of {least / 2:g} tokens is the least"
            )
        self._domains, self._max_context = domains, max_context
        self._shares = np.cumsum(weights) / sum(weights)
        self.max_new_tokens = max(d.max_new_tokens for d in domains)

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[Episode]:
        """Draw the episodes of a prompt (see `rose.parts.simulator.spec.Environment.group`). The
        draws don't depend on `version`: between two systems, only drift changes an episode."""
        domain = self._domains[int(np.searchsorted(self._shares, draw.random(), "right"))]
        return _Group(domain, size, version, draw).episodes(self._max_context)


def _check(domain: Domain) -> None:
    """Raise `ValueError` if a domain, which may be scaled, has numbers out of range."""
    shares = domain.group_share + domain.trajectory_share
    if shares > 1:
        raise ValueError(
            f"group_share + trajectory_share of {domain.name} are {shares:g}: shares of one "
            "variance, 1 at most"
        )
    if domain.hardness > HARDEST:
        raise ValueError(f"hardness of {domain.name} is {domain.hardness:g}: {HARDEST:g} at most")
    for name, most in LONGEST.items():
        if (median := getattr(domain, name).median) > most:
            raise ValueError(f"{name} of {domain.name} is {median:g}: {most:g} at most")


class _Group:
    """The random draws of one group. Arrays have the shape (size, the domain's max_turns)."""

    def __init__(self, domain: Domain, size: int, version: int, draw: np.random.Generator) -> None:
        shape = (size, domain.max_turns)
        self._domain, self._size = domain, size
        self._prompt = int(
            min(max(1, _sample(domain.prompt, draw)), domain.prompt.median * MOST_FACTOR)
        )
        wins, turns = self._draw_outcomes(version, draw)
        self._won, self._turns = wins, turns
        group, mine = draw.standard_normal(), draw.standard_normal((size, 1))
        noise = self._correlated(group, mine, draw.standard_normal(shape))
        output = domain.output.of(noise, draw.random((size, 1)), draw.random((size, 1)))
        self._failed = draw.random(shape) < domain.tool_fails.at(version)
        after_failure = np.roll(self._failed, 1, axis=1)
        after_failure[:, 0] = False
        failure_factor = np.where(after_failure, domain.failed_output, 1.0)
        output *= domain.output_factor.at(version) * failure_factor
        self._output = np.clip(np.rint(output), 1, domain.max_new_tokens).astype(np.int64)
        observed = domain.observation.of(
            draw.standard_normal(shape), draw.random(shape), draw.random(shape)
        )
        self._observed = np.maximum(np.rint(observed), 0).astype(np.int64)
        self._tool_s = domain.tool_s.of(
            draw.standard_normal(shape), draw.random(shape), draw.random(shape)
        )
        self._reset_s = domain.reset_s.of(
            draw.standard_normal(size), draw.random(size), draw.random(size)
        )
        self._crashed = draw.random(size) < domain.crash

    def _draw_outcomes(
        self, version: int, draw: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw (success, number of turns) of the members, each (size,)."""
        domain, size = self._domain, self._size
        hardness, luck = draw.standard_normal(), draw.random(size)
        centre = _centre(domain.success.at(version), domain.hardness)
        wins = luck < 1 / (1 + math.exp(-centre - domain.hardness * hardness))
        noise = self._correlated(draw.standard_normal(), None, draw.standard_normal(size))
        tail, pareto = draw.random(size), draw.random(size)
        won = domain.turns.of(noise, tail, pareto) * domain.turns_factor.at(version)
        lost = domain.failed_turns.of(noise, tail, pareto)
        return wins, np.clip(np.rint(np.where(wins, won, lost)), 1, domain.max_turns).astype(
            np.int64
        )

    def _correlated(
        self, prompt: float, trajectory: np.ndarray | None, turn: np.ndarray
    ) -> np.ndarray:
        """Mix standard normal draws of the prompt, the trajectory and the turn into one, by their
        shares in the variance. Without a draw of the trajectory, its share is the turn's."""
        shares = self._domain.group_share, self._domain.trajectory_share * (trajectory is not None)
        return (
            math.sqrt(shares[0]) * prompt
            + math.sqrt(shares[1]) * (0.0 if trajectory is None else trajectory)
            + math.sqrt(1 - sum(shares)) * turn
        )

    def episodes(self, max_context: int) -> list[Episode]:
        """Return the group's episodes. An episode beyond `max_context` is cut there and fails."""
        prompt = min(self._prompt, max_context // 2)
        after = prompt + np.cumsum(self._output + self._observed, axis=1)
        room = max_context - np.concatenate([np.full((self._size, 1), prompt), after[:, :-1]], 1)
        # Room shrinks with each turn. A turn that would exceed it is cut and ends the episode.
        turns = np.minimum(self._turns, (room > 0).sum(1))
        last = np.arange(self._size), turns - 1
        won = self._won & (turns == self._turns) & (self._output <= room)[last] & ~self._crashed
        output = np.minimum(self._output, np.maximum(room, 1))
        observed = np.minimum(self._observed, np.maximum(room - output, 0))
        others = self._tool_s, self._failed, won, self._reset_s, self._crashed
        rows = zip(*(each.tolist() for each in (turns, output, observed, *others)), strict=False)
        return [
            Episode(
                prompt_tokens=prompt,
                output_tokens=tuple(output[:n]),
                observation_tokens=tuple(observed[:n]),
                tool_s=tuple(tool_s[:n]),
                failed=tuple(failed[:n]),
                reward=float(won),
                reset_s=reset_s,
                crashed=crashed,
                domain=self._domain.name,
            )
            for n, output, observed, tool_s, failed, won, reset_s, crashed in rows
        ]


def _sample(heavy: Heavy, draw: np.random.Generator) -> float:
    draws = draw.standard_normal(), draw.random(), draw.random()
    return float(heavy.of(*(np.array([each]) for each in draws))[0])


NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(32)  # numerics: points of an integral


@lru_cache(maxsize=4096)
def _centre(mean: float, sigma: float) -> float:
    """Return the logit c of a prompt of average difficulty if prompts are solved with probability
    `mean`: the mean of 1 / (1 + exp(-(c + sigma x))) over standard normal x."""
    low, high = -40.0, 40.0  # numerics: logits that enclose any mean
    while high - low > 1e-6:  # numerics: logits
        middle = (low + high) / 2
        found = float(WEIGHTS @ (1 / (1 + np.exp(-middle - sigma * NODES)))) / math.sqrt(
            2 * math.pi
        )
        low, high = (middle, high) if found < mean else (low, middle)
    return low
