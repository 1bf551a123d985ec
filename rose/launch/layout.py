"""Which rank plays which role, on which devices, with how many threads. Pure, and light enough for every rank.

Left out: whether it fits (rose/launch/plan.py) and where the ranks run (rose/launch/local.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rose.config import Config
from rose.protocol import Role


@dataclass(frozen=True)
class Rank:
    rank: int  # in MPI_COMM_WORLD
    role: Role
    index: int  # which of its role, from 0
    threads: int | None  # OMP_NUM_THREADS; None: the library's own choice
    gpus: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What only this rank finds in its environment."""
        env = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return env


def layout(c: Config) -> tuple[Rank, ...]:
    """The ranks in order. GPUs: one per trainer rank, then tensor_parallel per rollout worker."""
    on_gpu = c.cluster.gpus > 0
    rolls = int(c.rollout.replay is None)  # a run that trains from saved trajectories needs no engine
    roles = (
        (Role.COORDINATOR, 1, 1, 0),
        (Role.ENVIRONMENT, rolls * c.rollout.environment_hosts, 1, 0),
        (Role.TRAINER, c.trainer.ranks, c.trainer.threads, int(on_gpu)),
        (Role.ROLLOUT, rolls * c.rollout.workers, c.rollout.threads, c.rollout.tensor_parallel if on_gpu else 0),
    )
    return tuple(_number(roles))


def _number(roles: tuple[tuple[Role, int, int | None, int], ...]) -> Iterator[Rank]:
    rank = gpu = 0
    for role, count, threads, gpus in roles:
        for index in range(count):
            yield Rank(rank, role, index, threads, tuple(range(gpu, gpu + gpus)))
            rank, gpu = rank + 1, gpu + gpus
