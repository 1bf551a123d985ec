"""The rivals' policies by kind and by the names of their Hydra options (`rose.extensions` finds
them)."""

from __future__ import annotations

from rose.parts.rivals.elastic import Elastic
from rose.parts.rivals.libra import LibraPlanner, LibraRouting, Mlfq
from rose.parts.rivals.prism import Static
from rose.parts.rivals.rlboost import RlBoost
from rose.parts.rivals.rollart import RollArt, TrajectoryAsync
from rose.parts.rivals.rollpacker import TailBatching
from rose.parts.rivals.seer import LongestFirst, Seer
from rose.parts.rivals.serverless import Serverless
from rose.parts.rivals.thunder import ShortestFirst, Thunder

POLICIES: dict[str, dict[str, type]] = {
    "provisioning": {
        "elastic": Elastic,
        "libra": LibraPlanner,
        "rlboost": RlBoost,
        "serverless": Serverless,
        "static": Static,
    },
    "routing": {"libra": LibraRouting, "rollart": RollArt, "seer": Seer, "thunder": Thunder},
    "order": {"longest_first": LongestFirst, "mlfq": Mlfq, "shortest_first": ShortestFirst},
    "batching": {"tail_batching": TailBatching, "trajectory_async": TrajectoryAsync},
}
