"""What the keys of a configuration must be to each other, and to the model. Left out: the machine's
own limits (rose/launch/plan.py)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rose.config import errors
from rose.config.errors import ConfigError
from rose.config.tree import (
    FUSED,
    SLOT_RANKS,
    Config,
    Container,
    ModelShape,
    Mpi,
    Serving,
    nodes_of,
)

Need = Callable[[bool, str, str], None]  # (is it so?, key, what would be right)

# of vLLM, which serving.online.engine_args may not set
OWN_ARGUMENTS = (
    "model",
    "host",
    "port",
    "served_model_name",
    "scheduler_cls",
    "worker_extension_cls",
    "api_server_count",
    "data_parallel_size",
)
# of vLLM, which rollout.engine_args may not set
OTHER_WEIGHTS = ("quantization", "dtype", "moe_backend", "enable_eplb")
NO_DRAFTS = (
    "vLLM 0.32 on CPUs samples wrong tokens with speculative decoding, without saying so "
    "(vllm-project/vllm issue 55005): leave it out, or run on GPUs; a run's own engines, where "
    "ROSE mends it, have rollout/draft=group or ngram"
)
# algorithms whose baseline is the group's mean reward
GROUP_RELATIVE = ("grpo", "turn_grpo", "tree_grpo", "dapo", "gspo", "rloo", "decoupled_ppo")
ASK_FOR_JOBS = ("on_demand", "serverless")  # provisioning policies that request capacity
SCORING_SPARE_S = 20.0  # of reward.deadline_s, for workers to start and to be noticed as hung
SHORTEST_STALE_S = 0.1  # the online engine renews its board every 20 ms, on a machine that is busy


def check(c: Config) -> None:
    """Everything that can be said without looking at the machine or the model."""
    need = _needs(msgspec.to_builtins(c))
    _check_values(c, need)
    _check_serving(c.serving, need)
    _check_env(c, need)
    _check_eval(c, need)
    _check_sandbox(c, need)
    _check_batch(c, need)
    _check_stream(c, need)
    _check_branching(c, need)
    _check_lora(c, need)
    _check_draft(c, need)
    _check_router_replay(c, need)
    _check_reward(c, need)
    _check_machine(c, need)


def drafts(name: str, value: Any) -> bool:
    """Whether this argument of vLLM asks for speculative decoding: speculative_config, spec_method
    and their like, which a command line may shorten and divide by dots."""
    return name.replace("-", "_").startswith("spec") and value is not None


def check_serving(serving: Serving) -> None:
    """The same of the serving side's section alone: an online server runs before there is a run."""
    _check_serving(serving, _needs({"serving": msgspec.to_builtins(serving)}))


def _needs(tree: dict[str, Any]) -> Need:
    """Raises `ConfigError` for the first value that is not as needed, or no finite number."""

    def need(ok: bool, key: str, remedy: str) -> None:
        if not ok:
            raise ConfigError(f"{key}={errors.value_at(tree, key)!r}: {remedy}")

    for key, value in _leaves(tree):
        need(not isinstance(value, float) or math.isfinite(value), key, "must be a finite number")
    return need


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of the tree with its dotted key."""
    if isinstance(tree, (dict, list)):
        for name, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(branch, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def _check_values(c: Config, need: Need) -> None:
    """Single values that their types don't bound."""
    need(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,=+-]{0,150}", c.name) is not None,
        "name",
        "letters, digits and . _ , = + - only, at most 151 of them; it names the run's folder",
    )
    need(
        len(c.trainer.optimizer.betas) == 2 and all(0 <= b < 1 for b in c.trainer.optimizer.betas),
        "trainer.optimizer.betas",
        "two numbers in [0, 1)",
    )
    optimizer, updates = c.trainer.optimizer, c.trainer.steps * c.trainer.updates_per_step
    need(
        optimizer.schedule == "constant" or optimizer.warmup_steps < updates,
        "trainer.optimizer.warmup_steps",
        f"below {updates}, the updates of trainer.steps={c.trainer.steps}, or the learning rate "
        f"never comes to be {optimizer.schedule}",
    )
    need(
        c.rollout.temperature > 0,
        "rollout.temperature",
        "must be greater than 0: greedy rollouts teach nothing",
    )
    for name, value in c.rollout.engine_args.items():
        need(
            name.replace("-", "_") not in OTHER_WEIGHTS,
            f"rollout.engine_args.{name}",
            "the engine's weights are the trainer's bit for bit, in model.dtype and the trainer's "
            "order: quantised or otherwise converted ones can't be updated",
        )
        need(
            c.cluster.gpus > 0 or not drafts(name, value), f"rollout.engine_args.{name}", NO_DRAFTS
        )
    relay = c.transfer.relay
    need(
        relay is None or re.fullmatch(r"https?://[^/\s]+:\d+", relay) is not None,
        "transfer.relay",
        "must be http://host:port, as `python -m rose.relay` prints it, or null",
    )
    need(
        relay is None or c.transfer.relay_token_file is not None,
        "transfer.relay_token_file",
        f"transfer.relay={relay} asks for its token: the path of a file of mode 0600 with it",
    )
    need(
        c.model.source != "folder" or c.model.path is not None,
        "model.path",
        "the model's folder is needed (model.source=folder)",
    )


