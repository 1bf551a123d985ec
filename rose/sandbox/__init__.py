"""Isolated shells for agents: one bash session per sandbox, with limits and without network.

`Sandbox` is what others use; behind it are backends (`namespaces`, `gvisor`, `apptainer`), chosen
by `probe`. Imports the standard library only: a keeper process of it stays small, and any Python
can run it. Must know nothing of environments, models or configuration.

`Sandbox` and the names of `probe` are imported at their first use. A keeper needs neither, and
imports without them take about half of the processor time; an agent that is a program of its own
starts a keeper for each trajectory.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rose.sandbox.backend import Limits, Mount, Result, SandboxError, Spec

if TYPE_CHECKING:
    from rose.sandbox.probe import Found, choose, describe
    from rose.sandbox.sandbox import Sandbox

__all__ = [
    "Found",
    "Limits",
    "Mount",
    "Result",
    "Sandbox",
    "SandboxError",
    "Spec",
    "choose",
    "describe",
]

MODULES = {
    "Found": "rose.sandbox.probe",
    "choose": "rose.sandbox.probe",
    "describe": "rose.sandbox.probe",
    "Sandbox": "rose.sandbox.sandbox",
}


def __getattr__(name: str) -> Any:
    """Import what is named in `MODULES` (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
