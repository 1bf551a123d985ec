"""Policies by the names of their Hydra options."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import msgspec

from rose import config as cfg
from rose.scheduler.batching.bounded_staleness import BoundedStaleness
from rose.scheduler.batching.carry_over import CarryOver
from rose.scheduler.batching.dapo import Dapo
from rose.scheduler.batching.one_step_off import OneStepOff
from rose.scheduler.batching.synchronous import Synchronous
from rose.scheduler.batching.tail_batching import TailBatching
from rose.scheduler.batching.trajectory_async import TrajectoryAsync
from rose.scheduler.core import Scheduler
from rose.scheduler.order.due_first import DueFirst
from rose.scheduler.order.fifo import Fifo
from rose.scheduler.order.longest_first import LongestFirst
from rose.scheduler.order.mlfq import Mlfq
from rose.scheduler.order.progressive import Progressive
from rose.scheduler.provisioning.all_idle import AllIdle
from rose.scheduler.provisioning.fixed import Fixed
from rose.scheduler.provisioning.libra import Libra as LibraPlanner
from rose.scheduler.provisioning.on_demand import OnDemand
from rose.scheduler.provisioning.rlboost import RlBoost
from rose.scheduler.provisioning.rose import Rose as RoseProvisioning
from rose.scheduler.provisioning.serverless import Serverless
from rose.scheduler.provisioning.static import Static
from rose.scheduler.routing.cache_affine import CacheAffine
from rose.scheduler.routing.earliest_finish import EarliestFinish
from rose.scheduler.routing.least_loaded import LeastLoaded
from rose.scheduler.routing.libra import Libra as LibraRouting
from rose.scheduler.routing.rollart import RollArt
from rose.scheduler.routing.rose import Rose as RoseRouting
from rose.scheduler.routing.round_robin import RoundRobin
from rose.scheduler.routing.seer import Seer

POLICIES: dict[str, dict[str, type]] = {
    "provisioning": {
        "all_idle": AllIdle,
        "fixed": Fixed,
        "libra": LibraPlanner,
        "on_demand": OnDemand,
        "rlboost": RlBoost,
        "rose": RoseProvisioning,
        "serverless": Serverless,
        "static": Static,
    },
    "routing": {
        "cache_affine": CacheAffine,
        "earliest_finish": EarliestFinish,
        "least_loaded": LeastLoaded,
        "libra": LibraRouting,
        "rollart": RollArt,
        "rose": RoseRouting,
        "round_robin": RoundRobin,
        "seer": Seer,
    },
    "order": {
        "due_first": DueFirst,
        "fifo": Fifo,
        "longest_first": LongestFirst,
        "mlfq": Mlfq,
        "progressive": Progressive,
    },
    "batching": {
        "bounded_staleness": BoundedStaleness,
        "carry_over": CarryOver,
        "dapo": Dapo,
        "one_step_off": OneStepOff,
        "synchronous": Synchronous,
        "tail_batching": TailBatching,
        "trajectory_async": TrajectoryAsync,
    },
}


def build(config: cfg.Scheduler, turn_timeout_s: float) -> Scheduler:
    """Raises `rose.config.ConfigError` naming the key for an unknown policy or a bad argument."""
    return Scheduler(
        _policy("provisioning", config.provisioning),
        _policy("routing", config.routing),
        _policy("order", config.order),
        _policy("batching", config.batching),
        config.queue_depth,
        turn_timeout_s,
    )


def _policy(kind: str, chosen: cfg.Policy) -> Any:
    known = POLICIES[kind]
    if chosen.name not in known:
        raise cfg.ConfigError(
            f"scheduler.{kind}.name={chosen.name!r}: unknown policy; "
            f"one of {', '.join(sorted(known))}"
        )
    policy = known[chosen.name]
    takes = list(inspect.signature(policy).parameters)
    for key in [k for k in chosen.args if k not in takes] + [
        k for k in takes if k not in chosen.args
    ]:
        raise cfg.ConfigError(
            f"scheduler.{kind}.args.{key}={chosen.args.get(key)!r}: {chosen.name} takes "
            f"{', '.join(takes) or 'no arguments'}"
        )
    types = get_type_hints(policy.__init__)
    for key in takes:
        try:
            msgspec.convert(chosen.args[key], types[key])
        except msgspec.ValidationError as error:
            said = str(error)[0].lower() + str(error)[1:]
            raise cfg.ConfigError(
                f"scheduler.{kind}.args.{key}={chosen.args[key]!r}: {said}"
            ) from None
    try:
        return policy(**chosen.args)
    except (TypeError, ValueError) as error:
        raise cfg.ConfigError(f"scheduler.{kind}.args={chosen.args}: {error}") from None
