"""Policies, one file per paper or system, with everything that the system decides. Code that
several share is in `batches`, `asynchronous` and `speeds`. `registry` finds a policy
by its kind and name.

This package may import only `rose.scheduler` and `rose.config`. Policies are pure: they read the
cluster's state and return actions.
"""

from rose.policies.registry import build

__all__ = ["build"]
