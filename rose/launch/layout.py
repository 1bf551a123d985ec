"""Decide which rank plays which role, on which devices, with how many threads. Pure, and light
enough for every rank.

On one machine the ranks are ordered by role. On Slurm they are ordered by node, in two components.
srun has one `--ntasks-per-node` for all nodes of a component. So every node of the trainer
component has the same number of trainer ranks, and of other ranks: first the coordinator, then
environment hosts, then reward ranks. Left out: whether the plan fits (rose/launch/plan.py) and how
ranks are started (rose/launch/local.py, rose/launch/slurm.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rose.config import Config, nodes_of
from rose.protocol import Role


@dataclass(frozen=True)
class Rank:
    """A rank's role, and its place on the machines."""

    rank: int  # number in MPI_COMM_WORLD
    role: Role
    index: int  # number among the ranks of its role, from 0
    threads: int | None  # OMP_NUM_THREADS; None: the library's own choice
    gpus: tuple[int, ...]  # places, from 0, in the list of GPUs that its node was given
    component: int = 0  # number of the heterogeneous job's component
    node: int = 0  # number of the node within the component

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that differ between ranks, except for GPUs (rose/launch/gpus.py)."""
        return {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}


def layout(c: Config) -> tuple[Rank, ...]:
    """Return the ranks in order. Each trainer rank has one GPU, and each rollout worker has
    rollout.tensor_parallel GPUs. Workers that share the trainer's GPUs take them in order, from its
    first one on. Hybrid engines are the last rollout ranks."""
    if c.cluster.kind == "slurm":
        return tuple(_on_slurm(c))
    on_gpu = c.cluster.gpus > 0
    # A run that trains from saved trajectories needs no engines, hosts or reward ranks.
    rolls = int(c.rollout.replay is None)
    engine = (Role.ROLLOUT, c.rollout.threads, c.rollout.tensor_parallel if on_gpu else 0)
    roles = (
        (1, (Role.COORDINATOR, 1, 0), False),
        (rolls * c.rollout.environment_hosts, (Role.ENVIRONMENT, 1, 0), False),
        (rolls * c.reward.pools, (Role.REWARD, 1, 0), False),
        (c.trainer.ranks, (Role.TRAINER, c.trainer.threads, int(on_gpu)), False),
        (rolls * c.rollout.workers, engine, c.shares_devices),
        (c.hybrids, engine, True),
    )
    return tuple(_number(roles))


def hybrid_ranks(c: Config) -> dict[int, int]:
    """Return the MPI ranks of the hybrid engines, by their index among the rollout ranks."""
    ranks = (rank for rank in layout(c) if rank.role is Role.ROLLOUT)
    return {rank.index: rank.rank for rank in ranks if rank.index >= c.rollout.workers}


def _number(roles: tuple[tuple[int, tuple[Role, int | None, int], bool], ...]) -> Iterator[Rank]:
    """Yield the ranks of `roles`: (count, (role, threads, GPUs of each rank), True if on the
    trainer's GPUs). The trainer's GPUs are the machine's first."""
    rank = gpu = 0
    counts = dict.fromkeys(Role, 0)
    for count, (role, threads, gpus), on_trainers in roles:
        if on_trainers:
            gpu = 0
        for _ in range(count):
            yield Rank(rank, role, counts[role], threads, tuple(range(gpu, gpu + gpus)))
            counts[role] += 1
            rank, gpu = rank + 1, gpu + gpus


def _on_slurm(c: Config) -> Iterator[Rank]:
    """Yield the ranks of component 0 (the trainer's) node by node, then those of component 1."""
    on_gpu, rolls = c.cluster.gpus > 0, c.rollout.replay is None
    counts = dict.fromkeys(Role, 0)
    rank = 0

    def place(role: Role, threads: int | None, gpus: range, component: int, node: int) -> Rank:
        nonlocal rank
        made = Rank(
            rank, role, counts[role], threads, tuple(gpus) if on_gpu else (), component, node
        )
        rank += 1
        counts[role] += 1
        return made

    nodes = nodes_of(c.cluster.slurm.trainer, c.trainer.ranks, on_gpu)
    pools = rolls * c.reward.pools
    others = -(-(1 + rolls * c.rollout.environment_hosts + pools) // nodes)  # other ranks per node
    for node in range(nodes):
        for at in range(others):
            places_left = nodes * others - (node * others + at)
            role = Role.REWARD if places_left <= pools else Role.ENVIRONMENT
            yield place(role if node or at else Role.COORDINATOR, 1, range(0), 0, node)
        for at in range(c.trainer.ranks // nodes):
            yield place(Role.TRAINER, c.trainer.threads, range(at, at + 1), 0, node)
    if not rolls:
        return
    tp = c.rollout.tensor_parallel
    nodes = nodes_of(c.cluster.slurm.rollout, c.rollout.workers * tp, on_gpu)
    for node in range(nodes):
        for at in range(c.rollout.workers // nodes):
            yield place(Role.ROLLOUT, c.rollout.threads, range(at * tp, (at + 1) * tp), 1, node)