def _check_serving(s: Serving, need: Need) -> None:
    """Targets, thresholds and hours of lending."""
    need(
        s.lost_after_s >= 2 * s.heartbeat_s,
        "serving.lost_after_s",
        f"at least twice serving.heartbeat_s={s.heartbeat_s:g}, or a late heartbeat is a loss",
    )
    online, lending = s.online, s.lending
    if online.slo is not None:
        for kind in ("ttft", "tpot"):
            p50, p99 = getattr(online.slo, f"{kind}_p50_s"), getattr(online.slo, f"{kind}_p99_s")
            need(
                p50 <= p99,
                f"serving.online.slo.{kind}_p50_s",
                f"at most serving.online.slo.{kind}_p99_s={p99:g}",
            )
    need(
        online.max_batched_tokens >= online.max_sequences,
        "serving.online.max_batched_tokens",
        f"at least serving.online.max_sequences={online.max_sequences}: each takes one token of a "
        "step",
    )
    for name in online.engine_args:
        need(
            name.replace("-", "_") not in OWN_ARGUMENTS,
            f"serving.online.engine_args.{name}",
            "is set by ROSE, from serving.online or for one engine of a device",
        )
    need(
        online.port == 0 or online.port != lending.control_port,
        "serving.lending.control_port",
        "is serving.online.port too; another one, or 0 for a free one",
    )
    for key, port in (("online.port", online.port), ("lending.control_port", lending.control_port)):
        need(port < 2**16, f"serving.{key}", "must be below 65536")
    need(
        lending.kv_gib is None or lending.kv_gib >= online.kv_cache_gib,
        "serving.lending.kv_gib",
        f"at least serving.online.kv_cache_gib={online.kv_cache_gib:g}, which is part of it",
    )
    need(
        lending.reserve < lending.high_watermark,
        "serving.lending.reserve",
        f"below serving.lending.high_watermark={lending.high_watermark:g}, or nothing is ever lent",
    )
    need(
        lending.stale_after_s >= SHORTEST_STALE_S,
        "serving.lending.stale_after_s",
        f"at least {SHORTEST_STALE_S:g}: engines that live renew their boards every 0.02 to 0.05 "
        "s, and later on a busy machine",
    )
    _check_hours(lending.hours, need)


def _check_hours(hours: dict[str, float], need: Need) -> None:
    """ "HH-HH", local time, over midnight or not; no hour in two of them."""
    taken: dict[int, str] = {}
    for span, share in hours.items():
        key = f"serving.lending.hours.{span}"
        need(share <= 1, key, "a share, 0 to 1")
        found = hours_of(span)
        need(bool(found), key, 'the hours must be written as "08-20" or "22-06", from 00 to 24')
        for hour in found:
            need(hour not in taken, key, f"hour {hour:02d} is in {taken.get(hour)!r} too")
            taken[hour] = span


