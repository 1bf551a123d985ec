"""The types of `env`, `rollout`, `reward` and `eval`: what is played, by what, and how scored."""

from __future__ import annotations

import math
from typing import Any, Literal

from rose.config.common import Count, Natural, NotNegative, Positive, Section, Share, Temperature


class Env(Section):
    """One environment. It is its own only member, under its own name: nobody need ask which kind a
    run has."""

    name: str
    args: dict[str, Any]
    max_turns: Count
    max_new_tokens: Count  # per turn
    step_timeout_s: Positive
    max_failures_in_row: Count  # or the group's size, if larger: then a task is given up
    # Seconds that a trajectory may take besides the model's turns: an agent may call for ever.
    trajectory_timeout_s: Positive = 3600.0
    max_failed_tasks: Share = 0.2  # the share of tasks that fail each time from which the run ends

    @property
    def members(self) -> dict[str, Env]:
        return {self.name: self}

    @property
    def weights(self) -> dict[str, float]:
        return {self.name: 1.0}

    def key_of(self, member: str) -> str:
        """Where in the tree the member's keys are."""
        return "env"


class Member(Env, kw_only=True):
    """One environment of a mixture."""

    weight: Positive  # its share of the groups is this by the sum over all members


class Mixture(Section):
    """Several environments; each group of trajectories is of one. A member's name is its domain to
    scheduling policies and in metrics."""

    name: Literal["mixture"]
    members: dict[str, Member]

    @property
    def weights(self) -> dict[str, float]:
        return {name: member.weight for name, member in self.members.items()}

    @property
    def max_new_tokens(self) -> int:
        """The most that a turn of any member may have."""
        return max(member.max_new_tokens for member in self.members.values())

    @property
    def step_timeout_s(self) -> float:
        """Of the slowest member."""
        return max(member.step_timeout_s for member in self.members.values())

    def key_of(self, member: str) -> str:
        return f"env.members.{member}"


class Branching(Section):
    """Training groups as trees: a trajectory goes on as several from a turn on. The trajectories
    of a group stay rollout.group_size, so it begins as that by the product of `ways`."""

    ways: list[Count]  # of each fork, one after the other; []: nothing forks
    at: list[Count] | None  # the turn before which each fork is; null: drawn for each tree
    depth: Count  # the last of the turns that are drawn

    @property
    def leaves(self) -> int:
        """Trajectories of a tree."""
        return math.prod(self.ways)


class Draft(Section):
    """Speculative decoding. `method`: of ours (group), or of vLLM's own (suffix, ngram)."""

    method: Literal["none", "group", "suffix", "ngram"]
    tokens: Count  # drafted at once for a request, at most
    adaptive: bool  # group: as many as pay, and none where none does; false: all that there are
    memory_mib: Count  # group: of an engine, for what groups have said


class Rollout(Section):
    workers: Count
    tensor_parallel: Count
    group_size: Count
    max_sequences: Count  # running at once in one engine
    max_batched_tokens: Count
    kv_cache_gib: Positive | None  # null: what gpu_memory_utilization leaves
    gpu_memory_utilization: Share
    prefix_caching: bool
    enforce_eager: bool
    stream_interval: Count  # tokens between two words about a running turn
    environment_hosts: Count
    temperature: Temperature
    top_p: Share
    top_k: Natural
    # null: on CPUs what `rose.config.from_dict` finds, else the libraries' choice
    threads: Count | None
    engine_start_timeout_s: Positive
    turn_timeout_s: Positive
    engine_restarts: Natural  # of one worker, over the run
    host_restarts: Natural  # of an environment host's process, without a turn in between
    # After a restart trajectories under way go on from their recorded turns, if the weights that
    # made them are at most so many versions old, by which the staleness of asynchronous policies
    # may then pass its bound; null: they begin anew.
    resume_turns: Natural | None
    replay: str | None  # train from the trajectories saved by another run instead of rolling out
    engine_args: dict[str, Any]  # passed to vLLM as they are
    branch: Branching = Branching([], None, 1)  # absent in what earlier releases stored
    draft: Draft = Draft("none", 8, True, 256)  # so is this
    hybrid: Natural = 0  # engines on the trainer's devices, which roll out while it waits

    def step_tokens(self, max_context: int, deterministic: bool) -> int:
        """Tokens of an engine's step at most. A prompt that may not come in parts has to fit."""
        in_parts = not deterministic and self.engine_args.get("enable_chunked_prefill", True)
        return self.max_batched_tokens if in_parts else max(self.max_batched_tokens, max_context)


class EvalSet(Env, kw_only=True):
    """Held-out tasks of one more environment, trained or not. Its name is its domain, as a
    mixture's member's."""

    episodes: Count  # tasks
    samples: Count | None = None  # of each; null: eval.samples
    temperature: Temperature | None = None  # null: eval.temperature


class EarlyStop(Section):
    """When the held-out mean reward (`rose.observe.held_out.score`) no longer grows."""

    patience: Natural  # evaluations in a row without a better one; 0: the run never stops early
    min_gain: NotNegative  # by which one is better


class Eval(Section):
    episodes: Natural  # tasks of the run's own environments
    every: Natural  # steps; 0: only before and after
    temperature: Temperature
    seed: int
    samples: Count = 1
    beside: bool = False  # training doesn't wait for those between steps
    keep_best: bool = False
    stop: EarlyStop = EarlyStop(patience=0, min_gain=0.0)
    sets: dict[str, EvalSet] = {}

    def of(self, domain: str) -> tuple[int, float]:
        """(samples of each task, their temperature)."""
        own = self.sets.get(domain)
        samples, temperature = (own.samples, own.temperature) if own else (None, None)
        return (
            self.samples if samples is None else samples,
            self.temperature if temperature is None else temperature,
        )

    def due(self, step: int, last: int) -> bool:
        """Before the first step, after the last, and each `every`."""
        between = self.every > 0 and step % self.every == 0
        return (self.episodes > 0 or bool(self.sets)) and (step in (0, last) or between)


class Reward(Section):
    """Who says what an episode is worth. `name` is a kind of rose/reward/scorers.py, `args` are its
    constructor's; environment needs no workers."""

    name: str
    args: dict[str, Any]
    ranks: Count  # CPU ranks of the run, each with a pool of workers
    min_workers: Natural  # of each rank
    max_workers: Count
    # Slurm jobs of the run that compute rewards besides, while its workers have more than they can
    max_jobs: Natural
    per_worker: Count  # scores that a worker computes at once
    idle_s: Positive  # after which a worker that isn't needed ends
    timeout_s: Positive  # of one score
    adaptive: bool  # less, once a prompt has a correct answer: RollPacker's limit
    deadline_s: Positive  # from the end of an episode to its score, waiting and retries included
    success_from: float  # a reward from here on is a success, where the scorer doesn't judge it

    @property
    def pools(self) -> int:
        """Ranks that there are."""
        return 0 if self.name == "environment" else self.ranks

    @property
    def environment_weight(self) -> float:
        """Of the environment's own reward in what an episode is worth; 0: it has no part in it."""
        parts = self.args["parts"].values() if self.name == "sum" else [{"name": self.name}]
        return sum(part.get("weight", 1.0) for part in parts if part["name"] == "environment")
