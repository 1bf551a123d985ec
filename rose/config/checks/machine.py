"""Checks of ranks, GPUs and Slurm. Left out: the machine's own limits (rose/launch/plan.py)."""

from __future__ import annotations

import os
import re

import msgspec

from rose.config.checks import time_limit
from rose.config.checks.need import Need, leaves
from rose.config.cluster import Container, Mpi, nodes_of
from rose.config.errors import ConfigError
from rose.config.tree import OVERLAPPING, Config

# Batching policies that prepare the next batch while the trainer works, so that it rarely waits.
BUSY_TRAINER = ("one_step_off", "bounded_staleness", "trajectory_async")
# Provisioning policies that never wake hybrid engines; libra uses the devices beside training.
NO_HYBRIDS = ("fixed", "libra", "on_demand", "rose", "serverless", "static")
LEAST_MIB = 1024  # bounds a job's memory from below: a rank's Python alone takes half of it
ASK_FOR_JOBS = ("on_demand", "serverless")  # provisioning policies that request capacity


def check(c: Config, need: Need) -> None:
    """Check GPUs and ranks. A run that trains from saved trajectories has neither engines nor
    environment hosts."""
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
        c.trainer.dtype == "float32" or c.trainer.zero_stage >= 2,
        "trainer.zero_stage",
        f"trainer.dtype={c.trainer.dtype} needs 2 or 3: with 0 DeepSpeed adds up gradients in "
        "bfloat16, and with 1 it takes another optimizer, whose shards can't be published; 2 is "
        "right for one rank, too",
    )
    _check_hpz(c, need)
    _check_gpus(c, engines, need)
    _check_colocation(c, need)
    _check_hybrid(c, need)
    _check_replicas(c, need)
    pools = c.reward.pools if rolls else 0
    engines += c.hybrids
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
        _check_slurm(c, engines - c.hybrids, need)


def _check_hpz(c: Config, need: Need) -> None:
    """Check that the second copy of the weights saves network traffic: its groups are smaller than
    all ranks, and each lies within a node."""
    t, key = c.trainer, "trainer.hpz"
    if t.hpz is None:
        return
    need(
        t.zero_stage == 3,
        key,
        f"needs trainer.zero_stage=3, not {t.zero_stage}: below it every "
        "rank has all weights; or null",
    )
    # trainer.offload_optimizer is allowed: DeepSpeed (stage3.py) drops the second copy at the end
    # of every update, wherever the optimizer's states are.
    need(
        t.sequence_parallel == 1,
        key,
        f"not tried with trainer.sequence_parallel={t.sequence_parallel}: null",
    )
    if t.hpz == "node":
        return
    need(
        1 < t.hpz < t.ranks and t.ranks % t.hpz == 0,
        key,
        f"must divide trainer.ranks={t.ranks} into two groups or more, of 2 ranks or more; or null",
    )
    each = c.trainers_of_node
    need(
        each % t.hpz == 0,
        key,
        f"must divide the {each} trainer ranks of each node, or the second copy is gathered over "
        f"the network, too; node, for trainer.hpz={each}, or null",
    )


def _check_gpus(c: Config, engines: int, need: Need) -> None:
    """Check that cluster.gpus suffices for trainer ranks and engines, beside each other or in
    turn."""
    ranks = c.trainer.ranks
    engine_gpus = engines * c.rollout.tensor_parallel
    shared = c.shares_devices
    gpus = max(ranks, engine_gpus) if shared else ranks + engine_gpus
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
    """Check that trainer and engines, which share devices in turn, are never needed at once."""
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