def hours_of(span: str) -> list[int]:
    """ "22-02" -> [22, 23, 0, 1]; [] of what is no span of hours."""
    found = re.fullmatch(r"(\d\d)-(\d\d)", span)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if low == high or low > 23 or high > 24:
        return []
    return [hour % 24 for hour in range(low, high if high > low else high + 24)]


def _check_env(c: Config, need: Need) -> None:
    """Each member alone, and that there is one."""
    need(
        len(c.env.members) > 0,
        "env.members",
        "a mixture needs members: env=games has some, and one more, here "
        "called more, is +env@env.members.more=reasoning +env.members.more.weight=1",
    )
    for name, member in c.env.members.items():
        key = c.env.key_of(name)
        need(
            key == "env" or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None,
            key,
            f"letters, digits, _ and - only in a member's name, which is {name!r}",
        )
        need(
            member.max_new_tokens < c.model.max_context,
            f"{key}.max_new_tokens",
            f"one turn must fit into model.max_context={c.model.max_context}",
        )


def _check_eval(c: Config, need: Need) -> None:
    """Sets that can be told from the trained environments, and what needs evaluations between
    steps."""
    e = c.eval
    for name, one in e.sets.items():
        key = f"eval.sets.{name}"
        need(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None,
            f"{key}.name",
            f"letters, digits, _ and - only in a set's name, which is {name!r}",
        )
        need(
            name not in c.env.members,
            f"{key}.name",
            f"env has a member {name} already: another name for the set",
        )
        need(
            one.max_new_tokens < c.model.max_context,
            f"{key}.max_new_tokens",
            f"one turn must fit into model.max_context={c.model.max_context}",
        )
    for name in ("", *e.sets):
        samples, temperature = e.of(name)
        own = f".sets.{name}" if name and e.sets[name].temperature is not None else ""
        need(
            samples == 1 or temperature > 0,
            f"eval{own}.temperature",
            f"above 0, as {samples} greedy samples of a task would all be the same",
        )
    need(
        not e.keep_best or e.every > 0 or c.mode != "train",
        "eval.every",
        "above 0: eval.keep_best=true compares evaluations between steps",
    )
    need(
        e.stop.patience == 0 or e.every > 0,
        "eval.every",
        f"above 0: eval.stop.patience={e.stop.patience} counts evaluations between steps",
    )
    need(
        not (e.stop.patience or e.keep_best) or e.episodes > 0 or bool(e.sets),
        "eval.episodes",
        "above 0, or an eval.sets: eval.stop and eval.keep_best go by held-out tasks",
    )
    need(
        not e.beside or not (c.deterministic or c.shares_devices),
        "eval.beside",
        "false, with deterministic=true or devices that trainer and engines share in turn: "
        "evaluation and training would be one after the other anyway",
    )
    need(
        not e.beside or c.transfer.in_flight != "finish",
        "transfer.in_flight",
        "recompute or keep, with eval.beside=true: new weights would wait for evaluation turns",
    )


def _check_sandbox(c: Config, need: Need) -> None:
    for key in ("store", "local"):
        folder = getattr(c.sandbox, key)
        need(folder is None or os.path.isabs(folder), f"sandbox.{key}", "a path from the root")


