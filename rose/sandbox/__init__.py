"""Isolated shells for agents: one bash session per sandbox, with limits and without network.

`Sandbox` is what others use; behind it are backends (`namespaces`, `gvisor`, `apptainer`), chosen
by `probe`. Imports the standard library only: a keeper process of it stays small, and any Python
can run it. Must know nothing of environments, models or configuration.
"""

from rose.sandbox.backend import Limits, Mount, Result, SandboxError, Spec
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
