"""Environment hosts: the cores that sandboxes share, their memory, and the link to the store.

rose.parts.simulator.sandboxes decides what a host runs and saves, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from rose.parts.simulator.loop import Loop


class Task:
    """A user of a host's cores, which has at most one job at a time."""

    __slots__ = ("job",)

    def __init__(self) -> None:
        self.job = 0  # serial number of its job; 0: none


class Cores:
    """The cores of a host under processor sharing: each of n jobs on c cores runs at the rate
    min(1, c / n).

    All jobs run at the same rate. So one counter serves all: the work of an imaginary job that has
    run from the start. A job of s seconds ends when the counter has grown by s.
    """

    def __init__(self, cores: float, loop: Loop) -> None:
        self.cores, self._loop = cores, loop
        self.running = 0
        self.used_s = 0.0  # sum of the jobs' durations, waits for a core included
        self._done = 0.0  # seconds of work of the imaginary job
        self._at = 0.0  # time of the last update
        # heap of (`_done` at the job's end, serial number, task, callback)
        self._jobs: list[tuple[float, int, Task, Callable]] = []
        self._serial = self._ticket = 0

    def run(self, seconds: float, task: Task, then: Callable[[Task], None]) -> None:
        """Start a job of `task` and call `then(task)` after `seconds` of a core's time."""
        self._advance()
        self._serial += 1
        task.job = self._serial
        heappush(self._jobs, (self._done + seconds, self._serial, task, then))
        self.running += 1
        self._plan()

    def cancel(self, task: Task) -> None:
        """Cancel the task's job, if it has one. Its callback is not called."""
        if task.job:
            self._advance()
            task.job = 0
            self.running -= 1
            self._plan()

    def clear(self) -> None:
        """Cancel all jobs."""
        self._advance()
        for _, serial, task, _ in self._jobs:
            if task.job == serial:
                task.job = 0
        self._jobs.clear()
        self.running = self._ticket = 0

    def used(self) -> float:
        """Return `used_s` up to now."""
        self._advance()
        return self.used_s

    def _advance(self) -> None:
        """Bring the counters up to the present."""
        passed = self._loop.now - self._at
        if passed and self.running:
            self.used_s += passed * self.running
            self._done += passed * min(1.0, self.cores / self.running)
        self._at = self._loop.now

    def _plan(self) -> None:
        """Schedule the end of the job that ends first."""
        while self._jobs and self._jobs[0][2].job != self._jobs[0][1]:
            heappop(self._jobs)
        if not self._jobs:
            self._ticket = 0
            return
        left = max(0.0, self._jobs[0][0] - self._done)
        due = self._loop.now + left * max(1.0, self.running / self.cores)
        self._ticket = self._loop.at(due, self._due, None)

    def _due(self, _what: None, ticket: int) -> None:
        """End the job that is due, and schedule the next end."""
        if ticket != self._ticket:
            return
        self._advance()
        end, _, task, then = heappop(self._jobs)
        self._done = max(self._done, end)  # They differ only by rounding.
        task.job = 0
        self.running -= 1
        self._plan()
        then(task)


class Host:
    """An environment host: its cores and its sandboxes. `life` counts its failures, so that events
    from before a failure are recognized."""

    __slots__ = (
        "name",
        "cores",
        "alive",
        "life",
        "boxes",
        "waiting",
        "staged",
        "link_free",
        "used_s",
    )

    def __init__(self, name: str, cores: float, loop: Loop) -> None:
        self.name, self.cores = name, Cores(cores, loop)
        self.alive, self.life = True, 0
        self.boxes: dict[str, Task] = {}  # trajectory -> its sandbox, which has memory
        self.waiting: deque[Task] = deque()  # sandboxes that wait for memory
        self.staged = 0.0  # bytes captured and not stored yet
        self.link_free = 0.0  # time at which all captured bytes are sent
        self.used_s = 0.0  # `Cores.used_s` at the last load report