def _check_batch(c: Config, need: Need) -> None:
    """Trajectories of a step among groups, ranks and updates; tokens of a trajectory among turns
    and passes."""
    need(
        c.trainer.batch_size % c.rollout.group_size == 0,
        "trainer.batch_size",
        f"must be a multiple of rollout.group_size={c.rollout.group_size}; "
        f"try {max(1, round(c.trainer.batch_size / c.rollout.group_size)) * c.rollout.group_size}",
    )
    relative = c.algorithm.name in GROUP_RELATIVE or c.algorithm.args.get("baseline") == "group"
    need(
        c.rollout.group_size > 1 or not relative or c.mode != "train",
        "rollout.group_size",
        f"at least 2: algorithm={c.algorithm.name} compares the trajectories of a group with each "
        "other, and learns "
        "nothing from one alone; algorithm=reinforce_pp does without groups",
    )
    need(
        c.rollout.group_size > 1 or not c.algorithm.dynamic_sampling,
        "rollout.group_size",
        "at least 2: algorithm.dynamic_sampling=true refuses groups whose rewards are all equal, "
        "and those of a "
        "group of one always are",
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
        not c.trainer.offload_activations or c.trainer.gradient_checkpointing,
        "trainer.offload_activations",
        "needs trainer.gradient_checkpointing=true: else all that layers compute would go to the "
        "host and back",
    )
    need(
        c.trainer.micro_batch_tokens >= c.model.max_context,
        "trainer.micro_batch_tokens",
        f"must hold one trajectory of model.max_context={c.model.max_context} tokens",
    )


def _check_stream(c: Config, need: Need) -> None:
    """What the parts of a batch must not know of the rest, nor the trainer share with rollouts."""
    if not c.trainer.stream:
        return
    key = "trainer.stream"
    need(
        c.trainer.updates_per_step == 1,
        key,
        f"needs trainer.updates_per_step=1, not {c.trainer.updates_per_step}: which groups belong "
        "to an update is known when all are in",
    )
    need(
        not c.deterministic,
        key,
        "deterministic=true needs false: gradients are summed in the order in which groups finish",
    )
    need(
        not c.shares_devices,
        key,
        "the trainer's devices are the engines' while trajectories run: colocate=false",
    )


def _check_branching(c: Config, need: Need) -> None:
    """Forks within the turns that there are, and whole trees in a group."""
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
    """What vLLM can hold of an adapter, and that nobody sets its arguments twice."""
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
    """Drafts change which random numbers a token gets, not its distribution."""
    method = c.rollout.draft.method
    if method == "none":
        return
    need(
        not c.deterministic,
        "rollout.draft.method",
        "deterministic=true needs rollout/draft=none: which random numbers a token gets depends on "
        "the drafts, and these on which turns run together",
    )
    need(
        c.trainer.lora is None,
        "rollout.draft.method",
        "drafts are not tried with an adapter: trainer.lora=null or rollout/draft=none",
    )
    need(
        method != "suffix" or c.cluster.gpus > 0,
        "rollout.draft.method",
        "suffix is tested on no CPU: rollout/draft=group or ngram",
    )
    for name, value in c.rollout.engine_args.items():
        need(
            not drafts(name, value),
            f"rollout.engine_args.{name}",
            f"rollout/draft={method} asks for drafts, too: leave out one of them",
        )


def _check_router_replay(c: Config, need: Need) -> None:
    """Where the experts of every token can be recorded."""
    for name in c.rollout.engine_args:
        need(
            name.replace("-", "_") not in ("enable_return_routed_experts", "aux_output_config"),
            f"rollout.engine_args.{name}",
            "is set by ROSE, from trainer.router_replay",
        )
    if not c.trainer.router_replay:
        return
    key = "trainer.router_replay"
    need(
        c.trainer.sequence_parallel == 1,
        key,
        f"not with trainer.sequence_parallel={c.trainer.sequence_parallel}: 1",
    )
    if c.rollout.replay is not None:
        return
    need(
        c.rollout.prefix_caching and not c.deterministic,
        key,
        "needs rollout.prefix_caching=true and deterministic=false: vLLM keeps the experts of "
        "prompts by the blocks of its prefix cache",
    )
    need(
        c.rollout.draft.method == "none",
        key,
        f"not tried with rollout/draft={c.rollout.draft.method}: rollout/draft=none",
    )


