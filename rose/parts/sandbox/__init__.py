"""Isolated shells for agents: one bash session per sandbox, with limits and without network.

Other packages use `Sandbox`. It runs on one of the backends `namespaces` and `gvisor`, which
`probe` chooses. A keeper is a small process that creates the sandboxes of its host process. The
modules that it imports need only the standard library, so any Python can run it. Only `envs` and
`doctor` know about environments and configs.

`Sandbox` and the names of `probe` are imported at their first use. A keeper doesn't use them, and
without them its imports take half of the CPU time. This matters if agents are separate programs,
because each program starts a keeper.
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
