"""The type of the whole tree of conf/; those of its sections are in the modules beside. No key
has a default outside the YAML of conf/.

Left out: what keys must be to each other (checks/), and what the arguments of an environment,
algorithm, policy or recipe may be, which those say themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rose.config.cluster import Cluster, nodes_of
from rose.config.common import Count, Natural, NotNegative, Scheduler, Section
from rose.config.model import Model
from rose.config.rollout import Env, Eval, Mixture, Reward, Rollout
from rose.config.serving import Serving
from rose.config.sim import Sim
from rose.config.trainer import Algorithm, Trainer, Transfer

# batching policies with which rollouts go on while the trainer trains
OVERLAPPING = ("one_step_off", "bounded_staleness", "trajectory_async", "carry_over")


class Checkpoints(Section):
    """Of the sandboxes of environments that have some: after which turns what is captured, and
    where it lies."""

    # classified: what a turn changed (Crab); full: all after each turn; files: without processes
    checkpoints: Literal["none", "classified", "full", "files"]
    store: str | None  # a folder that all hosts share; null: sandboxes in the run's folder
    local: str | None  # one on the node's own disk; null: below TMPDIR
    bytes_per_s: NotNegative  # of a host, to `store`; 0: no bound
    memory_mib: Count  # captures of a host that wait to be packed; beyond, turns are skipped
    keep: Natural  # newest checkpoints of a sandbox; 0: all


class Wandb(Section):
    """Weights & Biases, off without a project."""

    project: str | None
    entity: str | None  # null: the account's own
    # offline: into the run's folder, for `wandb sync`; null: what WANDB_MODE says, or online
    mode: Literal["online", "offline"] | None
    group: str | None
    tags: list[str]


class Mlflow(Section):
    """MLflow, off without a URI."""

    uri: str | None  # of the tracking server, as http://host:5000, or a folder, as file:///runs
    experiment: str


class Observe(Section):
    tensorboard: bool
    trace: bool
    report: bool
    terminal: bool
    save_trajectories: bool
    wandb: Wandb
    mlflow: Mlflow
    # the newest steps whose trajectories and events stay, and journals of their attempts; null: all
    keep_steps: Count | None


class Config(Section):
    name: str
    mode: Literal["train", "simulate", "plan"]
    seed: int
    deterministic: bool
    # trainer and engines share the same GPUs (or cores) in turn; None: where there is one GPU
    colocate: bool | None
    fresh: bool  # move an earlier run of this name aside instead of continuing it
    output_dir: str
    model: Model
    env: Env
    reward: Reward
    algorithm: Algorithm
    trainer: Trainer
    rollout: Rollout
    eval: Eval
    transfer: Transfer
    serving: Serving
    scheduler: Scheduler
    cluster: Cluster
    sandbox: Checkpoints
    observe: Observe
    sim: Sim

    @property
    def environments(self) -> dict[str, tuple[str, Env]]:
        """domain -> (the key of its section, the environment), of training and evaluation."""
        trained = {name: (self.env.key_of(name), env) for name, env in self.env.members.items()}
        return trained | {name: (f"eval.sets.{name}", env) for name, env in self.eval.sets.items()}

    @property
    def step_timeout_s(self) -> float:
        """Of the slowest environment."""
        return max(env.step_timeout_s for _, env in self.environments.values())

    @property
    def shares_devices(self) -> bool:
        """Whether trainer and engines take turns: a run without engines has nobody to share with,
        and one GPU of one machine can't be had otherwise."""
        alone = self.cluster.gpus == 1 and self.cluster.kind == "local"
        return (alone if self.colocate is None else self.colocate) and self.rollout.replay is None

    @property
    def hybrids(self) -> int:
        """Engines on the trainer's devices beside the dedicated ones."""
        return self.rollout.hybrid if self.rollout.replay is None else 0

    @property
    def trainers_of_node(self) -> int:
        """Trainer ranks on each node of the trainer's, which are neighbours."""
        slurm = self.cluster.slurm if self.cluster.kind == "slurm" else None
        ranks = self.trainer.ranks
        nodes = nodes_of(slurm.trainer, ranks, self.cluster.gpus > 0) if slurm else 1
        return ranks // nodes

    @property
    def elastic_replicas(self) -> int:
        """Dedicated engines beside which a replica of the model can train."""
        return self.trainer.elastic_replicas if self.rollout.replay is None else 0

    @property
    def plans_replicas(self) -> bool:
        """Whether rollouts go on while the trainer trains, so that somebody has to say how many of
        the engines with a replica hand their turns on and sleep meanwhile."""
        return self.elastic_replicas > 0 and self.scheduler.batching.name in OVERLAPPING

    @property
    def trainer_sleeps(self) -> bool:
        """Whether the trainer gives its devices' memory to engines between its steps. On CPUs it
        and hybrid engines have room beside each other."""
        return self.shares_devices or (self.hybrids > 0 and self.cluster.gpus > 0)

    @property
    def borrows(self) -> bool:
        """Whether serving ranks may join: wanted, possible with this MPI, and not against
        `deterministic`."""
        return self._would_borrow and self.cluster.mpi.join

    @property
    def moves_trajectories(self) -> bool:
        """Whether environment hosts tell what the scheduler decides moves by."""
        return self.scheduler.placement.name != "stay"

    @property
    def _would_borrow(self) -> bool:
        return self.serving.borrow and self.rollout.replay is None and not self.deterministic

    @property
    def why_not_borrowed(self) -> str:
        """In words, what is lost when serving ranks are wanted and this MPI can't let them in; else
        empty."""
        if self.borrows or not self._would_borrow:
            return ""
        return (
            f"cluster.mpi.join=false (of {self.cluster.mpi.name}): serving ranks can't join, so "
            f"the run has its {self.rollout.workers} dedicated rollout ranks only; serving=none "
            "says that this is meant"
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


class MixedConfig(Config):
    """The tree of a run on a mixture of environments: a class of its own, as msgspec tells structs
    in one place apart by a tag only, which a single environment's stored configuration doesn't
    have."""

    env: Mixture
