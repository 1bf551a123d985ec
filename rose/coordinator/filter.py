"""Filter: which finished groups teach something."""

from __future__ import annotations

from rose.protocol import Trajectory


def teaches(group: list[Trajectory], dynamic_sampling: bool) -> bool:
    """False for a group without a response token and, with DAPO's dynamic sampling (arXiv
    2503.14476, section 3.2), for one whose rewards are all equal: its advantages, and so its
    gradient, are zero."""
    if all(t.response_tokens == 0 for t in group):
        return False
    return not dynamic_sampling or len({t.reward for t in group}) > 1
