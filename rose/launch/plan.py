"""Lay out a configuration with the memory of each role, and check that it fits. Pure; prints on
request.

Left out: how memory is estimated (rose/launch/memory.py) and where the ranks run
(rose/launch/local.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from rose.config import Config, ConfigError, ModelShape, check_model, cpus_of
from rose.config.checks import time_limit
from rose.launch import choices, container, exclusions, memory, on_disk
from rose.launch.layout import Rank, layout
from rose.observe.terminal import echo
from rose.policies import registry
from rose.protocol import Role

ROUNDING_GIB = 1e-6  # slack for sums of floats that should be equal
GPUS_OF_A_MACHINE = 8  # the most GPUs that a usual machine has


@dataclass(frozen=True)
class Plan:
    config: Config
    shape: ModelShape | None  # None: unknown until the model is made
    ranks: tuple[Rank, ...]
    memory: dict[Role, memory.Estimate]  # the roles that load the model; empty without its shape
    warnings: tuple[str, ...]
    doubts: tuple[str, ...] = ()  # the warnings apart from those about memory
    chosen: tuple[str, ...] = ()  # choices of `rose.launch.choices` with their reasons

    @property
    def gpus(self) -> int:
        """Return the number of GPUs. A GPU that two ranks share counts once."""
        return len({(rank.component, rank.node, gpu) for rank in self.ranks for gpu in rank.gpus})


def make(
    c: Config, shape: ModelShape | None, doubts: tuple[str, ...] = (), host_gib: float | None = None
) -> Plan:
    """Plan the configuration, with values for keys that it leaves open (`rose.launch.choices`).
    `doubts` and those found here become `Plan.warnings`. `host_gib`: memory of the machine that all
    ranks run on; None: unknown. Raises `ConfigError` if the plan can't run."""
    container.check(c)
    if shape is not None:
        check_model(c, shape)
        exclusions.check(c, shape)
    c, chosen = choices.made(c, shape)
    own = (*_check_container(c), *_check_threads(c), *_check_machine(c))
    doubts = tuple(dict.fromkeys((*doubts, *own)))  # no duplicates from an earlier plan
    if shape is None:
        doubt = "memory is not estimated: the model is not made yet and model.shape is null"
        return Plan(c, None, layout(c), {}, (*doubts, doubt), doubts, chosen)
    estimates = {Role.TRAINER: memory.trainer(c, shape)}
    if c.rollout.replay is None:
        estimates[Role.ROLLOUT] = memory.rollout(c, shape)
    if host_gib is not None and (c.hybrids or c.shares_devices and c.cluster.gpus):
        _check_host(c, estimates[Role.TRAINER], estimates[Role.ROLLOUT], host_gib)
    warnings = (*doubts, *_check_memory(c, estimates))
    return Plan(c, shape, layout(c), estimates, warnings, doubts, chosen)


def _check_threads(c: Config) -> Iterator[str]:
    """Yield doubts about more threads than CPUs: a Slurm job's ranks have only the CPUs that their
    component asks for."""
    if c.cluster.kind != "slurm":
        return
    for name in ("trainer", "rollout"):
        cpus = cpus_of(c.cluster, name, c.rollout)
        for section in (name, "transfer"):
            key, wanted = f"{section}.threads", getattr(c, section).threads
            if (wanted or 0) > cpus:
                yield (
                    f"{key}={wanted} is more than the {cpus} CPUs of each rank "
                    f"(cluster.slurm.{name}.cpus_per_task): "
                    f"threads wait for each other; {key}={cpus}, or more CPUs"
                )


def _check_machine(c: Config) -> Iterator[str]:
    """Yield a doubt about more GPUs on one machine than machines usually have."""
    if c.cluster.kind == "local" and c.cluster.gpus > GPUS_OF_A_MACHINE:
        yield (
            f"cluster.gpus={c.cluster.gpus} on one machine (cluster.kind=local), and few have more "
            f"than {GPUS_OF_A_MACHINE}: cluster=slurm lays the ranks out over nodes"
        )


