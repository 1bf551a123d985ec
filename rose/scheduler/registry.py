"""Policies by the names of their Hydra options."""

from __future__ import annotations

import inspect
from typing import Any

from rose import config as cfg
from rose.scheduler import batching, order, provisioning, routing
from rose.scheduler.core import Scheduler

POLICIES: dict[str, dict[str, type]] = {
    "provisioning": {"fixed": provisioning.Fixed, "on_demand": provisioning.OnDemand},
    "routing": {"round_robin": routing.RoundRobin, "least_loaded": routing.LeastLoaded,
                "cache_affine": routing.CacheAffine},
    "order": {"fifo": order.Fifo},
    "batching": {"synchronous": batching.Synchronous},
}


def build(config: cfg.Scheduler, turn_timeout_s: float) -> Scheduler:
    """Raises `rose.config.ConfigError` naming the key for an unknown policy or a bad argument."""
    return Scheduler(_policy("provisioning", config.provisioning), _policy("routing", config.routing),
                     _policy("order", config.order), _policy("batching", config.batching),
                     config.queue_depth, turn_timeout_s)


def _policy(kind: str, chosen: cfg.Policy) -> Any:
    known = POLICIES[kind]
    if chosen.name not in known:
        raise cfg.ConfigError(f"scheduler.{kind}.name={chosen.name!r}: unknown policy; "
                              f"one of {', '.join(sorted(known))}")
    policy = known[chosen.name]
    takes = list(inspect.signature(policy).parameters)
    for key in [k for k in chosen.args if k not in takes] + [k for k in takes if k not in chosen.args]:
        raise cfg.ConfigError(f"scheduler.{kind}.args.{key}={chosen.args.get(key)!r}: {chosen.name} takes "
                              f"{', '.join(takes) or 'no arguments'}")
    try:
        return policy(**chosen.args)
    except (TypeError, ValueError) as error:
        raise cfg.ConfigError(f"scheduler.{kind}.args={chosen.args}: {error}") from None
