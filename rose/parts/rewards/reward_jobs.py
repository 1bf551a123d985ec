"""Slurm jobs that compute rewards: which to request and which to cancel.

A pool requests jobs when all its own workers are up and its oldest score has waited `LONG_WAIT_S`.
It gets enough jobs for every waiting score, counting jobs that have not joined yet; all pools
together have `reward.max_jobs` at most. A running job ends by itself (job.py). A queued
job is cancelled when its pool has had no waiting score for reward.idle_s. After a refusal no job is
requested for `BACK_OFF_S`, doubled by each further refusal in a row (`BackOff`). provisioner.py
submits and polls the jobs.
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

LONG_WAIT_S = 5.0  # seconds that the oldest score waits before its pool requests jobs
BACK_OFF_S = 60.0  # seconds without requests after the first refusal


@dataclass
class _Job:
    pool: int  # index
    runs: bool = False  # True: Slurm has started it


class RewardJobs:
    """Requests jobs by the pools' demand. `on_fault` and `on_change` get (what, detail)."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        on_fault: Callable[[str, str], None],
        on_change: Callable[[str, str], None],
    ) -> None:
        self._settings = config.reward
        cluster = config.cluster
        # reward workers of each job
        self._ranks = cpus_of(cluster, "reward", config.rollout) if cluster.slurm else 1
        self._provisioner = Provisioner(
            config, run_dir, self.feed, on_fault, on_change, lent.REWARDS
        )
        self.run, self._do = self._provisioner.run, self._provisioner.do
        # request -> job. A job of an earlier attempt counts until Slurm says that it has ended.
        self._jobs = {name: _job_named(name) for name in lent.noted(run_dir, lent.REWARDS)}
        self._numbers = itertools.count(1)  # numbers of requests, each used once
        self._quiet_since: dict[int, float] = {}  # pool -> monotonic seconds
        self._back_off = BackOff()

    def row(self) -> dict[str, int]:
        """Return the values for a step's row."""
        return {"reward_jobs": self.running}

    @property
    def running(self) -> int:
        return sum(job.runs for job in self._jobs.values())

    def handle(self, message: p.Message) -> bool:
        """Handle a pool's demand; return False for any other message."""
        if isinstance(message, p.RewardDemand):
            self.demand(message)
            return True
        return False

    def demand(self, now: p.RewardDemand) -> None:
        """Request jobs if a pool's oldest score has waited long. The pool reports its demand until
        no score waits."""
        if now.waiting:
            self._quiet_since.pop(now.index, None)
            if now.waited_s > LONG_WAIT_S and not self._back_off.waits(
                time.monotonic(), BACK_OFF_S
            ):
                self._request(now)
        else:
            self._quiet_since.setdefault(now.index, time.monotonic())

    def tick(self) -> None:
        """Cancel queued jobs of pools without waiting scores."""
        for pool, since in self._quiet_since.items():
            if time.monotonic() - since > self._settings.idle_s:
                for request in [r for r, j in self._jobs.items() if j.pool == pool and not j.runs]:
                    del self._jobs[request]
                    self._do(ev.ReleaseCapacity(request))

    def feed(self, event: ev.Event) -> None:
        """Apply the provisioner's event to the job of its request."""
        match event:
            case ev.CapacityQueued(request=name):  # An earlier attempt may have submitted it.
                self._jobs.setdefault(name, _job_named(name))
            case ev.CapacityGranted(request=name) if name in self._jobs:
                self._jobs[name].runs = True
                self._back_off.granted()
            case ev.CapacityEnded(request=name):
                self._jobs.pop(name, None)
            case ev.CapacityRefused(request=name):
                self._jobs.pop(name, None)
                self._back_off.refused(name, time.monotonic(), self._jobs)

    def _request(self, now: p.RewardDemand) -> None:
        """Request the jobs that a pool still needs, within `reward.max_jobs`."""
        submitted = sum(job.pool == now.index for job in self._jobs.values())
        coming = max(0, submitted - -(-now.joined // self._ranks))
        wanted = -(-now.waiting // (self._ranks * self._settings.per_worker)) - coming
        names = (f"reward-{now.index}-{n}" for n in self._numbers)
        for _ in range(min(wanted, self._settings.max_jobs - len(self._jobs))):
            name = next(name for name in names if name not in self._jobs)
            self._jobs[name] = _Job(now.index)
            self._do(ev.RequestCapacity(name))


def _job_named(request: str) -> _Job:
    """Return a `_Job` for the request `reward-POOL-NUMBER`."""
    return _Job(int(request.split("-")[1]))
