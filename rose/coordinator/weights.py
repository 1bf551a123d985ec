"""The newest version of the policy's weights, and the workers' loads of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from rose import protocol as p
from rose.coordinator.worker import Worker, Workers
from rose.scheduler import events as ev

# After this many failed loads of a version, a hybrid engine waits for the next version. So it does
# not read a damaged version again and again.
MOST_HYBRID_LOADS = 3


class Weights:
    """Publishes versions to the scheduler, which orders the workers to load them. `on_fault` gets
    (what, detail)."""

    def __init__(
        self,
        workers: Workers,
        feed: Callable[[ev.Event], None],
        on_action: Callable[[ev.Action], None],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._workers, self._feed = workers, feed
        self._on_action, self._on_fault = on_action, on_fault
        self.store = ""  # folder of the weight store
        self.version = -1  # newest published
        self.sync_bytes = 0  # bytes that all workers loaded of the newest version
        self.sync_pause_s = 0.0  # longest pause of a worker for the newest version

    def publish(self, version: int, store: str) -> None:
        """Have every worker load this version before it gets another turn. `store` is the folder of
        the weight store."""
        self.version, self.store = version, store
        self.sync_bytes, self.sync_pause_s = 0, 0.0
        self._feed(ev.VersionPublished(at=time.time(), version=version))
        for name, worker in list(self._workers.items()):
            failed, worker.failed_loads = worker.failed_loads, 0
            if worker.alive and failed >= MOST_HYBRID_LOADS:
                # The scheduler still counts it as loading, and would order no further load.
                self._load_ended(name, worker)

    def stale_workers(self) -> list[str]:
        """Return the workers that the step loop waits for: dedicated ones that are up, are used by
        the scheduler and don't hold the newest version yet."""
        return [
            name
            for name, w in self._workers.of("dedicated")
            if w.alive and w.version != self.version and name not in self._workers.idled
        ]

    @property
    def are_loaded(self) -> bool:
        """True if a dedicated worker is up and none is stale."""
        up = any(w.alive for _, w in self._workers.of("dedicated"))
        return up and not self.stale_workers()

    def loaded(self, m: p.VersionLoaded) -> bool:
        """Note a load; return False if the worker's engine has been restarted since."""
        worker = self._workers.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation:
            return False
        worker.version = m.version
        self.sync_bytes += m.nbytes
        self.sync_pause_s = max(self.sync_pause_s, m.pause_s)
        self._load_ended(m.worker, worker)
        return True

    def failed(self, m: p.VersionFailed) -> None:
        worker = self._workers.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation:
            return
        # The run ends if a dedicated worker can't load the newest version, because the step loop
        # waits for it. After any other failed load, the scheduler orders the newest version;
        # after a hybrid's last try (MOST_HYBRID_LOADS) only the next version that is published.
        if worker.pool != "dedicated" or m.version < self.version:
            if worker.pool == "hybrid" and m.version == self.version:
                worker.failed_loads += 1
                last = worker.failed_loads == MOST_HYBRID_LOADS
                then = "not before the next version" if last else "again"
                self._on_fault("version not loaded", f"{m.worker}: {m.error}; {then}")
                if last:
                    return
            self._load_ended(m.worker, worker)
            return
        self._on_action(ev.GiveUp(f"{m.worker} could not load version {m.version}: {m.error}"))

    def _load_ended(self, name: str, worker: Worker) -> None:
        """Report to the scheduler which version the worker holds after a load or a failed one."""
        self._feed(ev.WorkerLoaded(at=time.time(), worker=name, version=worker.version))
