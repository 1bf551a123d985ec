"""Checks of engines: the number of ranks, values that vLLM refuses at its start, and arguments of
vLLM that a configuration may not set.

Other checks of engines: checks/model.py (the model's shape), rose/launch/plan.py (the machine's
memory) and rose/checks.py (arguments that vLLM doesn't have).
"""

from __future__ import annotations

from rose.config.checks.need import NO_DRAFTS, Need, drafts
from rose.config.tree import Config

# rollout.engine_args may not set three kinds of vLLM's arguments.
# 1. These arguments would give the engine other weights than the trainer's.
OTHER_WEIGHTS = ("quantization", "dtype", "moe_backend", "enable_eplb")
# 2. ROSE sets these arguments from keys of its own, which plan, scheduler and trainer use, too.
OWN = {
    "model": "model.path",
    "max_model_len": "model.max_context",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_num_seqs": "rollout.max_sequences",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "stream_interval": "rollout.stream_interval",
    "data_parallel_size": "rollout.workers",
    "seed": "seed",
}
# 3. ROSE sets these arguments to values that no key changes.
FIXED = (
    "logprobs_mode",
    "worker_extension_cls",
    "weight_transfer_config",
    "pipeline_parallel_size",
    "skip_tokenizer_init",
    "generation_config",
)
MOST_DRAFTED = 128  # most tokens of a draft: vLLM's MAX_SPEC_LEN, above which an engine crashes
MOST_RANKS = 2**16  # limit of a run's ranks, more than any MPI launcher starts


def check(c: Config, need: Need) -> None:
    """Check the number of ranks, the tokens of an engine step, and `rollout.engine_args`."""
    _check_ranks(c, need)
    _check_arguments(c, need)
    if c.rollout.replay is None:
        _check_steps(c, need)


def _check_ranks(c: Config, need: Need) -> None:
    """Check that the run doesn't have too many ranks."""
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
    """Check that an engine step has a token for each sequence, and that drafts fit the context."""
    r = c.rollout
    tokens = r.step_tokens(c.model.max_context, c.deterministic)
    need(
        c.deterministic or r.max_sequences <= tokens,
        "rollout.max_sequences",
        f"at most rollout.max_batched_tokens={r.max_batched_tokens}: each takes one token of an "
        "engine's step",
    )
    most = min(MOST_DRAFTED, c.model.max_context - 1)
    need(
        r.draft.method == "none" or r.draft.tokens <= most,
        "rollout.draft.tokens",
        f"at most {most}: vLLM checks no longer drafts, nor any beyond model.max_context="
        f"{c.model.max_context}",
    )


def _check_arguments(c: Config, need: Need) -> None:
    """Check the arguments of vLLM in `rollout.engine_args`."""
    for given, value in c.rollout.engine_args.items():
        name, key = given.replace("-", "_"), f"rollout.engine_args.{given}"
        need(
            name not in OTHER_WEIGHTS,
            key,
            "the engine's weights are the trainer's bit for bit, in model.dtype and the trainer's "
            "order: quantised or otherwise converted ones can't be updated",
        )
        need(name not in OWN, key, f"is set by ROSE, from {OWN.get(name)}: leave it out here")
        need(
            name not in FIXED,
            key,
            "is set by ROSE: tokens, their log-probabilities and new weights depend on it",
        )
        need(c.cluster.gpus > 0 or not drafts(given, value), key, NO_DRAFTS)
        need(
            not (c.cluster.gpus and c.trainer_sleeps) or name != "enable_sleep_mode" or bool(value),
            key,
            "engines give their GPU to the trainer between rollouts (colocate, rollout.hybrid): "
            "true, or leave it out",
        )
        need(
            name != "sleep_mode_offload_cudagraph" or not value or c.rollout.tensor_parallel == 1,
            key,
            f"not tried with rollout.tensor_parallel={c.rollout.tensor_parallel}, whose all-reduce "
            "inside CUDA graphs crashed beside it in earlier versions of vLLM: leave it out",
        )
