"""The types of `cluster`: devices, MPI and Slurm."""

from __future__ import annotations

from typing import Literal

from rose.config.common import Count, Natural, Positive, Section
from rose.config.rollout import Rollout

TRAINERS_CPUS = 8  # a rank beside a GPU has so many
CPUS_WITHOUT_GPUS = 2


class Mpi(Section):
    """How this site starts MPI ranks and what it must find in their environment."""

    name: str
    # whether processes of other jobs can join at run time, and the run survives their death
    join: bool
    srun: list[str]  # options of srun that start ranks as one MPI world
    env: dict[str, str]
    # besides, for the processes at both ends of a borrowed rank's connection
    join_env: dict[str, str]


class Component(Section):
    """One component of a Slurm heterogeneous job: sbatch's options of these names; null leaves one
    out."""

    nodes: Count | None  # null: as few as its GPUs need; 1 without GPUs
    gpus_per_node: Count  # that the nodes have; used when cluster.gpus > 0
    cpus_per_task: Count | None  # null: `cpus_of`
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    mem: str | Count | None  # per node, as Slurm writes it: 64G, or MiB
    time: str | int | None  # text as Slurm writes it: 2-00:00:00, or minutes
    exclusive: bool  # its nodes are shared with no other job, nor with another component
    sbatch: list[str]  # further options, such as "--mail-type=END"


class Container(Section):
    """In which the ranks of a Slurm job run."""

    runtime: Literal["apptainer", "singularity", "pyxis"]  # pyxis: srun --container-image
    image: str  # a .sif or .sqsh file that all nodes see, or what the runtime can pull
    python: str  # inside: the interpreter that has ROSE's packages
    # besides output_dir, model and this checkout: "/scratch", or "/host/path:/path/inside"
    mounts: list[str]
    args: list[str]  # further options of the runtime, such as "--no-home"


class Slurm(Section):
    trainer: Component  # trainer ranks, environment hosts and the coordinator
    rollout: Component  # the engines
    # a job with one more engine, which the run asks for itself (scheduler/provisioning=on_demand)
    borrowed: Component
    # a job that computes rewards (reward.max_jobs): a worker for each of its CPUs
    reward: Component
    pending_s: Positive  # such a job may wait in the queue for so long; then it counts as refused
    setup: list[str]  # shell lines at the job's start, such as "module load cuda"
    container: Container | None
    warning_s: Count  # so long before its time limit the job saves and requeues itself
    requeues: Natural  # The job requeues itself so often without a new checkpoint.


class Cluster(Section):
    kind: Literal["local", "slurm"]
    dry_run: bool
    slots: int | None  # ranks that may run here; null: no limit
    gpus: Natural  # GPUs that the run may use; 0: it runs on CPUs
    gpu_memory_gib: Positive | None  # of each; null: memory is not checked
    start_timeout_s: Positive
    stop_timeout_s: Positive
    # of the network that all hosts share, for MPI, gloo and NCCL; null: found by trying
    interface: str | None
    # of compiled kernels, on a disk of the node; null: TMPDIR/rose-UID under Slurm
    cache_dir: str | None
    env: dict[str, str]
    mpi: Mpi
    slurm: Slurm | None  # with kind=slurm

    @property
    def of_interface(self) -> dict[str, str]:
        """Variables by which gloo, NCCL (for which a bare name is a prefix) and libfabric's tcp
        provider take it."""
        if not self.interface:
            return {}
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
            "FI_TCP_IFACE": self.interface,
        }


def cpus_of(cluster: Cluster, name: str, rollout: Rollout) -> int:
    """Return the CPUs of each rank of the Slurm component `name`, a field of `Slurm`. An engine on
    GPUs has its scheduler, its tokens' way out and the threads that stage new weights, and for each
    GPU a worker process with its copying threads. Without GPUs models are tiny."""
    component: Component = getattr(cluster.slurm, name)
    if component.cpus_per_task is not None:
        return component.cpus_per_task
    if not cluster.gpus:
        return CPUS_WITHOUT_GPUS
    return TRAINERS_CPUS if name == "trainer" else 8 + 2 * rollout.tensor_parallel


def nodes_of(component: Component, gpus: int, on_gpu: bool) -> int:
    """Nodes of a component whose ranks use so many GPUs."""
    if component.nodes is not None:
        return component.nodes
    return -(-gpus // component.gpus_per_node) if on_gpu else 1
