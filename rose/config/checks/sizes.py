"""Sizes that no cluster has, or that vLLM refuses as an engine starts: said before anything does.

Left out: what the model's shape and the machine's memory decide (checks/model.py,
rose/launch/plan.py).
"""

from __future__ import annotations

from rose.config.checks.need import Need
from rose.config.tree import Config

MOST_RANKS = 2**16  # of a run: more than any MPI launcher starts, and each is an entry of the plan


def check(c: Config, need: Need) -> None:
    """The number of ranks, and of an engine what its steps hold."""
    _check_ranks(c, need)
    if c.rollout.replay is None:
        _check_steps(c, need)


def _check_ranks(c: Config, need: Need) -> None:
    parts = {
        "trainer.ranks": c.trainer.ranks,
        "rollout.workers": c.rollout.workers,
        "rollout.hybrid": c.rollout.hybrid,
        "rollout.environment_hosts": c.rollout.environment_hosts,
        "reward.ranks": c.reward.pools,
    }
    largest = max(parts, key=parts.__getitem__)
    need(
        sum(parts.values()) < MOST_RANKS,
        largest,
        f"a run has at most {MOST_RANKS} ranks, and this one would have {1 + sum(parts.values())}",
    )


def _check_steps(c: Config, need: Need) -> None:
    """vLLM wants a token of a step for each sequence, and drafts within the context."""
    r = c.rollout
    tokens = r.step_tokens(c.model.max_context, c.deterministic)
    need(
        c.deterministic or r.max_sequences <= tokens,
        "rollout.max_sequences",
        f"at most rollout.max_batched_tokens={r.max_batched_tokens}: each takes one token of an "
        "engine's step",
    )
    need(
        r.draft.method == "none" or r.draft.tokens < c.model.max_context,
        "rollout.draft.tokens",
        f"below model.max_context={c.model.max_context}, which a draft can't pass; few drafts of "
        "more than 16 tokens are accepted whole",
    )
