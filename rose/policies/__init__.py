"""The systems' policies: one file per system, with all that it decides; what several share is in
`batches`, `asynchronous`, `speeds` and `causal_tree`. `registry` finds them by kind and name.

May import `rose.scheduler` and `rose.config` only, and is as pure: a policy reads the cluster and
answers with actions.
"""

from rose.policies.registry import POLICIES, build

__all__ = ["POLICIES", "build"]
