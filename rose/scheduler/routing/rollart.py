"""RollArt's hardware affinity."""

from __future__ import annotations

from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class RollArt:
    """A domain's turns go to the GPUs that suit them: prefill-heavy ones (many turns, short
    outputs) to devices with much compute, decode-heavy ones (few turns, long outputs) to those with
    much memory bandwidth per cost; to any other if those are full (RollArt, arXiv 2512.22560,
    hardware-affinity workload mapping).

    The user declares it, as in the paper: `hardware` maps a domain (`TurnRequested.domain`) to the
    hardware's name (`WorkerJoined.hardware`), and `default` is for every other domain; "" means
    any. The paper's mapping: prefill-heavy on H800, decode-heavy on H20. On the chosen hardware the
    worker with the trajectory's cached prefix comes first.
    """

    def __init__(self, hardware: dict[str, str], default: str) -> None:
        self.hardware, self.default = dict(hardware), default

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        wanted = self.hardware.get(turn.domain, self.default)
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        if home is not None and (not wanted or cluster.workers[home.worker].hardware == wanted):
            return home
        best = fleet.least(turn, hardware=wanted) if wanted else None
        return best or home or fleet.least(turn)