def _check_limits(c: Config) -> Iterator[str]:
    """Yield doubts about limits that a job gets because the configuration doesn't name them."""
    slurm = c.cluster.slurm
    if c.cluster.kind != "slurm" or slurm is None:
        return
    if not time_limit.limits(slurm) and "SBATCH_TIMELIMIT" not in os.environ:
        yield (
            "cluster.slurm.trainer.time=null: the job gets the partition's default limit, which "
            "may be minutes, and starts later than a shorter one would; name one, such as "
            "2-00:00:00"
        )
    if str(slurm.rollout.mem) == "0" and not slurm.rollout.exclusive and c.rollout.replay is None:
        yield (
            "cluster.slurm.rollout.mem=0 with cluster.slurm.rollout.exclusive=false: asks for all "
            "of a node's memory, so that no other job with memory can run there; name what the "
            "engines need, such as 64G, or set exclusive=true"
        )


def _check_container(c: Config) -> Iterator[str]:
    """Yield doubts about programs that a run's ranks need inside the container."""
    box = c.cluster.slurm.container if c.cluster.kind == "slurm" else None
    provisioning = registry.policy("provisioning", c.scheduler.provisioning)
    if box is not None and getattr(provisioning, "asks_for_jobs", False):
        yield (
            f"scheduler.provisioning.name={c.scheduler.provisioning.name!r} submits jobs from "
            f"inside cluster.slurm.container.image={box.image}: it must have sbatch, squeue and "
            "scancel with the site's slurm.conf and munge socket (cluster.slurm.container.mounts)"
        )


def _check_memory(c: Config, estimates: dict[Role, memory.Estimate]) -> Iterator[str]:
    """Yield doubts about GPU memory that may not suffice. Raises `ConfigError` if it can't, or if a
    KV cache (on CPUs too) has no room for one sequence."""
    if Role.ROLLOUT in estimates:
        _check_cache(c, estimates[Role.ROLLOUT])
    limit = c.cluster.gpu_memory_gib
    if not c.cluster.gpus or limit is None:
        return
    if c.trainer_sleeps:
        limit -= memory.ASLEEP_GIB
        _check_share(c, c.cluster.gpu_memory_gib)
    trainer = estimates[Role.TRAINER]
    if trainer.firm > limit:
        raise ConfigError(
            f"cluster.gpu_memory_gib={c.cluster.gpu_memory_gib}: the trainer's weights, gradients "
            f"and optimizer alone take {trainer.firm:.1f} of {limit:g} GiB on each GPU; raise "
            "trainer.zero_stage or trainer.ranks, or set trainer.offload_optimizer=true"
        )
    if Role.ROLLOUT in estimates:
        rollout, share = estimates[Role.ROLLOUT], c.rollout.gpu_memory_utilization
        _check_engines(c, rollout, c.cluster.gpu_memory_gib * share)
        if rollout.total > limit:
            yield (
                f"an engine may need {rollout.total:.1f} of {limit:g} GiB, {rollout.outside:.1f} "
                f"of them beside its share; lower rollout.gpu_memory_utilization={share:g}"
                f"{_draft_keys_to_lower(c)}"
            )
    if trainer.total > limit:
        yield (
            f"the trainer may need {trainer.total:.1f} of {limit:g} GiB; "
            f"{' or '.join(_less_memory(c))}"
        )


def _draft_keys_to_lower(c: Config) -> str:
    r = c.rollout
    if r.draft.method == "none":
        return ""
    return f", rollout.draft.tokens={r.draft.tokens} or rollout.max_sequences={r.max_sequences}"


def _check_host(
    c: Config, trainer: memory.Estimate, rollout: memory.Estimate, host_gib: float
) -> None:
    """Raise `ConfigError` if trainer and engines don't fit into host memory. On CPUs both are there
    at once. If they share GPUs, the memory of the sleeping side is moved there, beside offloaded
    states."""
    engines = (c.rollout.workers + c.hybrids) * rollout.total
    states, weights = (
        memory.waiting_gib(c, trainer, rollout)
        if c.cluster.gpus
        else (c.trainer.ranks * trainer.total, engines)
    )
    offloaded, staged = memory.host_gib(c, trainer, rollout)
    # Without hybrid engines, no version is staged while the engines' weights are in host memory.
    states, weights = states + offloaded, weights + staged * (c.hybrids > 0)
    key, remedy = f"rollout.hybrid={c.hybrids}", "rollout.hybrid=0"
    if not c.hybrids:
        key = f"colocate={c.colocate}" + " (one GPU)" * (c.colocate is None)
        remedy = "an adapter (trainer.lora) or a smaller model, or colocate=false on more GPUs"
    if states + weights > host_gib:
        raise ConfigError(
            f"{key}: {states:.1f} GiB of the trainer and {weights:.1f} GiB of engines don't fit "
            f"into the {host_gib:.1f} GiB of memory that the run may take here; {remedy}"
        )


