"""Sandboxes in simulated time: they start, run commands, are saved, die with their host, and
continue on another host.

    open -> wait for memory -> start or restore -> ready -> command -> observed: the model generates
              ^                                               |
              +--- host lost, or moved <--- stored <--- classify, capture: the next command waits

A host may be lost at any time; a move waits until all turns are stored. Commands, starts and
captures share the host's cores. Captured bytes pass two queues, each host's link and then the
store's, first come first served. Live, urgent captures go first (rose/parts/sandbox/engine.py).

A turn is saved when its bytes are stored. A turn that changed nothing is saved together with the
turn before it. Captured bytes that are not stored yet are lost with their host.

Failures are drawn per (seed, host), and what each turn changes per (seed, trajectory). So all ways
of recovery are compared on the same failures and changes.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

import numpy as np

from rose import protocol
from rose.parts.simulator import result, spec
from rose.parts.simulator.episodes import Trajectory
from rose.parts.simulator.hosts import Host, Task
from rose.parts.simulator.loop import Loop
from rose.scheduler import events as ev

# Offsets that keep the seeds of the random streams of hosts, trajectories and groups apart.
FAILURES = 1 << 33  # numerics: an offset of its own; rose/parts/simulator/driver.py has another
CHANGES = 1 << 34  # numerics: likewise


class Hub(Protocol):
    """The owner of the trajectories, as this module uses it."""

    def feed(self, event: ev.Event) -> None: ...

    def ready(self, trajectory: Trajectory) -> None:
        """Request the trajectory's next turn."""

    def observed(self, trajectory: Trajectory, more: bool) -> None:
        """Continue after the turn's command: with the next turn if `more`, otherwise end."""

    def rewind(self, trajectory: Trajectory, turns: int, keep_open: bool) -> None:
        """Set back a trajectory that has lost its host (see `Trajectory.rewind`)."""


class Box(Task):
    """The sandbox of one trajectory, on any host. A new `life` begins when it leaves a host; events
    of earlier lives are ignored."""

    __slots__ = (
        "trajectory",
        "host",
        "life",
        "ready",
        "turn_open",
        "command",
        "since",
        "turn",
        "running",
        "saving",
        "commands_s",
        "changes",
        "saved",
        "unsaved",
        "reserved",
        "overdue",
        "stored",
        "target",
    )

    def __init__(self, trajectory: Trajectory, changes: list[int]) -> None:
        super().__init__()
        self.trajectory, self.changes = trajectory, changes
        self.host: Host | None = None
        self.life = 0
        self.ready = False  # the sandbox has started
        self.turn_open = False
        # (seconds, True if another turn follows) of the command that runs or waits
        self.command: tuple[float, bool] | None = None
        self.since = 0.0  # time at which the command came, or began to run
        self.running = False  # the command runs
        self.turn = 0  # number of turns whose commands have run
        self.saving = False  # the last turn is being classified or captured; no command runs
        self.commands_s = 0.0  # seconds of all commands so far
        self.saved = 0  # number of turns that are saved
        # Turns that are captured and not stored yet. Each capture includes the turns before it.
        self.unsaved: deque[int] = deque()
        self.reserved = 0.0  # bytes of the current capture
        # A save that was skipped because the host had no room. The next capture includes it.
        self.overdue: spec.Save | None = None
        self.stored = False  # the store has a state of this sandbox
        self.target: Host | None = None  # host that the sandbox is to move to

    @property
    def settled(self) -> bool:
        """True while nothing runs in the sandbox and all its turns are saved."""
        return self.ready and not (self.running or self.saving) and self.saved == self.turn


