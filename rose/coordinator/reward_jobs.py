"""Slurm jobs that compute rewards, by demand: which to ask for and which to give back.

A pool whose own workers are all up, and whose oldest answer has waited `LONG_S`, gets as many jobs
as its queue has places for, `reward.max_jobs` of all pools at most; those on their way count. A job
that has begun ends by itself (rose/reward/job.py), one that still queues is given back once nothing
has waited for reward.idle_s. After a refusal nothing is asked for `BACK_OFF_S`, doubled by each
further one in a row (`BackOff`). Left out: submitting and watching (provisioner.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rose import protocol as p
from rose.config import Config, cpus_of
from rose.coordinator.provisioner import Provisioner
from rose.launch import lent
from rose.scheduler import events as ev
from rose.scheduler.state import BackOff

LONG_S = 5.0
BACK_OFF_S = 60.0


@dataclass
class _Job:
    pool: int
    runs: bool = False


class RewardJobs:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        on_fault: Callable[[str, str], None],
        on_change: Callable[[str, str], None],
    ) -> None:
        self._settings = config.reward
        cluster = config.cluster
        # Each job has so many.
        self._ranks = cpus_of(cluster, "reward", config.rollout) if cluster.slurm else 1
        self._provisioner = Provisioner(
            config, run_dir, self.feed, on_fault, on_change, lent.REWARDS
        )
        self.run, self._do = self._provisioner.run, self._provisioner.do
        # by request; an earlier attempt's are there until it is known that they aren't
        self._jobs = {name: _of(name) for name in lent.noted(run_dir, lent.REWARDS)}
        self._quiet_since: dict[int, float] = {}  # by pool, monotonic
        self._back_off = BackOff()

    @property
    def running(self) -> int:
        return sum(job.runs for job in self._jobs.values())

    def demand(self, now: p.RewardDemand) -> None:
        """What a pool needs, which reports as long as anything waits."""
        if now.waiting:
            self._quiet_since.pop(now.index, None)
            if now.waited_s > LONG_S and not self._back_off.waits(time.monotonic(), BACK_OFF_S):
                self._ask(now)
        else:
            self._quiet_since.setdefault(now.index, time.monotonic())

    def tick(self) -> None:
        """Give back what nobody waits for any more."""
        for pool, since in self._quiet_since.items():
            if time.monotonic() - since > self._settings.idle_s:
                for request in [r for r, j in self._jobs.items() if j.pool == pool and not j.runs]:
                    del self._jobs[request]
                    self._do(ev.ReleaseCapacity(request))

    def feed(self, event: ev.Event) -> None:
        """What became of a request."""
        match event:
            case ev.CapacityQueued(request=name):  # maybe an earlier attempt's
                self._jobs.setdefault(name, _of(name))
            case ev.CapacityGranted(request=name) if name in self._jobs:
                self._jobs[name].runs = True
                self._back_off.granted()
            case ev.CapacityEnded(request=name):
                self._jobs.pop(name, None)
            case ev.CapacityRefused(request=name):
                self._jobs.pop(name, None)
                self._back_off.refused(name, time.monotonic(), self._jobs)

    def _ask(self, now: p.RewardDemand) -> None:
        mine = sum(job.pool == now.index for job in self._jobs.values())
        coming = max(0, mine - -(-now.joined // self._ranks))
        wanted = -(-now.waiting // (self._ranks * self._settings.per_worker)) - coming
        names = (f"reward-{now.index}-{n}" for n in itertools.count(1))
        for _ in range(min(wanted, self._settings.max_jobs - len(self._jobs))):
            name = next(name for name in names if name not in self._jobs)
            self._jobs[name] = _Job(now.index)
            self._do(ev.RequestCapacity(name))


def _of(request: str) -> _Job:
    """`reward-POOL-NUMBER`."""
    return _Job(int(request.split("-")[1]))