def _check_reward(c: Config, need: Need) -> None:
    """Workers and deadlines of a pool."""
    r = c.reward
    need(
        r.min_workers <= r.max_workers,
        "reward.min_workers",
        f"must not be more than reward.max_workers={r.max_workers}",
    )
    need(
        r.deadline_s >= 2 * r.timeout_s + SCORING_SPARE_S,
        "reward.deadline_s",
        f"at least twice reward.timeout_s={r.timeout_s:g} and {SCORING_SPARE_S:g} s: a score is "
        "tried twice, by workers that must start",
    )
    need(
        not (c.deterministic and r.adaptive and r.pools),
        "reward.adaptive",
        "deterministic=true needs false: what a score may take would depend on the machine's speed",
    )
    if r.max_jobs:
        need(
            r.pools > 0 and c.rollout.replay is None,
            "reward.max_jobs",
            "0: with reward=environment, or rollout.replay, there is nothing for them to compute",
        )
        need(
            c.cluster.kind == "slurm" or c.mode != "train",
            "reward.max_jobs",
            "they are submitted to Slurm: cluster=slurm; on this machine raise reward.max_workers="
            f"{r.max_workers} instead",
        )
        need(
            c.cluster.mpi.join,
            "reward.max_jobs",
            f"0: with cluster.mpi.name={c.cluster.mpi.name} no rank can join a run; or another "
            "cluster/mpi=",
        )
    for key, member in c.environments.values():
        unscored = member.name in ("prompts", "mcp") and member.args.get("reward", "") is None
        if unscored and not r.pools:
            raise ConfigError(
                f"{key}.args.reward=null: then reward= must say what an answer is "
                "worth, as reward=function; it is environment"
            )


def _check_machine(c: Config, need: Need) -> None:
    """GPUs and ranks. A run that trains from saved trajectories has neither engines nor environment
    hosts."""
    rolls = c.rollout.replay is None
    engines, hosts = (c.rollout.workers, c.rollout.environment_hosts) if rolls else (0, 0)
    if c.deterministic:
        need(
            engines <= 1,
            "rollout.workers",
            "deterministic=true needs one engine: rollout.workers=1",
        )
        need(c.trainer.dtype == "float32", "trainer.dtype", "deterministic=true needs float32")
    if c.trainer.reduce_dtype == "bfloat16":
        need(
            c.trainer.dtype == "bfloat16",
            "trainer.reduce_dtype",
            "bfloat16 needs trainer.dtype=bfloat16",
        )
        need(
            c.trainer.zero_stage > 0,
            "trainer.reduce_dtype",
            "bfloat16 needs trainer.zero_stage 2 or 3, which add gradients up in float32",
        )
    need(
        c.trainer.dtype == "float32" or c.trainer.zero_stage != 1,
        "trainer.zero_stage",
        f"trainer.dtype={c.trainer.dtype} needs 0, 2 or 3: with 1 DeepSpeed takes another "
        "optimizer, whose shards can't "
        "be published; 2 shares the same states and needs no more memory",
    )
    _check_gpus(c, engines, need)
    _check_colocation(c, need)
    pools = c.reward.pools if rolls else 0
    ranks = 1 + hosts + pools + c.trainer.ranks + engines
    need(
        c.cluster.slots is None or ranks <= c.cluster.slots,
        "cluster.slots",
        f"the run has {ranks} ranks (1 coordinator + {hosts} environment hosts + {pools} reward + "
        f"{c.trainer.ranks} trainer + "
        f"{engines} rollout); raise it or run fewer",
    )
    need(
        c.transfer.broadcast != "nccl" or c.cluster.gpus > 0,
        "transfer.broadcast",
        "nccl needs GPUs, and cluster.gpus=0; auto takes what there is",
    )
    _check_mpi(c.cluster.mpi, need)
    if (asks := c.scheduler.provisioning.name) in ASK_FOR_JOBS and c.mode == "train":
        need(
            c.cluster.kind == "slurm",
            "scheduler.provisioning.name",
            f"{asks} submits jobs to Slurm: cluster=slurm",
        )
        need(
            c.cluster.mpi.join,
            "cluster.mpi.join",
            f"with {c.cluster.mpi.name} no rank can join, and scheduler."
            f"provisioning.name={asks!r} asks for such ranks; another cluster/mpi=, or "
            "scheduler/provisioning=fixed",
        )
        need(
            c.borrows,
            "scheduler.provisioning.name",
            f"{asks} needs ranks that may join: serving.borrow=true, "
            "deterministic=false, no replay",
        )
    if c.cluster.kind == "slurm":
        need(
            c.cluster.slurm is not None,
            "cluster.slurm",
            "cluster.kind=slurm needs it; use cluster=slurm",
        )
        _check_slurm(c, engines, need)