def _less_memory(c: Config) -> Iterator[str]:
    """Yield changes of the configuration by which the trainer would need less memory."""
    t = c.trainer
    if t.gradient_checkpointing is False:
        yield "set trainer.gradient_checkpointing=true"
    if t.micro_batch_tokens > c.model.max_context:
        yield f"lower trainer.micro_batch_tokens={t.micro_batch_tokens}"
    else:
        yield (
            f"lower trainer.micro_batch_tokens={t.micro_batch_tokens} with "
            f"model.max_context={c.model.max_context}"
        )
    if t.sequence_parallel < t.ranks and not t.router_replay:
        yield f"raise trainer.sequence_parallel={t.sequence_parallel}"
    if t.zero_stage < 3 and t.ranks > 1:
        yield f"raise trainer.zero_stage={t.zero_stage}"
    yield (
        "raise trainer.ranks"
        if t.offload_optimizer
        else "raise trainer.ranks, or set trainer.offload_optimizer=true"
    )


def _check_share(c: Config, limit: float) -> None:
    """Raise `ConfigError` if rollout.gpu_memory_utilization is more than a sleeping trainer leaves
    of a GPU's `limit` GiB, since vLLM would not start."""
    most = 1 - memory.ASLEEP_GIB / limit
    if c.rollout.gpu_memory_utilization > most:
        shared = f"rollout.hybrid={c.hybrids}" if c.hybrids else "colocate=true"
        raise ConfigError(
            f"rollout.gpu_memory_utilization={c.rollout.gpu_memory_utilization:g}: {shared} "
            f"leaves an engine {most:.3g} of a GPU's {limit:g} GiB: the "
            f"trainer's process keeps {memory.ASLEEP_GIB:g} GiB there in the engine's turn"
        )


def _check_cache(c: Config, rollout: memory.Estimate) -> None:
    """Raise `ConfigError` if rollout.kv_cache_gib has no room for one sequence: vLLM would not
    start."""
    cache = c.rollout.kv_cache_gib
    # The estimate assumes the model's dtype. A KV cache in another dtype may need less.
    other_dtype = "kv_cache_dtype" in c.rollout.engine_args
    if cache is not None and not other_dtype and rollout.kv_tokens < c.model.max_context:
        raise ConfigError(
            f"rollout.kv_cache_gib={cache:g}: has room for {rollout.kv_tokens} tokens, and one "
            f"sequence may have model.max_context={c.model.max_context}; raise it, or lower "
            "model.max_context"
        )


def _check_engines(c: Config, rollout: memory.Estimate, budget: float) -> None:
    """Raise `ConfigError` if an engine doesn't fit into its `budget`, GiB of each GPU."""
    own = rollout.total - rollout.outside
    if rollout.kv_tokens < c.model.max_context or own > max(budget, rollout.firm) + ROUNDING_GIB:
        r, work = c.rollout, rollout.items["activations"]
        raise ConfigError(
            f"rollout.tensor_parallel={r.tensor_parallel}: weights ({rollout.firm:.1f} GiB), a "
            f"step of rollout.max_batched_tokens={r.max_batched_tokens} tokens and "
            f"rollout.max_sequences={r.max_sequences} sequences ({work:.1f} GiB) and the KV cache "
            f"of one sequence of model.max_context={c.model.max_context} tokens don't fit into "
            f"{budget:.1f} GiB of each GPU; raise rollout.tensor_parallel, or lower "
            "rollout.kv_cache_gib or the larger of these"
        )


