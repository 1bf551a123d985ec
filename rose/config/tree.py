"""The type of the whole tree of conf/. The other modules of this folder have the types of its
sections. checks/ checks how keys depend on each other. Environments, algorithms, policies and
recipes check their own arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rose.config.cluster import Cluster, nodes_of
from rose.config.common import Count, Natural, NotNegative, Scheduler, Section
from rose.config.model import Model
from rose.config.rollout import Env, Eval, Mixture, Reward, Rollout
from rose.config.serving import Serving
from rose.config.trainer import Algorithm, Trainer, Transfer


class Checkpoints(Section):
    """Checkpoints of environments' sandboxes, and where they are stored."""

    # state saved after a turn. classified: as much as the turn changed (Crab); full: all of it;
    # files: without processes
    checkpoints: Literal["none", "classified", "full", "files"]
    store: str | None  # a folder that all hosts share; null: sandboxes in the run's folder
    local: str | None  # a folder on the node's own disk; null: below TMPDIR
    bytes_per_s: NotNegative  # bandwidth of a host to `store`; 0: unlimited
    memory_mib: Count  # captures of a host that wait to be packed; above it turns aren't captured
    keep: Natural  # newest checkpoints of a sandbox that stay; 0: all


class Wandb(Section):
    """Weights & Biases, off without a project."""

    project: str | None
    entity: str | None  # null: the account's own
    # offline: into the run's folder, for `wandb sync`; null: WANDB_MODE, or online
    mode: Literal["online", "offline"] | None
    group: str | None
    tags: list[str]


class Mlflow(Section):
    """MLflow, off without a URI."""

    uri: str | None  # a tracking server, as http://host:5000, or a folder, as file:///runs
    experiment: str


class Observe(Section):
    tensorboard: bool
    trace: bool
    report: bool
    terminal: bool
    save_trajectories: bool
    wandb: Wandb
    mlflow: Mlflow
    # newest steps whose trajectories, events and attempts' journals stay; null: all
    keep_steps: Count | None


class Config(Section):
    name: str
    mode: str  # train, or a mode of a part (rose/extensions.py)
    seed: int
    deterministic: bool
    # true: trainer and engines use the same GPUs (or cores) in turn; null: with one local GPU
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

    @property
    def environments(self) -> dict[str, tuple[str, Env]]:
        """Map each domain of training and evaluation to (its section's key, the environment)."""
        trained = {name: (self.env.key_of(name), env) for name, env in self.env.members.items()}
        return trained | {name: (f"eval.sets.{name}", env) for name, env in self.eval.sets.items()}

    @property
    def step_timeout_s(self) -> float:
        """Largest `step_timeout_s` of the environments, seconds."""
        return max(env.step_timeout_s for _, env in self.environments.values())

    @property
    def shares_devices(self) -> bool:
        """True if trainer and engines use the same devices in turn: with colocate=true, and by
        default on a single local GPU. A run with rollout.replay has no engines."""
        alone = self.cluster.gpus == 1 and self.cluster.kind == "local"
        return (alone if self.colocate is None else self.colocate) and self.rollout.replay is None

    @property
    def hybrids(self) -> int:
        """Number of hybrid engines: those on the trainer's devices."""
        return self.rollout.hybrid if self.rollout.replay is None else 0

    @property
    def trainers_of_node(self) -> int:
        """Number of trainer ranks per node of the trainer. The ranks of a node are consecutive."""
        slurm = self.cluster.slurm if self.cluster.kind == "slurm" else None
        ranks = self.trainer.ranks
        nodes = nodes_of(slurm.trainer, ranks, self.cluster.gpus > 0) if slurm else 1
        return ranks // nodes

    @property
    def trainer_sleeps(self) -> bool:
        """True if the trainer frees its devices' memory for engines between its steps. On CPUs, the
        memory suffices for trainer and hybrid engines at the same time."""
        return self.shares_devices or (self.hybrids > 0 and self.cluster.gpus > 0)

    @property
    def compares_updates(self) -> bool:
        """True if trainer ranks find a version's changes by comparing the optimizer's float32
        values with the device's bfloat16 weights. Otherwise they keep the last version's values."""
        t, types = self.trainer, (self.trainer.dtype, self.model.dtype)
        alike = types == ("bfloat16", "bfloat16") and t.zero_stage > 1
        return alike and t.lora is None and not t.offload_optimizer

    @property
    def borrows(self) -> bool:
        """True if serving ranks may join: serving.borrow and cluster.mpi.join are set, and the run
        is neither deterministic nor a replay."""
        return self._would_borrow and self.cluster.mpi.join

    @property
    def moves_trajectories(self) -> bool:
        """True if the scheduler may move trajectories, so that environment hosts report load."""
        return self.scheduler.placement.name != "stay"

    @property
    def _would_borrow(self) -> bool:
        return self.serving.borrow and self.rollout.replay is None and not self.deterministic

    @property
    def why_not_borrowed(self) -> str:
        """Explanation for the user if serving ranks are wanted but this MPI can't admit them."""
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
    """The tree of a run on a mixture of environments. It needs a class of its own: a field can have
    several struct types only with a tag, which stored configurations don't have."""

    env: Mixture