def _check_hybrid(c: Config, need: Need) -> None:
    """Check hybrid engines: the trainer waits for its batches, and provisioning wakes them then."""
    if not c.hybrids:
        return
    key, asks, batching = "rollout.hybrid", c.scheduler.provisioning.name, c.scheduler.batching.name
    need(
        c.hybrids * c.rollout.tensor_parallel <= c.trainer.ranks,
        key,
        f"at most {c.trainer.ranks // c.rollout.tensor_parallel}: a device of the trainer's for "
        f"each of rollout.tensor_parallel={c.rollout.tensor_parallel} ranks, and trainer.ranks="
        f"{c.trainer.ranks}",
    )
    need(
        not c.shares_devices,
        key,
        "0 with one GPU or colocate=true: all engines are on the trainer's devices already",
    )
    need(not c.deterministic, key, "0 with deterministic=true, which needs one engine")
    need(
        not c.trainer.stream,
        key,
        "0 with trainer.stream=true: the trainer works while trajectories run",
    )
    need(
        batching not in BUSY_TRAINER,
        "scheduler.batching.name",
        f"rollout.hybrid={c.hybrids} is for policies whose trainer waits for its batch: "
        "synchronous, tail_batching, dapo, carry_over; or rollout.hybrid=0",
    )
    need(
        asks not in NO_HYBRIDS,
        "scheduler.provisioning.name",
        f"rollout.hybrid={c.hybrids} needs a policy that says when these engines work: "
        "scheduler/provisioning=all_idle or rlboost",
    )
    need(
        c.cluster.kind == "local",
        "cluster.kind",
        f"rollout.hybrid={c.hybrids} shares the devices of one machine: cluster=gpus or local, "
        "inside one node's allocation as slurm/one_node.sbatch makes it",
    )
    need(
        c.transfer.broadcast != "nccl",
        "transfer.broadcast",
        "NCCL refuses two ranks on one GPU, and rollout.hybrid has them: auto or mpi",
    )


def _check_replicas(c: Config, need: Need) -> None:
    """Check replicas: they use an engine's device while nothing rolls out, or when the planner says
    so, and compute the same gradients as trainer ranks."""
    if not c.elastic_replicas:
        return
    key, t, asked = "trainer.elastic_replicas", c.trainer, f"{c.elastic_replicas} replicas"
    need(
        c.elastic_replicas <= c.rollout.workers,
        key,
        f"at most rollout.workers={c.rollout.workers}: each has the device of a dedicated engine",
    )
    need(
        not c.shares_devices and not c.hybrids,
        key,
        "0 with one GPU, colocate=true or rollout.hybrid: devices have one way to change sides",
    )
    need(
        c.scheduler.batching.name == "synchronous" or c.plans_replicas,
        "scheduler.batching.name",
        f"{asked} compute while nothing rolls out (synchronous), or while other engines do "
        f"({', '.join(OVERLAPPING)}); or trainer.elastic_replicas=0",
    )
    need(
        not c.plans_replicas or c.elastic_replicas < c.rollout.workers,
        key,
        f"at most {c.rollout.workers - 1} with scheduler/batching={c.scheduler.batching.name}: of "
        f"rollout.workers={c.rollout.workers} dedicated engines one at least goes on rolling out",
    )
    need(
        not c.plans_replicas or c.scheduler.provisioning.name == "libra",
        "scheduler.provisioning.name",
        f"{asked} with scheduler/batching={c.scheduler.batching.name} need a planner that says how "
        "many of them train: scheduler/provisioning=libra",
    )
    need(
        c.cluster.kind == "local",
        "cluster.kind",
        f"{asked} are tried on one machine: cluster=gpus or local, or trainer.elastic_replicas=0",
    )
    for wrong, other, right in (
        (
            c.eval.beside and not c.plans_replicas,
            "eval.beside",
            "false: engines that evaluate can't sleep",
        ),
        (c.deterministic, "deterministic", "false: gradients are summed in another order"),
        (
            c.transfer.broadcast == "nccl",
            "transfer.broadcast",
            "auto or mpi: NCCL keeps memory of an engine's device while that sleeps",
        ),
        (t.stream, "trainer.stream", "false: the trainer works while trajectories run"),
        (t.updates_per_step > 1, "trainer.updates_per_step", "1: they get weights once a step"),
        (t.lora is not None, "trainer.lora", "null: not tried with an adapter"),
        (t.router_replay, "trainer.router_replay", "false: not tried"),
        (t.sequence_parallel > 1, "trainer.sequence_parallel", "1: each computes whole rows"),
        (t.compile, "trainer.compile", "false: not tried"),
        (t.kernels != "none", "trainer.kernels", "none: not tried"),
        (
            t.offload_optimizer,
            "trainer.offload_optimizer",
            "false: DeepSpeed counts its norm early",
        ),
        (c.algorithm.kl_coef > 0, "algorithm.kl_coef", "0: they hold no reference"),
        (c.rollout.tensor_parallel > 1, "rollout.tensor_parallel", "1: each has one device"),
        (
            t.dtype != c.model.dtype,
            "model.dtype",
            f"trainer.dtype={t.dtype}: they compute with published weights",
        ),
        (
            t.zero_stage == 0 and t.dtype != "float32",
            "trainer.zero_stage",
            "2 or 3, which add gradients up in float32",
        ),
    ):
        need(not wrong, other, f"{asked} (trainer.elastic_replicas) need {right}")