def _check_gpus(c: Config, engines: int, need: Need) -> None:
    """Trainer ranks and engines beside each other, or in turn on the same GPUs."""
    ranks, of_engines, shared = (
        c.trainer.ranks,
        engines * c.rollout.tensor_parallel,
        c.shares_devices,
    )
    gpus = max(ranks, of_engines) if shared else ranks + of_engines
    parts = (
        f"trainer.ranks={ranks} {'or' if shared else '+'} {engines} engines x "
        "rollout.tensor_parallel="
        f"{c.rollout.tensor_parallel}"
    )
    remedy = "raise it, or lower trainer.ranks or rollout.workers"
    if not shared and engines and c.cluster.kind == "local":
        remedy += ", or share them in turn: colocate=true"
    need(
        c.cluster.gpus == 0 or gpus <= c.cluster.gpus,
        "cluster.gpus",
        f"the run needs {gpus} ({parts}); {remedy}",
    )


def _check_colocation(c: Config, need: Need) -> None:
    """Trainer ranks and engines take turns: nothing may want both at once."""
    if not c.shares_devices:
        return
    batching = c.scheduler.batching.name
    need(
        batching == "synchronous",
        "scheduler.batching.name",
        "one GPU, or colocate=true, is shared in turn, and this policy rolls out while the trainer "
        "trains; "
        "scheduler/batching=synchronous, or two GPUs and colocate=false",
    )
    need(
        c.cluster.kind == "local",
        "cluster.kind",
        "colocate=true shares the devices of one machine: cluster=gpus or "
        "local, inside one node's allocation as slurm/one_node.sbatch makes it",
    )
    need(
        c.transfer.broadcast != "nccl",
        "transfer.broadcast",
        "NCCL refuses two ranks on one GPU, and colocate=true has them: auto or mpi",
    )


def _check_mpi(mpi: Mpi, need: Need) -> None:
    """Options and variables that srun and the system take as they are."""
    for at, option in enumerate(mpi.srun):
        need(
            option.startswith("-") and option.isprintable(),
            f"cluster.mpi.srun.{at}",
            "must be an option, as --mpi=pmi2",
        )
    for section, variables in (("env", mpi.env), ("join_env", mpi.join_env)):
        for name, value in variables.items():
            need(
                re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None and value.isprintable(),
                f"cluster.mpi.{section}.{name}",
                "must be the name of a variable, and one line of text",
            )


def _check_slurm(c: Config, engines: int, need: Need) -> None:
    """Ranks divide evenly over the nodes of their component, and nothing in an option can end its
    line."""
    parts = (
        ("trainer", c.cluster.slurm.trainer, "trainer.ranks", c.trainer.ranks, 1),
        ("rollout", c.cluster.slurm.rollout, "rollout.workers", engines, c.rollout.tensor_parallel),
    )
    for name, component, key, ranks, gpus in parts if engines else parts[:1]:
        nodes = nodes_of(component, ranks * gpus, c.cluster.gpus > 0)
        need(
            ranks % nodes == 0,
            f"cluster.slurm.{name}.nodes",
            f"{key}={ranks} ranks don't divide evenly over {nodes} nodes; change one of them",
        )
        need(
            not c.cluster.gpus or ranks // nodes * gpus <= component.gpus_per_node,
            f"cluster.slurm.{name}.gpus_per_node",
            f"{ranks // nodes} ranks x {gpus} GPUs don't fit on a node; raise "
            f"cluster.slurm.{name}.nodes={nodes}",
        )
    need(
        c.cluster.slurm.borrowed.nodes in (None, 1),
        "cluster.slurm.borrowed.nodes",
        "such a job is one engine: 1",
    )
    need(
        c.cluster.slurm.reward.nodes in (None, 1),
        "cluster.slurm.reward.nodes",
        "such a job has one node: 1; reward.max_jobs says how many there may be",
    )
    for name in ("trainer", "rollout", "borrowed", "reward"):
        for at, option in enumerate(getattr(c.cluster.slurm, name).sbatch):
            need(
                option.startswith("--"),
                f"cluster.slurm.{name}.sbatch.{at}",
                "must be an option, as --exclusive",
            )
    _check_container(c.cluster.slurm.container, need)
    for key, value in _leaves(msgspec.to_builtins(c.cluster.slurm)):
        need(
            not isinstance(value, str) or value.isprintable() and value != "",
            f"cluster.slurm.{key}",
            "must be one line of text, not empty; null leaves an option out",
        )


