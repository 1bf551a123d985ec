"""What trajectories of an environment look like: turns, tokens, tool times, failures, success, and
how they drift.

Lengths are lognormal with a Pareto tail: a few trajectories are many times as long as the median,
as all papers on rollout report. A part of the variance belongs to the prompt (Seer, arXiv
2511.14617: lengths of a group go together) and a part to the trajectory; the rest differs from turn
to turn. As the policy learns, success, turns and lengths go from their first to their last value,
exponentially in the version.

Each number has its source on its line (tests/sim/test_constants.py); `sim.environment.factors`
scales any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rose.sim.spec import Episode

HARDEST = 100.0  # ours: logits; every prompt is then solved always or never
LONGEST = {  # medians, tokens and seconds
    "observation": 1e9,  # ours: of no environment
    "tool_s": 86400.0,  # ours: a day, of no environment
    "reset_s": 86400.0,  # ours: likewise
}
# a tail is cut there
MOST_FACTOR = 50.0  # ours: beyond, max_new_tokens or the tool's timeout has ended it


@dataclass(frozen=True)
class Drift:
    """first + (last - first) (1 - exp(-version / steps))."""

    first: float
    last: float
    steps: float

    def at(self, version: int) -> float:
        return self.last + (self.first - self.last) * math.exp(-max(0, version) / self.steps)


def constant(value: float) -> Drift:
    return Drift(value, value, 1.0)


@dataclass(frozen=True)
class Heavy:
    """Lognormal, and with probability `tail` times a Pareto factor (smallest 1, exponent
    `alpha`)."""

    median: float
    sigma: float  # of the logarithm
    tail: float = 0.0
    alpha: float = 1.5  # ours: heavy, with a mean and no variance

    def of(self, normal: np.ndarray, tail: np.ndarray, pareto: np.ndarray) -> np.ndarray:
        """From standard normal and two uniform draws, arrays of one shape; so drift scales and
        never reorders."""
        factor = np.where(
            tail < self.tail, np.minimum((1 - pareto) ** (-1 / self.alpha), MOST_FACTOR), 1.0
        )
        return self.median * np.exp(self.sigma * normal) * factor


@dataclass(frozen=True)
class Domain:
    """One environment. Tokens, seconds, shares."""

    name: str
    max_turns: int
    max_new_tokens: int  # per turn
    prompt: Heavy
    observation: Heavy
    output: Heavy  # per turn
    output_factor: Drift  # of its median
    turns: Heavy  # of a trajectory that succeeds
    turns_factor: Drift
    failed_turns: Heavy  # of one that doesn't
    success: Drift  # mean over prompts
    hardness: float  # sigma of prompts' difficulty, in logits
    tool_s: Heavy
    tool_fails: Drift  # per call
    # factor on the turn after a call that failed (Libra, arXiv 2606.03077: it is then longer)
    failed_output: float
    reset_s: Heavy
    crash: float  # per trajectory: the environment dies
    group_share: float  # of the variance of log lengths and turns that is the prompt's
    trajectory_share: float

    def scaled(self, parameter: str, factor: float) -> Domain:
        """For the sensitivity table: a parameter (of a distribution: its median; of a drift: both
        ends) times `factor`. Raises `ValueError` for what is no number."""
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
    """`rose.sim.spec.Environment` over one or more domains, each prompt being of one of them by
    `weights` (as RollArt mixes tasks). An episode ends when its context reaches `max_context`
    tokens: that trajectory fails. Raises `ValueError` for no domain, one whose numbers are of no
    environment, weights that are none, or a context without room for a prompt."""

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
        """See `rose.sim.spec.Environment.group`. The draws don't depend on `version`: rivals that
        meet a prompt at different versions meet the same one, drifted."""
        domain = self._domains[int(np.searchsorted(self._shares, draw.random(), "right"))]
        return _Group(domain, size, version, draw).episodes(self._max_context)


def _check(domain: Domain) -> None:
    """Of a domain that was scaled. Raises `ValueError`."""
    shares = domain.group_share + domain.trajectory_share
    if shares > 1:
        raise ValueError(
            f"group_share + trajectory_share of {domain.name} are {shares:g}: shares of one "
            "variance, 1 "
            "at most"
        )
    if domain.hardness > HARDEST:
        raise ValueError(f"hardness of {domain.name} is {domain.hardness:g}: {HARDEST:g} at most")
    for name, most in LONGEST.items():
        if (median := getattr(domain, name).median) > most:
            raise ValueError(f"{name} of {domain.name} is {median:g}: {most:g} at most")


class _Group:
    """Arrays are (size, turns), turns being the most that the domain has."""

    def __init__(self, domain: Domain, size: int, version: int, draw: np.random.Generator) -> None:
        shape = (size, domain.max_turns)
        self._domain, self._size = domain, size
        self._prompt = int(
            min(max(1, _one(domain.prompt, draw)), domain.prompt.median * MOST_FACTOR)
        )
        wins, turns = self._lots(version, draw)
        self._won, self._turns = wins, turns
        group, mine = draw.standard_normal(), draw.standard_normal((size, 1))
        noise = self._mixed(group, mine, draw.standard_normal(shape))
        output = domain.output.of(noise, draw.random((size, 1)), draw.random((size, 1)))
        self._failed = draw.random(shape) < domain.tool_fails.at(version)
        after = np.roll(self._failed, 1, axis=1)
        after[:, 0] = False
        output *= domain.output_factor.at(version) * np.where(after, domain.failed_output, 1.0)
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

    def _lots(self, version: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Who succeeds, and in how many turns; each (size,)."""
        domain, size = self._domain, self._size
        hardness, luck = draw.standard_normal(), draw.random(size)
        centre = _centre(domain.success.at(version), domain.hardness)
        wins = luck < 1 / (1 + math.exp(-centre - domain.hardness * hardness))
        noise = self._mixed(draw.standard_normal(), 0.0, draw.standard_normal(size), own=False)
        tail, pareto = draw.random(size), draw.random(size)
        won = domain.turns.of(noise, tail, pareto) * domain.turns_factor.at(version)
        lost = domain.failed_turns.of(noise, tail, pareto)
        return wins, np.clip(np.rint(np.where(wins, won, lost)), 1, domain.max_turns).astype(
            np.int64
        )

    def _mixed(
        self, group: float, mine: np.ndarray | float, rest: np.ndarray, own: bool = True
    ) -> np.ndarray:
        """Standard normal, of which the prompt has `group_share` of the variance and the trajectory
        its own."""
        shares = self._domain.group_share, self._domain.trajectory_share * own
        return (
            math.sqrt(shares[0]) * group
            + math.sqrt(shares[1]) * mine
            + math.sqrt(1 - sum(shares)) * rest
        )

    def episodes(self, max_context: int) -> list[Episode]:
        prompt = min(self._prompt, max_context // 2)
        after = prompt + np.cumsum(self._output + self._observed, axis=1)
        room = max_context - np.concatenate([np.full((self._size, 1), prompt), after[:, :-1]], 1)
        # room falls from turn to turn; the turn that would pass max_context is cut there and is the
        # last
        turns = np.minimum(self._turns, (room > 0).sum(1))
        last = np.arange(self._size), turns - 1
        won = self._won & (turns == self._turns) & (self._output <= room)[last] & ~self._crashed
        output = np.minimum(self._output, np.maximum(room, 1))
        observed = np.minimum(self._observed, np.maximum(room - output, 0))
        rows = zip(
            turns.tolist(),
            output.tolist(),
            observed.tolist(),
            self._tool_s.tolist(),
            self._failed.tolist(),
            won.tolist(),
            self._reset_s.tolist(),
            self._crashed.tolist(),
            strict=False,
        )
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


def _one(heavy: Heavy, draw: np.random.Generator) -> float:
    return float(
        heavy.of(*(np.array([x]) for x in (draw.standard_normal(), draw.random(), draw.random())))[
            0
        ]
    )


NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(32)  # numerics: points of an integral


@lru_cache(maxsize=4096)
def _centre(mean: float, sigma: float) -> float:
    """c such that the mean over prompts of 1 / (1 + exp(-(c + sigma x))), x standard normal, is
    `mean`."""
    low, high = -40.0, 40.0  # numerics: logits that enclose any mean
    while high - low > 1e-6:  # numerics: logits
        middle = (low + high) / 2
        found = float(WEIGHTS @ (1 / (1 + np.exp(-middle - sigma * NODES)))) / math.sqrt(
            2 * math.pi
        )
        low, high = (middle, high) if found < mean else (low, middle)
    return low


# --------------------------------------------------------------------------- the five
# Where lines say
#
# - "the paper's rollout": tokens a turn such that a rollout without borrowed GPUs takes what it
#   took in ROSE (arXiv 2605.06534): figure 1a, table 1 and its gains (as a public reading note has
#   them: 86.9 % of a step; 496 s with ROSE, 1.31 times as fast; Qwen3-32B 70.5 %, 960 s, 1.46)
#   give some 680 s (FrozenLake) and 1,740 s (ALFWorld);
# - "traj_envs.yaml": ROLL's examples/config/traj_envs.yaml (github.com/alibaba/ROLL),
#   max_actions_per_traj, of every environment;
# - "from memory": the paper was not looked up again.

FROZEN_LAKE = Domain(
    name="frozen_lake",
    max_turns=10,  # ROLL's traj_envs.yaml
    max_new_tokens=8192,  # ours: longer than most turns
    prompt=Heavy(350, 0.05),  # ours: rules and a map; all prompts are nearly alike
    observation=Heavy(110, 0.1),  # ours: a map of 4 x 4 and a sentence
    output=Heavy(2000, 0.8, tail=0.05),  # arXiv 2605.06534, the paper's rollout; spread: ours
    output_factor=Drift(1.0, 1.2, 40),  # ours: thoughts grow as the policy learns
    turns=Heavy(6, 0.25),  # ours: a shortest path on the 4 x 4 map takes 6
    turns_factor=Drift(1.1, 1.0, 30),  # ours: detours get fewer
    failed_turns=Heavy(6, 0.6),  # ours: a hole ends it soon, wandering late
    success=Drift(0.25, 0.75, 25),  # docs/benchmarks.md: 20-28 to 68-74 % in 30 steps, tiny model
    hardness=1.2,  # ours: maps differ less than maths problems
    tool_s=Heavy(0.01, 0.5, tail=0.01),  # ours: a step of a small program
    tool_fails=Drift(0.10, 0.02, 15),  # ours: moves that can't be read, which is learnt first
    failed_output=1.5,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(0.05, 0.5, tail=0.01),  # ours: a map is drawn
    crash=0.0,
    group_share=0.3,  # ours: lengths of a group go together (Seer, arXiv 2511.14617)
    trajectory_share=0.4,  # ours: who thinks long does so in every turn
)

ALFWORLD = Domain(
    name="alfworld",
    # with 10 turns 82 % of the requests' tokens are input (ROSE: 77 to 86 %), with GiGPO's 50 97 %
    max_turns=10,  # ROLL's traj_envs.yaml
    max_new_tokens=8192,  # ours: longer than most turns
    prompt=Heavy(700, 0.15),  # ours: the task, a room and its possible actions
    observation=Heavy(90, 0.5),  # ours: what is seen after an action
    output=Heavy(1600, 0.6, tail=0.05),  # arXiv 2605.06534, the paper's rollout; spread: ours
    output_factor=constant(1.0),
    turns=Heavy(8, 0.3),  # ours: most of the 10
    turns_factor=constant(1.0),
    failed_turns=Heavy(10, 0.15),  # ours: who fails uses all turns
    success=Drift(0.148, 0.776, 50),  # GiGPO (arXiv 2505.10978), table 1, from memory; 3 x 50 steps
    hardness=1.5,  # ours: six kinds of tasks
    tool_s=Heavy(0.1, 0.7, tail=0.03),  # ours: a text simulator's step
    tool_fails=Drift(0.15, 0.03, 30),  # ours: actions that the room doesn't allow
    failed_output=1.5,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(1.5, 0.6, tail=0.03),  # ours: a game file is loaded
    crash=0.002,  # ours: rare
    group_share=0.3,  # ours: lengths of a group go together (Seer, arXiv 2511.14617)
    trajectory_share=0.3,  # ours: who thinks long does so in every turn
)

SWE = Domain(
    name="swe",
    max_turns=50,  # DeepSWE (together.ai/blog/deepswe), in training
    max_new_tokens=4096,  # ours: longer than most turns
    prompt=Heavy(2500, 0.5),  # ours: an issue and instructions
    observation=Heavy(350, 0.9, tail=0.02),  # ours: files and tests' output
    output=Heavy(300, 0.8, tail=0.05),  # ours: a command and its reason
    output_factor=Drift(1.0, 1.2, 100),  # ours: thoughts grow as the policy learns
    turns=Heavy(28, 0.4),  # ours: half of what is allowed
    turns_factor=Drift(1.0, 1.1, 100),  # ours: it learns to test more
    failed_turns=Heavy(38, 0.5),  # ours: who fails tries for longer
    success=Drift(0.23, 0.42, 70),  # DeepSWE (together.ai/blog/deepswe): 23 to 42 % in 200 steps
    hardness=2.0,  # ours: issues differ as much as maths problems
    tool_s=Heavy(0.8, 1.0, tail=0.05, alpha=1.1),  # ours: most are quick, test suites are not
    tool_fails=Drift(0.15, 0.08, 70),  # ours: commands that fail
    failed_output=1.5,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(8, 0.7, tail=0.03, alpha=1.2),  # ours: a container and a repository
    crash=0.01,  # ours: containers die now and then
    group_share=0.3,  # ours: lengths of a group go together (Seer, arXiv 2511.14617)
    trajectory_share=0.2,  # ours: less, as turns are many and of many kinds
)

SEARCH = Domain(
    name="search",
    max_turns=4,  # Search-R1's training script (arXiv 2503.09516)
    max_new_tokens=500,  # Search-R1's training script (arXiv 2503.09516)
    prompt=Heavy(250, 0.3),  # ours: a question and instructions
    observation=Heavy(480, 0.1),  # Search-R1's training script (arXiv 2503.09516): at most 500
    output=Heavy(120, 0.6, tail=0.02),  # ours: a thought and a query
    output_factor=Drift(1.0, 1.2, 80),  # ours: thoughts grow as the policy learns
    turns=Heavy(2.4, 0.35),  # ours: most questions take two or three searches
    turns_factor=Drift(0.8, 1.2, 80),  # ours: it learns to search more
    failed_turns=Heavy(3.2, 0.4),  # ours: who fails searches for longer
    success=Drift(0.25, 0.43, 100),  # Search-R1 (arXiv 2503.09516), table 2, from memory: 0.431
    hardness=2.0,  # ours: known or not
    tool_s=Heavy(0.4, 0.6, tail=0.03),  # ours: a retrieval server under load
    tool_fails=constant(0.03),  # ours: timeouts
    failed_output=1.2,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(0.01, 0.1),  # ours: nothing to set up
    crash=0.0,
    group_share=0.3,  # ours: lengths of a group go together (Seer, arXiv 2511.14617)
    trajectory_share=0.3,  # ours: who thinks long does so in every turn
)

MATHS = Domain(
    name="maths",
    max_turns=1,
    max_new_tokens=20480,  # DAPO (arXiv 2503.14476), from memory
    prompt=Heavy(120, 0.5),  # ours: a problem
    observation=Heavy(1, 0.0),
    output=Heavy(1200, 0.8, tail=0.05),  # ours: short before training, with DAPO's growth after
    output_factor=Drift(1.0, 4.0, 120),  # DAPO (arXiv 2503.14476), figures 6 and 7, from memory
    turns=Heavy(1, 0.0),
    turns_factor=constant(1.0),
    failed_turns=Heavy(1, 0.0),
    success=Drift(0.10, 0.50, 150),  # DAPO (arXiv 2503.14476), figures 6 and 7, from memory
    hardness=2.0,  # ours: many prompts are solved always or never, as DAPO's filter says
    tool_s=Heavy(0.1, 0.5, tail=0.01),  # ours: a checker of answers
    tool_fails=constant(0.0),
    failed_output=1.0,
    reset_s=Heavy(0.001, 0.1),  # ours: nothing to set up
    crash=0.0,
    group_share=0.4,  # ours: lengths of a group go together (Seer, arXiv 2511.14617)
    trajectory_share=0.0,
)

# Single responses (one turn) and R2E-Gym as other papers' evaluations have them (conf/experiment/
# papers): lengths where the paper says them, else ours, and every field that is not named as MATHS
# or SWE has it.

ROLLPACKER = replace(
    MATHS,
    name="rollpacker",
    max_new_tokens=32768,  # arXiv 2509.21009, section 6: the longest of its settings
    # P75 is 755 to 1,100 tokens, the longest reach 16k; the shape between them is ours.
    output=Heavy(450, 1.0, tail=0.05),  # arXiv 2509.21009, section 2.2
    output_factor=constant(1.0),
)

OPENR1 = replace(
    MATHS,
    name="openr1",
    max_new_tokens=14336,  # github.com/Terra-Flux/PolyRL, run_async_grpo8b_pipeline.sh
    output=Heavy(5000, 0.7),  # ours: Qwen3 thinks for some thousands of tokens
    output_factor=constant(1.0),
    success=constant(0.6),  # ours: no policy here depends on it
)

AREAL_MATHS = replace(
    MATHS,
    name="areal_maths",
    max_new_tokens=27648,  # arXiv 2505.24298, table 3
    # 128,700 tokens/s in 41.0 h of 250 steps of 8,192 responses are 9,300 each
    output=Heavy(7100, 0.8),  # arXiv 2505.24298, figure 5c and table 1; the spread is ours
    output_factor=constant(1.0),
    success=constant(0.6),  # ours: no policy here depends on it
)

SEER_VL = replace(
    MATHS,
    name="seer_vl",
    max_new_tokens=40960,  # arXiv 2511.14617, from memory
    output=Heavy(4600, 1.0),  # arXiv 2511.14617, from memory: 7,615 on average; spread: ours
    output_factor=constant(1.0),
    success=constant(0.5),  # ours: no policy here depends on it
    group_share=0.6,  # ours: the paper's figures show groups as far more alike than prompts
)

R2E = replace(
    SWE,
    name="r2e",
    max_turns=12,  # github.com/NetX-lab/Libra: r2e_max_turns
    max_new_tokens=8192,  # ours: of 30,000 for a trajectory
    prompt=Heavy(1500, 0.3),  # ours: r2e_max_prompt_tokens is 2,048
    output=Heavy(500, 0.9, tail=0.05),  # ours: a thought, then an edit or a command
    turns=Heavy(8, 0.4),  # ours: two thirds of the most
    failed_turns=Heavy(11, 0.3),  # ours: most use all turns
)

DOMAINS = {
    domain.name: domain
    for domain in (
        FROZEN_LAKE,
        ALFWORLD,
        SWE,
        SEARCH,
        MATHS,
        ROLLPACKER,
        OPENR1,
        AREAL_MATHS,
        SEER_VL,
        R2E,
    )
}


def domain(name: str) -> Domain:
    """Raises `ValueError` for an unknown name."""
    if name not in DOMAINS:
        raise ValueError(
            f"environment {name!r}: its trajectories are unknown; known are {', '.join(DOMAINS)} "
            "(rose/sim/environments.py)"
        )
    return DOMAINS[name]
