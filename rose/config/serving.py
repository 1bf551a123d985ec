"""The types of `serving`: how ranks of serving jobs may join the run."""

from __future__ import annotations

from typing import Literal

from rose.config.common import Natural, NotNegative, Positive, Section


class Serving(Section):
    """Ranks of serving jobs that join the run while it runs."""

    borrow: bool  # true: serving ranks may join
    # kind that a serving rank reports; provisioning policies distinguish the kinds
    kind: Literal["cooperative", "spot", "serverless"]
    max_ranks: Natural  # most serving ranks in the run at once
    heartbeat_s: Positive  # seconds between two heartbeats, in both directions
    lost_after_s: Positive  # seconds of silence after which a rank's turns go elsewhere
    drain_s: NotNegative  # seconds for a rank to finish its turns after SIGUSR2
    wait_s: Positive  # seconds that a serving rank waits for its run before it ends