def _check_container(container: Container | None, need: Need) -> None:
    """Paths that are the same on every node; nothing that could be taken for another option or
    another mount."""
    if container is None:
        return
    key = "cluster.slurm.container"
    need(
        container.python.startswith("/"),
        f"{key}.python",
        "the interpreter's absolute path inside the container, as /usr/local/bin/python",
    )
    need(
        not container.image.startswith("-"),
        f"{key}.image",
        "a file, or a name that the runtime can pull",
    )
    for at, mount in enumerate(container.mounts):
        need(
            mount.startswith("/") and "," not in mount,
            f"{key}.mounts.{at}",
            'an absolute path, or "/host/path:/path/inside"',
        )
    for at, option in enumerate(container.args):
        need(option.startswith("-"), f"{key}.args.{at}", "must be an option, as --no-home")


def check_model(c: Config, shape: ModelShape) -> None:
    """Checks that need the model's shape. Raises `ConfigError`."""
    lora = c.trainer.lora
    if c.trainer.router_replay and not shape.experts:
        raise ConfigError(
            f"trainer.router_replay=true: model {c.model.name} is dense and has no router; "
            "trainer.router_replay=false"
        )
    if shape.experts and lora:
        raise ConfigError(
            f"trainer.lora={msgspec.to_builtins(lora)}: model {c.model.name} is a mixture of "
            f"{shape.experts} experts, whose weights are all trained: trainer.lora=null"
        )
    for target in lora.targets if lora else ():
        if lora.rank > (least := min(shape.projections[target])):
            raise ConfigError(
                f"trainer.lora.rank={lora.rank}: at most {least}, the smaller side of {target} in "
                f"model {c.model.name}"
            )
    _check_heads("trainer.sequence_parallel", c.trainer.sequence_parallel, c, shape)
    if c.rollout.replay is not None:
        return  # no engines, and all of them are about engines
    tp = c.rollout.tensor_parallel
    _check_heads("rollout.tensor_parallel", tp, c, shape)
    by_expert = bool(shape.experts) and c.rollout.engine_args.get("enable_expert_parallel", False)
    width, what = shape.intermediate, "intermediate size"
    if shape.experts:
        width, what = shape.expert_intermediate, "intermediate size of an expert,"
    if by_expert:
        width, what = shape.experts, "number of experts (enable_expert_parallel),"
    if width % tp:
        raise ConfigError(
            f"rollout.tensor_parallel={tp}: must divide the {what} {width}, of model {c.model.name}"
        )
    if c.cluster.gpus == 0 and tp > 1:
        raise ConfigError(f"rollout.tensor_parallel={tp}: needs GPUs, and cluster.gpus=0")


def _check_heads(key: str, parts: int, c: Config, shape: ModelShape) -> None:
    """So many ranks can have like shares of the attention heads. Raises `ConfigError`."""
    if shape.heads % parts:
        raise ConfigError(
            f"{key}={parts}: must divide the {shape.heads} attention heads of model {c.model.name}"
        )
    if max(shape.kv_heads, parts) % min(shape.kv_heads, parts):
        raise ConfigError(
            f"{key}={parts}: must divide, or be a multiple of, the {shape.kv_heads} "
            f"key-value heads of model {c.model.name}"
        )
