"""The types of `cluster`: devices, MPI and Slurm."""

from __future__ import annotations

from typing import Literal

from rose.config.common import Count, Natural, Positive, Section
from rose.config.rollout import Rollout

TRAINERS_CPUS = 8  # CPUs of each rank of the trainer's component, in a run with GPUs
CPUS_WITHOUT_GPUS = 2  # CPUs of each rank in a run without GPUs, whose models are tiny


class Mpi(Section):
    """The way this site starts MPI ranks, and the variables that they need."""

    name: str
    join: bool  # true: processes of other jobs can join, and the run survives their death
    srun: list[str]  # options of srun that start ranks as one MPI world
    env: dict[str, str]
    # further variables, for the processes at both ends of a borrowed rank's connection
    join_env: dict[str, str]


class Component(Section):
    """A component of a Slurm heterogeneous job: sbatch's options of these names. null leaves an
    option out."""

    nodes: Count | None  # null: as few as its GPUs need; 1 without GPUs
    gpus_per_node: Count  # GPUs of a node; ignored when cluster.gpus = 0
    cpus_per_task: Count | None  # null: `cpus_of`
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    mem: str | Count | None  # per node, as Slurm writes it: 64G, or MiB
    time: str | int | None  # text as Slurm writes it: 2-00:00:00, or minutes
    exclusive: bool  # true: no other job and no other component runs on its nodes
    sbatch: list[str]  # further options, such as "--mail-type=END"


class Container(Section):
    """The container in which the ranks of a Slurm job run."""

    runtime: Literal["apptainer", "singularity", "pyxis"]  # pyxis: srun --container-image
    image: str  # a .sif or .sqsh file that all nodes see, or a name that the runtime can pull
    python: str  # path, inside the container, of the interpreter with ROSE's packages
    # "/scratch" or "/host/path:/path/inside", besides output_dir, model and this checkout
    mounts: list[str]
    args: list[str]  # further options of the runtime, such as "--no-home"


class Slurm(Section):
    trainer: Component  # trainer ranks, environment hosts and the coordinator
    rollout: Component  # the engines
    # a job with one more engine, which the run submits itself (scheduler/provisioning=on_demand)
    borrowed: Component
    # a job that computes rewards (reward.max_jobs), with a worker on each of its CPUs
    reward: Component
    pending_s: Positive  # seconds in the queue after which a `borrowed` job counts as refused
    setup: list[str]  # shell lines at the job's start, such as "module load cuda"
    container: Container | None
    warning_s: Count  # seconds before its time limit at which the job saves and requeues itself
    requeues: Natural  # most requeues in a row without a new checkpoint


class Cluster(Section):
    kind: Literal["local", "slurm"]
    dry_run: bool
    slots: int | None  # ranks that may run here; null: no limit
    gpus: Natural  # GPUs that the run may use; 0: it runs on CPUs
    gpu_memory_gib: Positive | None  # memory of each GPU; null: memory is not checked
    start_timeout_s: Positive
    stop_timeout_s: Positive
    # network interface that all hosts share, for MPI, gloo and NCCL; null: found by trying
    interface: str | None
    # folder for compiled kernels on the node's own disk; null: TMPDIR/rose-UID under Slurm
    cache_dir: str | None
    env: dict[str, str]
    mpi: Mpi
    slurm: Slurm | None  # needed by kind=slurm

    @property
    def contained(self) -> bool:
        """True if ranks run in a container. Its packages aren't known outside of it."""
        return self.kind == "slurm" and self.slurm is not None and self.slurm.container is not None

    @property
    def interface_env(self) -> dict[str, str]:
        """Variables that set the interface of gloo, NCCL and libfabric's tcp provider. Without "=",
        NCCL would take the name as a prefix."""
        if not self.interface:
            return {}
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
            "FI_TCP_IFACE": self.interface,
        }


def cpus_of(cluster: Cluster, name: str, rollout: Rollout) -> int:
    """Return the CPUs of each rank of the Slurm component `name`, a field of `Slurm`. An engine on
    GPUs needs 8 CPUs for its scheduler, its output and the threads that stage new weights. Each
    GPU's worker process, with its copying threads, needs 2 more."""
    component: Component = getattr(cluster.slurm, name)
    if component.cpus_per_task is not None:
        return component.cpus_per_task
    if not cluster.gpus:
        return CPUS_WITHOUT_GPUS
    return TRAINERS_CPUS if name == "trainer" else 8 + 2 * rollout.tensor_parallel


def nodes_of(component: Component, gpus: int, on_gpu: bool) -> int:
    """Return the number of nodes of a component whose ranks use `gpus` GPUs in all."""
    if component.nodes is not None:
        return component.nodes
    return -(-gpus // component.gpus_per_node) if on_gpu else 1
