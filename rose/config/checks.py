"""What the keys of a configuration must be to each other, and to the model. Left out: the machine's own limits
(rose/launch/plan.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rose.config import errors
from rose.config.errors import ConfigError
from rose.config.tree import Config, ModelShape, Mpi, nodes_of

Need = Callable[[bool, str, str], None]  # (is it so?, key, what would be right)


def check(c: Config) -> None:
    """Everything that can be said without looking at the machine or the model."""
    tree = msgspec.to_builtins(c)

    def need(ok: bool, key: str, remedy: str) -> None:
        if not ok:
            raise ConfigError(f"{key}={errors.value_at(tree, key)!r}: {remedy}")

    for key, value in _leaves(tree):
        need(not isinstance(value, float) or math.isfinite(value), key, "must be a finite number")
    _check_values(c, need)
    _check_batch(c, need)
    _check_machine(c, need)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of the tree with its dotted key."""
    if isinstance(tree, (dict, list)):
        for name, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(branch, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def _check_values(c: Config, need: Need) -> None:
    """Single values that their types don't bound."""
    need(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,=+-]{0,150}", c.name) is not None, "name",
         "letters, digits and . _ , = + - only, at most 151 of them; it names the run's folder")
    need(len(c.trainer.optimizer.betas) == 2 and all(0 <= b < 1 for b in c.trainer.optimizer.betas),
         "trainer.optimizer.betas", "two numbers in [0, 1)")
    need(c.rollout.temperature > 0, "rollout.temperature", "must be greater than 0: greedy rollouts teach nothing")
    need(c.serving.lost_after_s >= 2 * c.serving.heartbeat_s, "serving.lost_after_s",
         f"at least twice serving.heartbeat_s={c.serving.heartbeat_s:g}, or a late heartbeat is a loss")
    need(c.model.source != "folder" or c.model.path is not None, "model.path",
         "the model's folder is needed (model.source=folder)")


def _check_batch(c: Config, need: Need) -> None:
    """Trajectories of a step among groups, ranks and updates; tokens of a trajectory among turns and passes."""
    need(c.trainer.batch_size % c.rollout.group_size == 0, "trainer.batch_size",
         f"must be a multiple of rollout.group_size={c.rollout.group_size}; "
         f"try {max(1, round(c.trainer.batch_size / c.rollout.group_size)) * c.rollout.group_size}")
    need(c.trainer.batch_size >= c.trainer.ranks * c.trainer.updates_per_step, "trainer.batch_size",
         f"must give each of trainer.ranks={c.trainer.ranks} ranks at least one trajectory in each of "
         f"trainer.updates_per_step={c.trainer.updates_per_step} updates")
    need(c.env.max_new_tokens < c.model.max_context, "env.max_new_tokens",
         f"one turn must fit into model.max_context={c.model.max_context}")
    need(c.trainer.micro_batch_tokens >= c.model.max_context, "trainer.micro_batch_tokens",
         f"must hold one trajectory of model.max_context={c.model.max_context} tokens")


