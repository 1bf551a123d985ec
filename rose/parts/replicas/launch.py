"""Tables of what excludes replicas, and estimates of their memory. Pure."""

from __future__ import annotations

import msgspec

from rose.config import Config, ConfigError, ModelShape
from rose.launch import exclusions as other
from rose.launch import memory, plan
from rose.launch.exclusions import Exclusion, Feature
from rose.protocol import Role

KEY = "trainer.elastic_replicas"
NO_PLANNER = Feature(
    other.PROVISIONING,
    "scheduler/provisioning=libra",
    lambda r: not r.in_step and not getattr(r.provisioning, "plans_replicas", False),
    "overlapping batching without a planner",
)
OTHER_DTYPE = Feature(
    "model.dtype",
    "the same in model.dtype and trainer.dtype",
    lambda r: r.c.trainer.dtype != r.c.model.dtype,
    "`model.dtype` other than `trainer.dtype`",
)
OVERSAMPLING = Feature(
    other.BATCHING,
    "scheduler/batching=synchronous or bounded_staleness",
    lambda r: r.in_step and r.c.scheduler.batching.name != "synchronous",
    "`dapo`, `tail_batching`",
)
REPLICAS = Feature(KEY, f"{KEY}=0", lambda r: r.c.elastic_replicas > 0)
UNPLANNED = REPLICAS._replace(used=lambda r: r.c.elastic_replicas > 0 and r.in_step)
WHOLE = REPLICAS._replace(
    used=lambda r: r.c.elastic_replicas >= max(1, r.c.rollout.workers),
    about="a replica beside each engine",
)

KEPT = "offloaded activations"  # item of a trainer rank's host memory
ONE_WAY = "devices have one way to change sides"

EXCLUSIONS = (
    Exclusion(REPLICAS, other.DETERMINISTIC, "gradients are summed in another order"),
    Exclusion(REPLICAS, other.COLOCATE, ONE_WAY),
    Exclusion(REPLICAS, other.HYBRID, ONE_WAY),
    Exclusion(OVERSAMPLING, REPLICAS),
    Exclusion(WHOLE, other.OVERLAP, "one engine at least goes on rolling out"),
    Exclusion(NO_PLANNER, REPLICAS, "nothing plans how many replicas train"),
    Exclusion(other.SLURM, REPLICAS),
    Exclusion(other.BESIDE, UNPLANNED, "engines that evaluate can't sleep"),
    Exclusion(other.NCCL, REPLICAS, "NCCL keeps memory of an engine's device while that sleeps"),
    Exclusion(other.STREAM, REPLICAS, other.EARLY),
    Exclusion(other.UPDATES, REPLICAS, "replicas get weights once a step"),
    Exclusion(other.LORA, REPLICAS),
    Exclusion(other.ROUTER_REPLAY, REPLICAS),
    Exclusion(other.SEQUENCE_PARALLEL, REPLICAS, "each replica computes whole rows"),
    Exclusion(other.COMPILE, REPLICAS),
    Exclusion(other.KERNELS, REPLICAS),
    Exclusion(other.OFFLOADED_OPTIMIZER, REPLICAS, "DeepSpeed counts its norm early"),
    Exclusion(other.KL, REPLICAS, "replicas hold no reference"),
    Exclusion(other.TENSOR_PARALLEL, REPLICAS, "each replica has one device"),
    Exclusion(OTHER_DTYPE, REPLICAS, "replicas compute with published weights"),
    Exclusion(REPLICAS, other.EXPERTS),
)


def estimate(c: Config, shape: ModelShape) -> memory.Estimate:
    """Estimate a replica at work: like a trainer rank alone, with gradients in fp32 and no
    optimizer. Without replicas, nothing."""
    if not c.elastic_replicas:
        return memory.Estimate({}, 0.0)
    t = msgspec.structs.replace(c.trainer, ranks=1, zero_stage=0)
    alone = msgspec.structs.replace(c, trainer=t)
    weights = float(memory.BYTES[t.dtype] * shape.parameters)
    items = {"weights": weights, "gradients": 4.0 * shape.parameters}
    # A replica's gradient lies in a file in /dev/shm from the end of its work to the step's end.
    host = {
        "weights between steps": weights / memory.GIB if c.cluster.gpus else 0.0,
        "file of the gradient": items["gradients"] / memory.GIB,
        "staged blocks": min(c.transfer.stage_gib, weights / memory.GIB),
        KEPT: memory.trainer(alone, shape).host.get(KEPT, 0.0),
    }
    return memory.Estimate(
        memory.in_gib(c, items | memory.added_in_a_pass(alone, shape)),
        sum(items.values()) / memory.GIB,
        host={name: gib for name, gib in host.items() if gib},
    )


def check(
    c: Config, shape: ModelShape, estimates: dict[Role, memory.Estimate], host_gib: float | None
) -> None:
    """Raise `ConfigError` if replicas don't fit. On a GPU a replica has the memory beside a
    sleeping engine, and while it sleeps itself must leave free the engine's share. On CPUs trainer,
    engines and replicas are in memory at once."""
    if not c.elastic_replicas:
        return
    each, key = estimate(c, shape), f"{KEY}={c.elastic_replicas}"
    trainer, rollout = estimates[Role.TRAINER], estimates[Role.ROLLOUT]
    offloaded, staged = memory.host_gib(c, trainer, rollout)
    wanted = offloaded + staged + c.elastic_replicas * sum(each.host.values())
    if c.cluster.gpus:
        wanted += c.elastic_replicas * rollout.firm  # weights of the sleeping engines
        if (limit := c.cluster.gpu_memory_gib) is not None:
            plan.check_share(c, limit, key, "replica's")
            if each.total > limit - memory.ASLEEP_GIB:
                raise ConfigError(
                    f"{key}: a replica may need {each.total:.1f} GiB ({each.firm:.1f} of them for "
                    f"weights and gradients) beside an engine that sleeps, of {limit:g}; lower "
                    f"trainer.micro_batch_tokens={c.trainer.micro_batch_tokens}, or set it to 0"
                )
    else:
        wanted += c.trainer.ranks * trainer.total + c.rollout.workers * rollout.total
        wanted += c.elastic_replicas * each.total
    if host_gib is not None and wanted > host_gib:
        raise ConfigError(
            f"{key}: {wanted:.1f} GiB of trainer, engines and replicas don't fit into the "
            f"{host_gib:.1f} GiB of memory that the run may take here; set it to 0"
        )


def words(c: Config, shape: ModelShape | None) -> str:
    """Return what the plan says of replicas; "" without."""
    if not c.elastic_replicas:
        return ""
    needs = ""
    if shape is not None:
        each = estimate(c, shape)
        needs = f", {each.total:.1f} GiB each and {sum(each.host.values()):.1f} in host memory"
    return f", replicas that train beside {c.elastic_replicas} of them{needs}"
