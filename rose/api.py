"""The names that code outside of ROSE may import. They remain here when ROSE's modules move.

    from rose.api import Action, ConfigError, Environment, Start, Step, ToolCall    # environments
    from rose.api import Cluster, Fleet, TurnState, WorkerState, events             # policies
    from rose.api import Algorithm, Summary, TokenBatch                             # algorithms
    from rose.api import Episode                                                    # rewards

Each name is imported from its module when it is first used, so that an environment imports neither
torch nor the scheduler. docs/environments.md, docs/policies.md and docs/algorithms.md say what to
implement.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rose.agent.envs.base import Action, Environment, Start, Step, ToolCall
    from rose.config import ConfigError
    from rose.reward.episode import Episode
    from rose.scheduler import events
    from rose.scheduler.fleet import Fleet
    from rose.scheduler.policies import Batching, Order, Placement, Provisioning, Routing
    from rose.scheduler.state import Cluster, HostState, TurnState, WorkerState
    from rose.trainer.algorithms.base import Algorithm, Summary, TokenBatch

MODULES = {
    "rose.agent.envs.base": ("Action", "Environment", "Start", "Step", "ToolCall"),
    "rose.config": ("ConfigError",),
    "rose.reward.episode": ("Episode",),
    "rose.scheduler": ("events",),
    "rose.scheduler.fleet": ("Fleet",),
    "rose.scheduler.policies": ("Batching", "Order", "Placement", "Provisioning", "Routing"),
    "rose.scheduler.state": ("Cluster", "HostState", "TurnState", "WorkerState"),
    "rose.trainer.algorithms.base": ("Algorithm", "Summary", "TokenBatch"),
}
_PLACES = {name: module for module, names in MODULES.items() for name in names}

__all__ = [
    "Action",
    "Algorithm",
    "Batching",
    "Cluster",
    "ConfigError",
    "Environment",
    "Episode",
    "Fleet",
    "HostState",
    "Order",
    "Placement",
    "Provisioning",
    "Routing",
    "Start",
    "Step",
    "Summary",
    "TokenBatch",
    "ToolCall",
    "TurnState",
    "WorkerState",
    "events",
]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` from its module at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"rose.api has no {name}; it has {', '.join(__all__)}")
    module = importlib.import_module(_PLACES[name])
    found = getattr(module, name, None)
    return importlib.import_module(f"{_PLACES[name]}.{name}") if found is None else found


def __dir__() -> list[str]:
    return __all__
