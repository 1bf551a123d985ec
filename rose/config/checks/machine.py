"""Checks of ranks, GPUs and Slurm. rose/launch/plan.py checks the limits of the machine itself."""

from __future__ import annotations

import os
import re

import msgspec

from rose.config.checks import time_limit
from rose.config.checks.need import Need, leaves
from rose.config.cluster import Container, Mpi, nodes_of
from rose.config.errors import ConfigError
from rose.config.tree import Config

# Options of sbatch that ROSE sets, and options that would change how the job's script runs.
OWN_OPTIONS = (
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "output", "error"),
    *("signal", "requeue", "no-requeue", "job-name", "array", "open-mode", "wrap"),
    *("gpus", "gpus-per-task", "gpus-per-socket"),
)
SIZE = r"(\d+)(?:([KMGT])B?)?"  # sizes of memory that sbatch takes, as 64G or 64GB
MIB_OF = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
TIMES = (
    "in one of Slurm's forms: minutes, hours:minutes:seconds, days-hours, as 2-00:00:00, or "
    "UNLIMITED"
)
LEAST_MIB = 1024  # least memory of a job; a rank's Python alone takes half of it


def check(c: Config, need: Need) -> None:
    """Check GPUs and ranks. A run that trains from saved trajectories has neither engines nor
    environment hosts."""
    rolls = c.rollout.replay is None
    engines, hosts = (c.rollout.workers, c.rollout.environment_hosts) if rolls else (0, 0)
    need(
        c.trainer.reduce_dtype == "float32" or c.trainer.dtype == "bfloat16",
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
    devices = c.trainer.ranks // c.rollout.tensor_parallel
    need(
        c.hybrids <= devices,
        "rollout.hybrid",
        f"at most {devices}: a device of the trainer's for each of rollout.tensor_parallel="
        f"{c.rollout.tensor_parallel} ranks, and trainer.ranks={c.trainer.ranks}",
    )
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
    if c.cluster.kind == "slurm":
        need(
            c.cluster.slurm is not None,
            "cluster.slurm",
            "cluster.kind=slurm needs it; use cluster=slurm",
        )
        _check_slurm(c, engines - c.hybrids, need)


def _check_hpz(c: Config, need: Need) -> None:
    """Check that the second copy of the weights (trainer.hpz) saves network traffic. For this, each
    group of ranks that holds a copy must lie within a node, and must not contain all ranks."""
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
    """Check that cluster.gpus suffices for trainer ranks and engines, which may share GPUs."""
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


def _check_mpi(mpi: Mpi, need: Need) -> None:
    """Check the options and variables of cluster.mpi, which are passed on unchanged."""
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
    """Check that ranks divide evenly over their component's nodes, and check all Slurm options."""
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
        need(time is None or time_limit.known(time), f"cluster.slurm.{name}.time", TIMES)
        _check_memory(f"cluster.slurm.{name}.mem", getattr(c.cluster.slurm, name).mem, need)
        for at, option in enumerate(getattr(c.cluster.slurm, name).sbatch):
            _check_option(f"cluster.slurm.{name}.sbatch.{at}", option, need)
    _check_container(c.cluster.slurm.container, need)
    for key, value in leaves(msgspec.to_builtins(c.cluster.slurm)):
        need(
            not isinstance(value, str) or value.isprintable() and value != "",
            f"cluster.slurm.{key}",
            "must be one line of text, not empty; null leaves an option out",
        )


def _check_memory(key: str, mem: str | int | None, need: Need) -> None:
    """Check that `mem` is a size that Slurm accepts, and enough for a rank."""
    found = re.fullmatch(SIZE, str(mem).upper())
    need(mem is None or found is not None, key, "a size of whole numbers with its unit, as 64G")
    if found is not None and int(found[1]):
        mib = int(found[1]) * MIB_OF[found[2] or "M"]
        need(
            mib >= LEAST_MIB,
            key,
            f"a size with its unit, as 64G: {mem} is {mib:g} MiB to Slurm, and no rank starts in "
            "that",
        )


def _check_option(key: str, option: str, need: Need) -> None:
    """Check an option for sbatch. Reject options that ROSE sets itself, except for
    --gpus-per-node=TYPE, from which rose/launch/sbatch.py takes the type."""
    need(
        re.fullmatch(r"--[a-z][a-z0-9-]*(=.+)?", option) is not None,
        key,
        "must be an option, as --exclusive or --mail-type=END",
    )
    name, _, value = option[2:].partition("=")
    typed = re.fullmatch(r"gpus-per-node=(?!\d+(:|$))[^:,\s]+(:\d+)?", option[2:]) is not None
    need(
        name not in OWN_OPTIONS or typed,
        key,
        f"--{name} is set by ROSE, from other keys"
        + ("; their type is given as --gpus-per-node=a100" if name[:4] == "gpus" else ""),
    )
    need(name != "time" or time_limit.known(value), key, f"--time {TIMES}")
    if name == "mem":
        _check_memory(key, value, need)


def _check_groups(c: Config, need: Need) -> None:
    """Check that ranks which compute a row together are on one node, because they exchange
    activations in every layer. Groups larger than a node are allowed."""
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
    for index, mount in enumerate(container.mounts):
        need(
            mount.startswith("/") and "," not in mount,
            f"{key}.mounts.{index}",
            'an absolute path, or "/host/path:/path/inside"',
        )
    for index, option in enumerate(container.args):
        need(option.startswith("-"), f"{key}.args.{index}", "must be an option, as --no-home")