class Sandboxes:
    """The sandboxes of a run and their hosts."""

    def __init__(
        self, what: spec.Sandboxes, loop: Loop, seed: int, hub: Hub, counts: result.Counts
    ) -> None:
        self._what, self._loop, self._seed, self._hub, self._counts = what, loop, seed, hub, counts
        self._hosts = [Host(f"host-{i}", cores, loop) for i, cores in enumerate(what.cores)]
        self._draws = [
            np.random.Generator(np.random.PCG64([seed, FAILURES + at]))
            for at in range(len(what.cores))
        ]
        self._boxes: dict[str, Box] = {}
        self._waiting_for_host: deque[Box] = deque()  # sandboxes that wait because no host is up
        self._store_free = 0.0
        self._saves = what.recovery in ("full", "classified")
        self._shares = np.cumsum([change.share for change in what.changes])

    def start(self) -> None:
        """Schedule the hosts' load reports and failures."""
        for at, host in enumerate(self._hosts):
            self._loop.at(self._what.load_s, self._report_load, host)
            self._plan_failure(host, at)
        for at, index in self._what.failures:
            self._loop.at(at, self._fail, (self._hosts[index], index, False))

    # ----------------------------------------------------------------- begin and end

    def open(self, trajectory: Trajectory) -> None:
        """Open a sandbox on the host that the trajectory's name selects, as in
        rose.coordinator.groups, or on the least used host if that host is down."""
        changes = self._draw_changes(trajectory) if self._what.recovery == "classified" else []
        box = self._boxes[trajectory.key] = Box(trajectory, changes)
        host = self._hosts[protocol.seed_of(trajectory.key) % len(self._hosts)]
        self._enter(box, host if host.alive else self._least_used_host())

    def _draw_changes(self, trajectory: Trajectory) -> list[int]:
        """Draw what each turn changes, as indices into `spec.Sandboxes.changes`."""
        key = protocol.seed_of(trajectory.key)
        draw = np.random.Generator(np.random.PCG64([self._seed, CHANGES + key]))
        lots = draw.random(len(trajectory.episode.output_tokens)) * self._shares[-1]
        return np.searchsorted(self._shares, lots, "right").tolist()

    def close(self, trajectory: Trajectory) -> None:
        box = self._boxes.pop(trajectory.key, None)
        if box is not None:
            self._leave(box)

    def _enter(self, box: Box, host: Host | None) -> None:
        """Start the sandbox on this host once there is memory for it. None: wait for a host."""
        box.host = host
        if host is None:
            self._waiting_for_host.append(box)
        elif (len(host.boxes) + 1) * self._what.sandbox_bytes > self._what.memory_bytes:
            host.waiting.append(box)
        else:
            host.boxes[box.trajectory.key] = box
            self._begin(box, host)

    def _leave(self, box: Box) -> None:
        """Remove the sandbox from its host. Events that are already scheduled have no effect."""
        host, key = box.host, box.trajectory.key
        box.life += 1
        box.ready, box.running, box.saving, box.host = False, False, False, None
        if host is None:
            if box in self._waiting_for_host:
                self._waiting_for_host.remove(box)
            return
        host.cores.cancel(box)
        if host.boxes.pop(key, None) is None:
            host.waiting.remove(box)
            return
        host.staged, box.reserved, box.overdue = host.staged - box.reserved, 0.0, None
        self._admit(host)

    def _admit(self, host: Host) -> None:
        """Start sandboxes that wait for memory of this host, while there is room."""
        while host.waiting and host.alive:
            if (len(host.boxes) + 1) * self._what.sandbox_bytes > self._what.memory_bytes:
                return
            box = host.waiting.popleft()
            host.boxes[box.trajectory.key] = box
            self._begin(box, host)

    def _least_used_host(self) -> Host | None:
        """Return the running host with the fewest sandboxes."""
        up = [host for host in self._hosts if host.alive]
        return min(up, key=lambda host: len(host.boxes) + len(host.waiting), default=None)

    def _begin(self, box: Box, host: Host) -> None:
        """Start the sandbox in its trajectory's state: from the store, by replaying commands, or
        from the beginning."""
        what, trajectory = self._what, box.trajectory
        if self._saves and box.stored:
            begin = max(self._loop.now, self._store_free)
            self._store_free = begin + what.restore_bytes / what.store_bytes_s
            self._loop.at(self._store_free, self._restore, (box, box.life, host))
            return
        seconds = what.start_s + trajectory.episode.reset_s
        if what.recovery == "replay":
            done = trajectory.number - (box.command is not None)
            seconds += sum(trajectory.episode.tool_s[:done])
        host.cores.run(seconds, box, self._started)

    def _restore(self, what: tuple[Box, int, Host], _ticket: int) -> None:
        """Start the sandbox from a state that was read from the store."""
        box, life, host = what
        if box.life == life:
            seconds = self._what.start_s + self._what.restore_s
            host.cores.run(seconds, box, self._started)

    def _started(self, box: Box) -> None:
        """Request a turn, or run the command that waits for the sandbox."""
        box.ready = True
        if box.command is None and not box.turn_open:
            box.turn_open = True
            self._hub.ready(box.trajectory)
        self._next(box)

    # ----------------------------------------------------------------- turns

    def command(self, trajectory: Trajectory, seconds: float, more: bool) -> None:
        """Accept the command of a turn that ended. It runs as soon as the sandbox is free."""
        box = self._boxes[trajectory.key]
        box.command, box.turn_open, box.since = (seconds, more), False, self._loop.now
        self._next(box)

    def _next(self, box: Box) -> None:
        """Move the sandbox if it has a target. Otherwise run its command if nothing else runs."""
        if box.target is not None:
            self._leave_for_target(box)
        elif box.command is not None and box.ready and not (box.running or box.saving):
            self._run(box)

    def _run(self, box: Box) -> None:
        box.running, box.since = True, self._loop.now
        box.host.cores.run(box.command[0] + self._what.turn_s, box, self._ran)

    def _ran(self, box: Box) -> None:
        """End a command: pass on its observation. If a turn follows, save the sandbox meanwhile."""
        more, box.command, box.running = box.command[1], None, False
        box.commands_s += self._loop.now - box.since
        box.turn, box.turn_open = box.trajectory.number, more
        box.saving = more and self._saves
        self._hub.observed(box.trajectory, more)
        if not box.saving:
            return
        if self._what.recovery == "classified" and self._what.look_s:
            box.host.cores.run(self._what.look_s, box, self._capture)
        else:
            self._capture(box)

    def _save_of(self, box: Box) -> spec.Save | None:
        """Return the cost of saving the last turn, and earlier turns whose save was skipped. None:
        nothing to save."""
        if self._what.recovery == "full":
            return self._what.full
        saves = (self._what.changes[box.changes[box.turn - 1]].save, box.overdue)
        return max(filter(None, saves), key=lambda save: save.bytes, default=None)

    def _capture(self, box: Box) -> None:
        """Capture the sandbox. As in rose.parts.sandbox.checkpointer, the capture is skipped if the
        bytes that wait for the store leave no room; the next capture then includes this turn."""
        host, save = box.host, self._save_of(box)
        if save is None:
            self._end_saving(box)
            self._note_unchanged(box)
            self._next(box)
        elif host.staged and host.staged + save.bytes > self._what.staging_bytes:
            box.overdue = save
            self._counts.skipped_saves += 1
            self._end_saving(box)
            self._next(box)
        else:
            box.overdue = None
            host.staged += save.bytes
            box.reserved = save.bytes
            host.cores.run(save.capture_s, box, self._captured)

    def _captured(self, box: Box) -> None:
        """Send the captured bytes to the store."""
        host, size = box.host, box.reserved
        box.reserved = 0.0
        box.unsaved.append(box.turn)
        host.link_free = max(self._loop.now, host.link_free) + size / self._what.host_bytes_s
        self._loop.at(host.link_free, self._sent, (host, host.life, box, size))
        self._end_saving(box)
        self._next(box)

    def _end_saving(self, box: Box) -> None:
        """End classification and capture, so that commands may run again."""
        box.saving = False
        if box.command is not None:
            self._counts.save_s += self._loop.now - box.since

    # ----------------------------------------------------------------- saved

    def _sent(self, what: tuple[Host, int, Box, float], _ticket: int) -> None:
        """Queue the bytes at the store, since the host has sent them."""
        host, life, _, size = what
        if host.life == life:
            begin = max(self._loop.now, self._store_free)
            self._store_free = begin + size / self._what.store_bytes_s
            self._loop.at(self._store_free, self._stored, what)

    def _stored(self, what: tuple[Host, int, Box, float], _ticket: int) -> None:
        """Count the turns of a capture as saved."""
        host, life, box, size = what
        self._counts.saved_bytes += size
        if host.life != life:
            return  # The host died before it wrote the manifest, so the bytes are useless.
        host.staged -= size
        if self._boxes.get(box.trajectory.key) is box:
            box.saved, box.stored = box.unsaved.popleft(), True
            self._report_saved(box)

    def _note_unchanged(self, box: Box) -> None:
        """Count a turn that changed nothing as saved together with the turns before it."""
        if box.unsaved:
            box.unsaved[-1] = box.turn
        else:
            box.saved = box.turn
            self._report_saved(box)

    def _report_saved(self, box: Box) -> None:
        self._hub.feed(
            ev.TrajectorySaved(
                at=self._loop.now,
                trajectory=box.trajectory.key,
                host=box.host.name,
                turns=box.saved,
                commands_s=box.commands_s,
            )
        )
        self._next(box)

    # ----------------------------------------------------------------- moves and failures

    def move(self, trajectory: str, host: str) -> None:
        """Have the trajectory's sandbox move to this host once it is settled."""
        box = self._boxes.get(trajectory)
        target = next((each for each in self._hosts if each.name == host), None)
        if box is not None and target is not None and target.alive:
            box.target = target
            self._next(box)

    def _leave_for_target(self, box: Box) -> None:
        """Move the sandbox to its target once it is settled. Its next command waits until then."""
        target = box.target
        if not target.alive or target is box.host:
            box.target = None
            self._next(box)
        elif box.settled:
            box.target = None
            self._counts.moved += 1
            self._leave(box)
            self._enter(box, target)

    def _plan_failure(self, host: Host, index: int) -> None:
        """Schedule the host's next drawn failure."""
        if self._what.mtbf_s < math.inf:
            after = self._draws[index].exponential(self._what.mtbf_s)
            self._loop.at(self._loop.now + after, self._fail, (host, index, True))

    def _fail(self, failure: tuple[Host, int, bool], _ticket: int) -> None:
        """Kill a host, and lose its sandboxes. `failure` is (host, its index, True if drawn). After
        a drawn failure, the restart draws the next one."""
        host = failure[0]
        if not host.alive:
            return
        host.alive, lost = False, [*host.boxes.values(), *host.waiting]
        host.life += 1
        host.cores.clear()
        host.boxes.clear()
        host.waiting.clear()
        host.staged, host.link_free = 0.0, 0.0
        for box in lost:
            box.life += 1
            box.ready, box.running, box.saving, box.reserved = False, False, False, 0.0
            box.host = box.target = box.overdue = None
            box.unsaved.clear()
        self._counts.lost_hosts += 1
        self._loop.at(self._loop.now + self._what.restart_s, self._restart, failure)
        self._hub.feed(ev.HostLost(at=self._loop.now, host=host.name))
        for box in lost:
            if self._boxes.get(box.trajectory.key) is box:
                self._lose(box)

    def _lose(self, box: Box) -> None:
        """Rewind the trajectory of a sandbox that was lost with its host, and plan its recovery."""
        trajectory, replay = box.trajectory, self._what.recovery == "replay"
        turns = trajectory.number if replay else box.saved
        if not replay:
            box.command, box.turn = None, box.saved
        if self._what.recovery == "none":
            turns = 0
        self._hub.rewind(trajectory, turns, keep_open=self._what.recovery != "none")
        box.turn_open = False
        self._loop.at(self._loop.now + self._what.detect_s, self._recover, (box, box.life))

    def _recover(self, what: tuple[Box, int], _ticket: int) -> None:
        """Start a sandbox on another host, since its host was lost."""
        box, life = what
        if box.life == life and self._boxes.get(box.trajectory.key) is box:
            self._counts.recovered += 1
            self._enter(box, self._least_used_host())

    def _restart(self, failure: tuple[Host, int, bool], _ticket: int) -> None:
        """Restart the host of `failure` (see `_fail`) and place the sandboxes that wait for one."""
        host, index, drawn = failure
        host.alive, host.used_s = True, host.cores.used()
        if drawn:
            self._plan_failure(host, index)
        waiting_for_host, self._waiting_for_host = self._waiting_for_host, deque()
        for box in waiting_for_host:
            self._enter(box, self._least_used_host())

    def _report_load(self, host: Host, _ticket: int) -> None:
        """Report the host's load to the scheduler, and schedule the next report."""
        what, now = self._what, self._loop.now
        if host.alive:
            used, before = host.cores.used(), host.used_s
            host.used_s = used
            self._hub.feed(
                ev.HostLoad(
                    at=now,
                    host=host.name,
                    running=len(host.boxes),
                    cores=host.cores.cores,
                    cpu=(used - before) / what.load_s,
                    memory=len(host.boxes) * what.sandbox_bytes / what.memory_bytes,
                )
            )
        self._loop.at(now + what.load_s, self._report_load, host)