def _check_machine(c: Config, need: Need) -> None:
    """GPUs and ranks. A run that trains from saved trajectories has neither engines nor environment hosts."""
    rolls = c.rollout.replay is None
    engines, hosts = (c.rollout.workers, c.rollout.environment_hosts) if rolls else (0, 0)
    if c.deterministic:
        need(engines <= 1, "rollout.workers", "deterministic=true needs one engine: rollout.workers=1")
        need(c.trainer.dtype == "float32", "trainer.dtype", "deterministic=true needs float32")
    gpus = c.trainer.ranks + engines * c.rollout.tensor_parallel
    need(c.cluster.gpus == 0 or gpus <= c.cluster.gpus, "cluster.gpus",
         f"the run needs {gpus} (trainer.ranks={c.trainer.ranks} + {engines} engines x rollout.tensor_parallel="
         f"{c.rollout.tensor_parallel}); raise it or run fewer")
    ranks = 1 + hosts + c.trainer.ranks + engines
    need(c.cluster.slots is None or ranks <= c.cluster.slots, "cluster.slots",
         f"the run has {ranks} ranks (1 coordinator + {hosts} environment hosts + {c.trainer.ranks} trainer + "
         f"{engines} rollout); raise it or run fewer")
    _check_mpi(c.cluster.mpi, need)
    if c.scheduler.provisioning.name == "on_demand":
        need(c.cluster.kind == "slurm", "scheduler.provisioning.name", "on_demand submits jobs to Slurm: cluster=slurm")
        need(c.cluster.mpi.join, "cluster.mpi.join", f"with {c.cluster.mpi.name} no rank can join, and scheduler."
             "provisioning.name='on_demand' asks for such ranks; another cluster/mpi=, or scheduler/provisioning=fixed")
        need(c.borrows, "scheduler.provisioning.name", "on_demand needs ranks that may join: serving.borrow=true, "
             "deterministic=false, no replay")
    if c.cluster.kind == "slurm":
        need(c.cluster.slurm is not None, "cluster.slurm", "cluster.kind=slurm needs it; use cluster=slurm")
        _check_slurm(c, engines, need)


def _check_mpi(mpi: Mpi, need: Need) -> None:
    """Options and variables that srun and the system take as they are."""
    for at, option in enumerate(mpi.srun):
        need(option.startswith("-") and option.isprintable(), f"cluster.mpi.srun.{at}",
             "must be an option, as --mpi=pmi2")
    for section, variables in (("env", mpi.env), ("join_env", mpi.join_env)):
        for name, value in variables.items():
            need(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None and value.isprintable(),
                 f"cluster.mpi.{section}.{name}", "must be the name of a variable, and one line of text")


def _check_slurm(c: Config, engines: int, need: Need) -> None:
    """Ranks divide evenly over the nodes of their component, and nothing in an option can end its line."""
    parts = (("trainer", c.cluster.slurm.trainer, "trainer.ranks", c.trainer.ranks, 1),
             ("rollout", c.cluster.slurm.rollout, "rollout.workers", engines, c.rollout.tensor_parallel))
    for name, component, key, ranks, gpus in parts:
        nodes = nodes_of(component, ranks * gpus, c.cluster.gpus > 0)
        need(ranks % nodes == 0, f"cluster.slurm.{name}.nodes",
             f"{key}={ranks} ranks don't divide evenly over {nodes} nodes; change one of them")
        need(not c.cluster.gpus or ranks // nodes * gpus <= component.gpus_per_node,
             f"cluster.slurm.{name}.gpus_per_node",
             f"{ranks // nodes} ranks x {gpus} GPUs don't fit on a node; raise cluster.slurm.{name}.nodes={nodes}")
    need(c.cluster.slurm.borrowed.nodes in (None, 1), "cluster.slurm.borrowed.nodes", "such a job is one engine: 1")
    for name in ("trainer", "rollout", "borrowed"):
        for at, option in enumerate(getattr(c.cluster.slurm, name).sbatch):
            need(option.startswith("--"), f"cluster.slurm.{name}.sbatch.{at}", "must be an option, as --exclusive")
    for key, value in _leaves(msgspec.to_builtins(c.cluster.slurm)):
        need(not isinstance(value, str) or value.isprintable() and value != "", f"cluster.slurm.{key}",
             "must be one line of text, not empty; null leaves an option out")


def check_model(c: Config, shape: ModelShape) -> None:
    """Checks that need the model's shape. Raises `ConfigError`."""
    if c.rollout.replay is not None:
        return  # no engines, and all of them are about engines
    tp = c.rollout.tensor_parallel
    if shape.heads % tp:
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide the {shape.heads} attention heads of model "
                          f"{c.model.name}")
    if max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide, or be a multiple of, the {shape.kv_heads} "
                          f"key-value heads of model {c.model.name}")
    if shape.intermediate % tp:
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide the intermediate size {shape.intermediate} of "
                          f"model {c.model.name}")
    if c.cluster.gpus == 0 and tp > 1:
        raise ConfigError(f"rollout.tensor_parallel={tp}: needs GPUs, and cluster.gpus=0")
