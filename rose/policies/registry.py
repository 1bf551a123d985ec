"""Policies by the names of their Hydra options. Parts add theirs by a module `policies.py` with
POLICIES (`rose.extensions`). Policies of other packages are entry points KIND.NAME of the group
`rose.policies`, or are named as package.module:Class."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from rose import config as cfg
from rose import extensions
from rose.config import outside
from rose.policies.areal import BoundedStaleness
from rose.policies.carry_over import CarryOver
from rose.policies.dapo import Dapo
from rose.policies.ours import AllIdle, DueFirst, EarliestFinish, OnDemand
from rose.policies.placement import Rebalance, Stay
from rose.policies.plain import CacheAffine, Fifo, Fixed, LeastLoaded, RoundRobin
from rose.policies.rose import RoseProvisioning, RoseRouting
from rose.policies.verl import OneStepOff, Synchronous
from rose.scheduler.core import Scheduler
from rose.scheduler.policies import Batching, Order, Placement, Provisioning, Routing

OWN: dict[str, dict[str, type]] = {
    "provisioning": {
        "all_idle": AllIdle,
        "fixed": Fixed,
        "on_demand": OnDemand,
        "rose": RoseProvisioning,
    },
    "routing": {
        "cache_affine": CacheAffine,
        "earliest_finish": EarliestFinish,
        "least_loaded": LeastLoaded,
        "rose": RoseRouting,
        "round_robin": RoundRobin,
    },
    "order": {"due_first": DueFirst, "fifo": Fifo},
    "batching": {
        "bounded_staleness": BoundedStaleness,
        "carry_over": CarryOver,
        "dapo": Dapo,
        "one_step_off": OneStepOff,
        "synchronous": Synchronous,
    },
    "placement": {"rebalance": Rebalance, "stay": Stay},
}


PROTOCOLS: dict[str, type] = {
    "provisioning": Provisioning,
    "routing": Routing,
    "order": Order,
    "batching": Batching,
    "placement": Placement,
}


def policies(kind: str) -> dict[str, type]:
    """Return the policies of a kind by name: those of this package and of the parts."""
    found = dict(OWN[kind])
    for part in extensions.modules("policies").values():
        found |= part.POLICIES.get(kind, {})
    return found


def build(config: cfg.Scheduler, turn_timeout_s: float) -> Scheduler:
    """Build the scheduler that the config describes. Raises `rose.config.ConfigError`, with the
    key, for an unknown policy or a bad argument."""
    return Scheduler(
        policy("provisioning", config.provisioning),
        policy("routing", config.routing),
        policy("order", config.order),
        policy("batching", config.batching),
        config.queue_depth,
        turn_timeout_s,
        policy("placement", config.placement),
    )


def resolved(c: cfg.Config) -> cfg.Config:
    """Return the configuration with a value for `transfer.in_flight`: if it is null, the batching
    policy determines it. Raises `rose.config.ConfigError` as `build` does."""
    if c.transfer.in_flight:
        return c
    in_step = getattr(policy("batching", c.scheduler.batching), "waits_for_weights", False)
    in_flight: Any = "recompute" if in_step else "keep"
    return msgspec.structs.replace(
        c, transfer=msgspec.structs.replace(c.transfer, in_flight=in_flight)
    )


def policy(kind: str, chosen: cfg.Policy) -> Any:
    """Build one policy. Raises `rose.config.ConfigError` as `build` does."""
    ours = policies(kind)
    found = ours.get(chosen.name) or outside.find(
        f"scheduler.{kind}.name",
        chosen.name,
        f"{kind} policy",
        tuple(sorted(ours)),
        "rose.policies",
        f"{kind}.",
    )
    takes = outside.parameters(found) or {}
    needed = [k for k, p in takes.items() if p.default is p.empty]
    for key in [k for k in chosen.args if k not in takes] + [
        k for k in needed if k not in chosen.args
    ]:
        raise cfg.ConfigError(
            f"scheduler.{kind}.args.{key}={chosen.args.get(key)!r}: {chosen.name} takes "
            f"{', '.join(takes) or 'no arguments'}"
        )
    types = get_type_hints(found.__init__)
    for key, value in chosen.args.items():
        try:
            msgspec.convert(value, types.get(key, Any))
        except msgspec.ValidationError as error:
            reason = str(error)[0].lower() + str(error)[1:]
            raise cfg.ConfigError(f"scheduler.{kind}.args.{key}={value!r}: {reason}") from None
    try:
        made = found(**chosen.args)
    except (TypeError, ValueError) as error:
        raise cfg.ConfigError(f"scheduler.{kind}.args={chosen.args}: {error}") from None
    except (Exception, SystemExit) as error:  # The class is a user's.
        raise cfg.ConfigError(
            f"scheduler.{kind}.args={chosen.args}: {chosen.name} raised {error!r}"
        ) from error
    if lacks := outside.lacking(made, PROTOCOLS[kind]):
        raise cfg.ConfigError(
            f"scheduler.{kind}.name={chosen.name!r}: {found.__qualname__} is no {kind} policy, it "
            f"lacks {', '.join(lacks)} (rose/scheduler/policies.py)"
        )
    return made
