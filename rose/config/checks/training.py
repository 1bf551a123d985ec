"""Checks of batches, adapters and drafts, and of options that exclude each other."""

from __future__ import annotations

from rose import extensions
from rose.config.checks.need import MOST_AT_ONCE, Need, drafts
from rose.config.trainer import FUSED, SLOT_RANKS
from rose.config.tree import Config

# Arguments of batching policies that count batches in flight, or versions with a batch each.
BATCHES = ("alpha", "carry", "eta", "oversample", "running", "spare", "speculation", "staleness")
MOST_BATCHES = 1000  # largest value of these arguments; a larger one is a typing error


def check(c: Config, need: Need) -> None:
    _check_batch(c, need)
    _check_at_once(c, need)
    _check_branching(c, need)
    _check_lora(c, need)
    _check_draft(c, need)
    _check_router_replay(c, need)
    need(
        c.trainer.kernels != "liger" or c.cluster.gpus > 0,
        "trainer.kernels",
        "Triton's need GPUs: none",
    )


def _check_batch(c: Config, need: Need) -> None:
    """Check that a batch divides into groups, ranks and updates, and that a trajectory fits into a
    forward pass."""
    need(
        c.trainer.batch_size % c.rollout.group_size == 0,
        "trainer.batch_size",
        f"must be a multiple of rollout.group_size={c.rollout.group_size}; "
        f"try {max(1, round(c.trainer.batch_size / c.rollout.group_size)) * c.rollout.group_size}",
    )
    need(
        c.trainer.ranks % c.trainer.sequence_parallel == 0,
        "trainer.sequence_parallel",
        f"must divide trainer.ranks={c.trainer.ranks}: so many ranks compute each row together",
    )
    replicas = (
        f"trainer.ranks={c.trainer.ranks} ranks"
        if c.trainer.sequence_parallel == 1
        else f"{c.trainer.replicas} times trainer.sequence_parallel={c.trainer.sequence_parallel} "
        "ranks"
    )
    need(
        c.trainer.batch_size >= c.trainer.replicas * c.trainer.updates_per_step,
        "trainer.batch_size",
        f"must give each of {replicas} at least one trajectory in each of "
        f"trainer.updates_per_step={c.trainer.updates_per_step} updates",
    )
    need(
        not c.trainer.offload_activations or c.trainer.gradient_checkpointing is not False,
        "trainer.offload_activations",
        "needs trainer.gradient_checkpointing=true: else all that layers compute would go to the "
        "host and back",
    )
    need(
        c.trainer.micro_batch_tokens >= c.model.max_context,
        "trainer.micro_batch_tokens",
        f"must hold one trajectory of model.max_context={c.model.max_context} tokens",
    )


def _check_at_once(c: Config, need: Need) -> None:
    """Bound the trajectories in flight, because the coordinator lists them. A typing error could
    fill its memory."""
    need(
        c.trainer.batch_size <= MOST_AT_ONCE,
        "trainer.batch_size",
        f"at most {MOST_AT_ONCE} trajectories a step",
    )
    for name, value in c.scheduler.batching.args.items():
        counts = name in BATCHES and isinstance(value, (int, float))
        need(
            not counts or value <= MOST_BATCHES,
            f"scheduler.batching.args.{name}",
            f"at most {MOST_BATCHES} batches at once",
        )


def _check_branching(c: Config, need: Need) -> None:
    """Check that forks come before the last turn, and that a group consists of whole trees."""
    branching, size = c.rollout.branch, c.rollout.group_size
    ways, at = branching.ways, branching.at
    if not ways:
        return
    need(c.mode != "simulate", "rollout.branch.ways", "no tree is simulated: rollout/branch=none")
    need(min(ways) > 1, "rollout.branch.ways", "2 or more at each fork; none: rollout/branch=none")
    need(
        size % branching.leaves == 0,
        "rollout.group_size",
        f"must be a multiple of {branching.leaves}, the trajectories of a tree with "
        f"rollout.branch.ways={ways}",
    )
    need(
        at is None or len(at) == len(ways) and sorted(set(at)) == at,
        "rollout.branch.at",
        f"a turn for each of the {len(ways)} forks of rollout.branch.ways, ascending; or null",
    )
    need(
        at is not None or branching.depth >= len(ways),
        "rollout.branch.depth",
        f"at least {len(ways)}: each fork has a turn of its own",
    )
    key, last = ("depth", branching.depth) if at is None else ("at", at[-1])
    for name, member in c.env.members.items():
        need(
            last < member.max_turns,
            f"rollout.branch.{key}",
            f"below {c.env.key_of(name)}.max_turns={member.max_turns}, whose turns count from 0",
        )


def _check_lora(c: Config, need: Need) -> None:
    """Check that vLLM can hold the adapter, and that rollout.engine_args doesn't set it again."""
    for name in c.rollout.engine_args:
        need("lora" not in name, f"rollout.engine_args.{name}", "is set by ROSE, from trainer.lora")
    lora = c.trainer.lora
    if lora is None:
        return
    need(
        lora.rank <= SLOT_RANKS[-1],
        "trainer.lora.rank",
        f"at most {SLOT_RANKS[-1]}, the largest that vLLM serves (max_lora_rank)",
    )
    need(len(lora.targets) > 0, "trainer.lora.targets", f"some of {', '.join(FUSED)}")
    for at, target in enumerate(lora.targets):
        key = f"trainer.lora.targets.{at}"
        need(target in FUSED, key, f"no projection of a layer; there are {', '.join(FUSED)}")
        need(target not in lora.targets[:at], key, "is named twice")
    need(
        c.cluster.gpus == 0 or c.model.dtype == "bfloat16",
        "model.dtype",
        "bfloat16: vLLM's LoRA kernels for GPUs take no float32",
    )
    need(
        c.trainer.dtype == "float32" or c.model.dtype == "bfloat16",
        "model.dtype",
        "bfloat16 with trainer.dtype=bfloat16: engines read the base weights from their own disk, "
        "and must have what the trainer has",
    )


def _check_draft(c: Config, need: Need) -> None:
    """Check speculative decoding. Drafts change a token's random numbers, not its distribution."""
    method = c.rollout.draft.method
    if method == "none":
        return
    methods = ("ngram", *extensions.draft_methods())
    need(method in methods, "rollout.draft.method", f"one of none, {', '.join(methods)}")
    for name, value in c.rollout.engine_args.items():
        need(
            not drafts(name, value),
            f"rollout.engine_args.{name}",
            f"rollout/draft={method} asks for drafts, too: leave out one of them",
        )


def _check_router_replay(c: Config, need: Need) -> None:
    """Check that vLLM can record the experts of every token."""
    for name in c.rollout.engine_args:
        need(
            name.replace("-", "_") not in ("enable_return_routed_experts", "aux_output_config"),
            f"rollout.engine_args.{name}",
            "is set by ROSE, from trainer.router_replay",
        )