def _check_mpi(mpi: Mpi, need: Need) -> None:
    """Check options and variables that are passed to srun and the system unchanged."""
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
    """Check that ranks divide evenly over their component's nodes, and that no option spans
    lines."""
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
    _check_groups(c, need)
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
    need(
        "\\" not in c.output_dir,
        "output_dir",
        "without backslashes, at which Slurm leaves the %j in the log's name as it is",
    )
    need(
        re.search(r"%[jtAa]", os.path.realpath(c.output_dir)) is None,
        "output_dir",
        "a path without %j, %t, %A and %a, in whose place submitit would write the job's numbers",
    )
    if problem := time_limit.too_short(c, c.cluster.slurm.warning_s):
        raise ConfigError(problem)
    for name in ("trainer", "rollout", "borrowed", "reward"):
        time = getattr(c.cluster.slurm, name).time
        need(
            not isinstance(time, int),
            f"cluster.slurm.{name}.time",
            "must be text: without quotes 12:00:00 is read as the number 43200, which are minutes "
            f'to Slurm; write "12:00:00" with its quotes, or "{time}" for {time} minutes (on a '
            "command line '\"12:00:00\"')",
        )
        mem = str(getattr(c.cluster.slurm, name).mem)
        need(
            not mem.isdecimal() or int(mem) == 0 or int(mem) >= LEAST_MIB,
            f"cluster.slurm.{name}.mem",
            f"a size with its unit, as 64G: {mem} is MiB to Slurm, and no rank starts in that",
        )
        for at, option in enumerate(getattr(c.cluster.slurm, name).sbatch):
            need(
                option.startswith("--"),
                f"cluster.slurm.{name}.sbatch.{at}",
                "must be an option, as --exclusive",
            )
    _check_container(c.cluster.slurm.container, need)
    for key, value in leaves(msgspec.to_builtins(c.cluster.slurm)):
        need(
            not isinstance(value, str) or value.isprintable() and value != "",
            f"cluster.slurm.{key}",
            "must be one line of text, not empty; null leaves an option out",
        )


def _check_groups(c: Config, need: Need) -> None:
    """Check that ranks which compute a row together are on one node, as they exchange activations
    in every layer. Groups larger than a node are allowed."""
    each, parts = c.trainers_of_node, c.trainer.sequence_parallel
    nodes = c.trainer.ranks // each
    need(
        parts > each or each % parts == 0,
        "trainer.sequence_parallel",
        f"the {each} trainer ranks of each of {nodes} nodes don't divide into groups of {parts}: "
        f"some would exchange every layer over the network; change it, trainer.ranks="
        f"{c.trainer.ranks} or cluster.slurm.trainer.nodes",
    )


def _check_container(container: Container | None, need: Need) -> None:
    """Check that paths are absolute, and that no value can be read as another option or mount."""
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