def show(plan: Plan, console: Console) -> None:
    """Print ranks and memory by role, totals, and warnings."""
    c = plan.config
    where = f"{plan.gpus} GPUs" if plan.gpus else "no GPU"
    table = Table(title=f"{c.name}: {len(plan.ranks)} ranks, {where}", title_justify="left")
    for column in ("role", "ranks", "threads", "GPUs each", "memory per device (GiB)"):
        table.add_column(column)
    for role in Role:
        members = [rank for rank in plan.ranks if rank.role == role]
        if not members:
            continue  # environment hosts and engines, in a replay
        table.add_row(
            role.value,
            _numbers_and_count(members),
            str(members[0].threads or "library's choice"),
            str(len(members[0].gpus)),
            _memory_cell(plan.memory.get(role)),
        )
    console.print(table)
    hybrid = f"and {c.hybrids} on the trainer's devices " if c.hybrids else ""
    source = (
        f"{c.rollout.workers} engines {hybrid}with tensor parallel {c.rollout.tensor_parallel}"
        if c.rollout.replay is None
        else f"trajectories saved in {c.rollout.replay}"
    )
    parts = c.trainer.sequence_parallel
    shared = f"{parts} ranks share each row, " if parts > 1 else ""
    echo(
        console,
        f"model {c.model.name}: {_size(plan.shape)}; {c.trainer.steps} steps of "
        f"{c.trainer.batch_size} "
        f"trajectories ({c.trainer.batch_size // c.rollout.group_size} groups of "
        f"{c.rollout.group_size}); "
        f"ZeRO stage {c.trainer.zero_stage}, {shared}{source}",
    )
    if c.trainer_sleeps and plan.memory:
        states, weights = memory.waiting_gib(
            c, plan.memory[Role.TRAINER], plan.memory[Role.ROLLOUT]
        )
        echo(
            console,
            f"colocated: trainer and {'hybrid ' * (c.hybrids > 0)}engines hold "
            f"{'the GPUs' if plan.gpus else 'memory'} in turn; "
            f"in host memory wait {states:.1f} GiB of the trainer while engines roll out, "
            f"{weights:.1f} GiB of the engines' weights while the trainer trains",
        )
    if plan.gpus:
        echo(console, f"in host memory, GiB of each rank at most: {'; '.join(_host_memory(plan))}")
    for choice in plan.chosen:
        echo(console, choice)
    if plan.shape is not None:
        echo(console, str(on_disk.of(c, plan.shape)))
    if c.cluster.kind == "slurm":
        echo(console, "; ".join(_nodes(plan)))
    for warning in (*plan.warnings, *_check_limits(c)):
        echo(console, warning, label="[yellow]warning:[/]")


def _numbers_and_count(members: list[Rank]) -> str:
    first, last = members[0].rank, members[-1].rank
    return str(first) if first == last else f"{first}-{last} ({len(members)})"


def _size(shape: ModelShape | None) -> str:
    if shape is None:
        return "not made yet"
    words = f"{_count(shape.parameters)} parameters"
    return (
        f"{words}, {_count(shape.active_parameters)} of them active "
        f"({shape.experts_per_token} of {shape.experts} experts)"
        if shape.experts
        else words
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _nodes(plan: Plan) -> Iterator[str]:
    """Yield a text for each Slurm component on its nodes, CPUs and memory."""
    c = plan.config
    for number, name in enumerate(("trainer", "rollout")):
        members = [rank for rank in plan.ranks if rank.component == number]
        if not members:
            continue
        component, nodes = getattr(c.cluster.slurm, name), 1 + max(rank.node for rank in members)
        each, cpus = len(members) // nodes, cpus_of(c.cluster, name, c.rollout)
        memory_words = (
            "the site's default"
            if component.mem is None
            else "all"
            if str(component.mem) == "0"
            else component.mem
        )
        yield (
            f"{name}: {nodes} node{'s' * (nodes > 1)} with {each} ranks x {cpus} CPUs = "
            f"{each * cpus} CPUs and {memory_words} of "
            "the memory"
        )


def _host_memory(plan: Plan) -> Iterator[str]:
    """Yield a text for each role on the host memory that a rank may take, beside the memory that
    every Python process takes."""
    for role, estimate in plan.memory.items():
        if estimate.host:
            parts = " + ".join(f"{name} {gib:.1f}" for name, gib in estimate.host.items())
            yield f"{role.value} {parts}"


def _memory_cell(estimate: memory.Estimate | None) -> str:
    if estimate is None:
        return "-"
    lines = [f"{name} {gib:.2f}" for name, gib in estimate.items.items()]
    tokens = f" ({estimate.kv_tokens:,} tokens)" if estimate.kv_tokens else ""
    return "\n".join([*lines[:-1], lines[-1] + tokens, f"total {estimate.total:.2f}"])
