"""Environment hosts: cores that sandboxes share, their memory, and the way to the store.

Left out: what is run and saved, and when (rose.sim.sandboxes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from rose.sim.loop import Loop


class Task:
    """Who uses a host: one job of it at a time."""

    __slots__ = ("job",)

    def __init__(self) -> None:
        self.job = 0  # the serial number of its job; 0: none


class Cores:
    """Processor sharing: of n jobs on c cores each runs at the rate min(1, c / n). All run alike:
    a job of s seconds ends when one that had been there from the start would have done s more."""

    def __init__(self, cores: float, loop: Loop) -> None:
        self.cores, self._loop = cores, loop
        self.running = 0
        self.used_s = 0.0  # sum of the jobs' times, waiting for a core included
        self._done = 0.0  # seconds of work, of one that was there from the start
        self._at = 0.0
        self._jobs: list[tuple[float, int, Task, Callable]] = []  # heap, by their end
        self._serial = self._ticket = 0

    def run(self, seconds: float, task: Task, then: Callable[[Task], None]) -> None:
        """`then(task)` when it has had so many seconds of a core."""
        self._advance()
        self._serial += 1
        task.job = self._serial
        heappush(self._jobs, (self._done + seconds, self._serial, task, then))
        self.running += 1
        self._plan()

    def cancel(self, task: Task) -> None:
        """Its job, if it has one, never ends."""
        if task.job:
            self._advance()
            task.job = 0
            self.running -= 1
            self._plan()

    def clear(self) -> None:
        self._advance()
        for _, serial, task, _ in self._jobs:
            if task.job == serial:
                task.job = 0
        self._jobs.clear()
        self.running = self._ticket = 0

    def used(self) -> float:
        self._advance()
        return self.used_s

    def _advance(self) -> None:
        passed = self._loop.now - self._at
        if passed and self.running:
            self.used_s += passed * self.running
            self._done += passed * min(1.0, self.cores / self.running)
        self._at = self._loop.now

    def _plan(self) -> None:
        while self._jobs and self._jobs[0][2].job != self._jobs[0][1]:
            heappop(self._jobs)
        if not self._jobs:
            self._ticket = 0
            return
        left = max(0.0, self._jobs[0][0] - self._done)
        due = self._loop.now + left * max(1.0, self.running / self.cores)
        self._ticket = self._loop.at(due, self._due, None)

    def _due(self, _what: None, ticket: int) -> None:
        if ticket != self._ticket:
            return
        self._advance()
        end, _, task, then = heappop(self._jobs)
        self._done = max(self._done, end)  # but for rounding it is there
        task.job = 0
        self.running -= 1
        self._plan()
        then(task)


class Host:
    """Its name, cores, and what it holds. `life` tells one start of it from the next."""

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
        self.boxes: dict[str, Task] = {}  # by trajectory: those with memory
        self.waiting: deque[Task] = deque()  # for memory
        self.staged = 0.0  # bytes, captured and not stored yet
        self.link_free = 0.0  # when all that was captured is sent
        self.used_s = 0.0  # of its cores, at the last word about its load
