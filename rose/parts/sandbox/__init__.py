"""Isolated shells for agents: one bash session per sandbox, with limits and without network.

Other packages use `Sandbox`. It runs on one of the backends `namespaces` and `gvisor`, which
`probe` chooses. The modules that a keeper process imports need the standard library only, so
that it stays small and any Python can run it. Nothing here knows environments, models or configs.

`Sandbox` and the names of `probe` are imported at their first use. A keeper needs neither, and
imports without them take about half of the CPU time. That counts where an agent is a program of its
own: it starts a keeper for each trajectory.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rose.parts.sandbox.backend import Limits, Mount, Result, SandboxError, Spec

if TYPE_CHECKING:
    from rose.parts.sandbox.probe import Found, choose, describe
    from rose.parts.sandbox.sandbox import Sandbox

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
    "Found": "rose.parts.sandbox.probe",
    "choose": "rose.parts.sandbox.probe",
    "describe": "rose.parts.sandbox.probe",
    "Sandbox": "rose.parts.sandbox.sandbox",
}


def __getattr__(name: str) -> Any:
    """Import a name of `MODULES` at its first use (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
