"""The part of the coordinator that runs groups: it starts trajectories on the environment hosts,
collects finished ones, and drops groups.

The scheduler's batching policy decides which groups to admit and drop, at any time, also while the
trainer trains or weights are being loaded. Finished groups that no training step has consumed stay.
Turns are in rose/coordinator/turns.py; which trajectories make up a group is decided in
rose/coordinator/control.py.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from rose import protocol as p
from rose.config import Config
from rose.coordinator import control
from rose.coordinator.control import teaches
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import RunFailed
from rose.scheduler import events as ev

# A trajectory may kill its environment host (an environment that segfaults). We count the deaths of
# its hosts while its environment computed, until it completes another turn.
# After this many deaths the trajectory is a suspect. It runs only on hosts without another suspect,
# so that the next death names the culprit, and an outside cause fails one trajectory at most.
SUSPECT_AFTER_LOSSES = 2
# After this many deaths the trajectory fails.
FAIL_AFTER_LOSSES = 3
NO_HOST = -1  # rank of the host while a trajectory waits for a host without suspects
MOST_NAMED = 5  # most trajectories that a message names; the others are counted


@dataclass
class _Running:
    start: p.StartTrajectory
    host: int  # rank
    losses: int = 0  # deaths of its hosts since it last completed more than `turns` turns
    turns: int = 0  # most turns that it had completed when one of its hosts died
    target: int | None = None  # rank of the host that it moves to, once its own has released it


@dataclass
class StepCounts:
    """Counts since a step began, named as in the step's row."""

    groups_dropped: int = 0
    tokens_dropped: int = 0
    hosts_lost: int = 0
    trajectories_restarted: int = 0
    trajectories_moved: int = 0


class Rollouts:
    """Runs groups on the environment hosts. `hosts` maps index -> rank and is complete before the
    first group; `send` takes (rank, message), `on_fault` (what, detail)."""

    def __init__(
        self,
        config: Config,
        hub: TurnHub,
        send: Callable[[int, p.Message], None],
        hosts: dict[int, int],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._hub = hub
        self._send = send
        self._hosts = hosts
        self._on_fault = on_fault
        bounds = {
            name: control.Bounds(member.max_failures_in_row, member.max_failed_tasks, key)
            for name, (key, member) in config.environments.items()
        }
        self.groups = control.Groups(
            config.seed, bounds, config.deterministic, config.rollout.branch
        )
        # group -> its trajectories once all have finished, until the step loop takes it
        self.finished: dict[str, list[p.Trajectory]] = {}
        self.batch: list[str] | None = None  # groups that the scheduler chose for this step
        self.counts = StepCounts()
        self.scoring_failures = 0  # since `take_scoring_failures`
        # largest staleness of the groups taken last: versions published since their admission
        self.staleness_max = 0
        self.progress = (0, 0)  # trajectories finished, trajectories that the step loop waits for
        self._running: dict[str, _Running] = {}
        # host's rank -> suspects on it that have not passed the turn in which their hosts died
        self._suspects: dict[int, set[str]] = {}
        # trees of forks with a suspect, which wait for a host without suspects
        self._waiting_families: deque[list[_Running]] = deque()
        self.up: set[int] = set()  # ranks of the hosts that are up
        self._deaths: dict[int, int] = {}  # host's rank -> deaths in a row without progress
        self._admitted: dict[str, int] = {}  # training group -> newest version when it was admitted
        self._waited_for = p.Phase.TRAIN  # phase of the trajectories that `progress` counts
        self._over = False  # True after `stop`

    # ----------------------------------------------------------------- for the step loop

    def begin_step(self, trajectories: int) -> None:
        """Reset the step's counters. The step waits for `trajectories`, some of which may have
        finished."""
        self.batch = None
        self.counts = StepCounts()
        self._waited_for = p.Phase.TRAIN
        finished = sum(len(g) for g in self.finished.values() if g[0].phase is p.Phase.TRAIN)
        self.progress = (finished, trajectories)

    def evaluate(self, tasks: dict[str, tuple[control.Task, int]], waited_for: bool) -> None:
        """Start held-out tasks, given as name of the group -> (task, number of trajectories).
        If `waited_for`, `progress` counts them until the next step begins."""
        if waited_for:
            self._waited_for = p.Phase.EVAL
            self.progress = (0, sum(samples for _, samples in tasks.values()))
        for name, (task, samples) in tasks.items():
            self._start(self.groups.open(name, p.Phase.EVAL, task, samples))

    def take(self, names: list[str]) -> list[list[p.Trajectory]]:
        """Remove finished training groups and return them; updates `staleness_max`."""
        admitted = [self._admitted.pop(name) for name in names if name in self._admitted]
        self.staleness_max = max(
            (self._hub.weights.version - version for version in admitted), default=0
        )
        return [self.finished.pop(name) for name in names]

    def forget_groups(self, prefix: str) -> None:
        """Remove the snapshots of an earlier attempt's groups whose names start with `prefix`."""
        self._hub.log.forget_prefix(prefix)

    def take_scoring_failures(self) -> int:
        """Return the number of episodes without a score since the last call, evaluations
        included."""
        failures, self.scoring_failures = self.scoring_failures, 0
        return failures

    def stop(self) -> None:
        """Drop the running training groups and admit no more, because no step will consume them."""
        self._over = True
        for name in self.groups.running_in(p.Phase.TRAIN):
            self.drop(name)

    def runs(self, trajectory: str) -> bool:
        """False after the trajectory has finished, failed or been cancelled. Messages about it are
        then late."""
        return trajectory in self._running

    def in_environments(self) -> str:
        """Return a text that names the trajectories whose environments compute, because they await
        no turn; "" if there are none."""
        names = [name for name in sorted(self._running) if self._hub.in_environment(name)]
        if not names:
            return ""
        more = f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else ""
        domains = sorted({self._running[name].start.domain for name in names})
        shown = f"{', '.join(names[:MOST_NAMED])}{more}"
        return f"; in their environments ({', '.join(domains)}): {shown}"

    # ----------------------------------------------------------------- the scheduler's actions

    def admit(self, index: int, name: str, spare: float) -> None:
        """Start a training group. `spare` is the share of its size that starts in addition, see
        `AdmitGroup`."""
        if self._over:
            return
        self._admitted[name] = self._hub.weights.version
        task = control.train_task(self._config.seed, index, self._config.env.weights)
        size = self._config.rollout.group_size
        self._start(
            self.groups.open(name, p.Phase.TRAIN, task, size, math.ceil((1 + spare) * size) - size)
        )

    def drop(self, name: str) -> None:
        running, done = self.groups.drop(name)
        self._hub.group_ended(name)
        done += self.finished.pop(name, [])
        self._admitted.pop(name, None)
        self.counts.groups_dropped += 1
        self._leave_out(running, done)

    def move(self, trajectory: str, host: str) -> None:
        """Request that the trajectory's host releases it, so that it can move to `host`. Ignored if
        it has ended or `host` is down, and for trees of forks, which stay on one host."""
        names = {_host_name(index): rank for index, rank in self._hosts.items()}
        each, rank = self._running.get(trajectory), names.get(host)
        if each is None or rank not in self.up or each.host in (rank, NO_HOST):
            return
        followed = any(other.start.follows == trajectory for other in self._running.values())
        if each.target is None and not each.start.follows and not followed:
            each.target = rank
            self._send(each.host, p.ReleaseTrajectory(trajectory))

    def _released(self, m: p.TrajectoryReleased) -> None:
        """Start a released trajectory on the host that it moves to, or another if that is down."""
        each = self._running[m.id]
        if each.host != m.rank or each.target is None:
            return  # It was restarted on another host in the meantime.
        target, each.target = each.target, None
        self._clear_suspect(each)
        self.counts.trajectories_moved += 1
        self._hub.restart_trajectory(m.id)
        if target in self.up:
            each.host = target
            self._send(target, each.start)
        else:
            each.host = self._send_start(each.start)

    def _report_placement(self, m: p.HostLoad | p.TrajectorySaved) -> None:
        """Report a host's load or a trajectory's snapshot to the scheduler's placement policy."""
        [host] = [_host_name(index) for index, rank in self._hosts.items() if rank == m.rank]
        at = time.time()
        if isinstance(m, p.HostLoad):
            load = {"running": m.running, "cores": m.cores, "cpu": m.cpu, "memory": m.memory}
            self._hub.feed(ev.HostLoad(at=at, host=host, **load))
        elif self.runs(m.id) and self._running[m.id].host == m.rank:
            saved = {"trajectory": m.id, "turns": m.turns, "commands_s": m.commands_s}
            self._hub.feed(ev.TrajectorySaved(at=at, host=host, **saved))

    def _cancel(self, trajectory: str) -> None:
        running = self._running.pop(trajectory, None)
        if running is not None:  # None if the trajectory's own failure dropped the group
            if running.host != NO_HOST:
                self._send(running.host, p.CancelTrajectory(trajectory))
            self.counts.tokens_dropped += self._hub.cancel(trajectory)
            self._clear_suspect(running)

    def _start(self, trajectories: list[p.StartTrajectory]) -> None:
        """Start trajectories, each on a host chosen by its name, so that a resumed run chooses the
        same. A trajectory that forks off another starts on its parent's host."""
        oldest, newest = self._hub.log.versions(self._hub.weights.version)
        for message in trajectories:
            start = msgspec.structs.replace(message, oldest_version=oldest, newest_version=newest)
            self._running[start.id] = _Running(start, self._send_start(start))

    def _send_start(self, message: p.StartTrajectory) -> int:
        """Send the start to a host; return the host's rank. Prefers hosts that are up."""
        ranks = self._ranks()
        rank = ranks[p.seed_of(message.id) % len(ranks)]
        if (followed := self._running.get(message.follows)) is not None:
            rank = followed.host
        self._send(rank, message)
        return rank

    def _ranks(self) -> list[int]:
        """Return the ranks of the hosts that are up, or of all hosts if none is."""
        every = [self._hosts[index] for index in sorted(self._hosts)]
        return [rank for rank in every if rank in self.up] or every

    # ----------------------------------------------------------------- messages

    def handle(self, message: p.Message) -> bool:
        """Handle a message about trajectories; return False for any other, and for messages that
        `TurnHub` has to handle."""
        match message:
            case p.TurnRequest():
                if not self.runs(message.trajectory):
                    return True  # The trajectory was cancelled while the request was on its way.
                each = self._running[message.trajectory]
                if self._hub.turns_done(message.trajectory) >= each.turns:
                    self._clear_suspect(each)
                return False
            case p.TrajectoryResumed():
                return not self.runs(message.id)
            case p.TrajectoryFinished(trajectory):
                if self.runs(trajectory.id):
                    self._finished(trajectory)
                return True
            case p.TrajectoryFailed():
                if self.runs(message.id):
                    self._failed(message)
                return True
            case p.HostLoad() | p.TrajectorySaved():
                self._report_placement(message)
                return True
            case p.TrajectoryReleased():
                if self.runs(message.id):
                    self._released(message)
                return True
            case p.HostLost():
                self._host_lost(message)
                return True
            case p.HostBlocked():
                what = f"rank {message.rank}: {message.what}"
                self._on_fault("environment host blocked", what)
                return True
            case p.HostReady():
                self.up.add(message.rank)
                self._start_suspects()
                return True
        return False

    def _host_lost(self, m: p.HostLost) -> None:
        """Restart the trajectories of a host whose process died. Raises `RunFailed` after more than
        rollout.host_restarts deaths in a row without progress."""
        self._send(m.rank, p.HostForgotten())
        lost = [each for each in self._running.values() if each.host == m.rank]
        for each in lost:
            turns = self._hub.turns_done(each.start.id)
            if turns > each.turns:
                each.turns, each.losses = turns, 0
                self._deaths.pop(m.rank, None)
            # A trajectory that has not forked off its parent yet did nothing on that host.
            waits = not turns and each.start.follows in self._running
            if m.rank in self.up and not waits and self._hub.in_environment(each.start.id):
                each.losses += 1
        self.up.discard(m.rank)
        self._suspects.pop(m.rank, None)
        if self._config.moves_trajectories:
            [name] = [_host_name(index) for index, rank in self._hosts.items() if rank == m.rank]
            self._hub.feed(ev.HostLost(at=time.time(), host=name))
        deaths = self._deaths[m.rank] = self._deaths.get(m.rank, 0) + 1
        self.counts.hosts_lost += 1
        what = f"the process of environment host rank {m.rank}"
        self._on_fault("environment host died", f"{what} {m.error}; {len(lost)} trajectories ran")
        if deaths > (most := self._config.rollout.host_restarts):
            raise RunFailed(
                f"{what} died {deaths} times in a row, without a turn in between "
                f"(rollout.host_restarts={most}); the last was {m.error}"
            )
        self._start_again(lost, m.error)

    def _start_again(self, lost: list[_Running], error: str) -> None:
        """Restart trajectories of a lost host; fail those with `FAIL_AFTER_LOSSES` losses.

        Trajectories of one tree of forks stay together. A tree with a suspect waits for a host
        without one.
        """
        families: dict[str, list[_Running]] = {}
        for each in lost:
            each.host, each.target = NO_HOST, None
            families.setdefault(self._root(each), []).append(each)
        for each in lost:
            start, losses = each.start, each.losses
            if start.id not in self._running:
                continue  # Another trajectory's failure has dropped its group.
            if losses >= FAIL_AFTER_LOSSES:
                why = f"its host died {losses} times in the same step of it, the last was {error}"
                self._failed(
                    p.TrajectoryFailed(start.id, start.group, start.domain, why), lost=True
                )
            else:
                self.counts.trajectories_restarted += 1
                self._hub.restart_trajectory(start.id)
        for family in families.values():
            family = [each for each in family if self._running.get(each.start.id) is each]
            if any(each.losses >= SUSPECT_AFTER_LOSSES for each in family):
                self._waiting_families.append(family)
            else:
                for each in family:
                    each.host = self._send_start(each.start)
        self._start_suspects()

    def _root(self, each: _Running) -> str:
        """Return the name of the running trajectory at the root of this one's tree of forks."""
        while (followed := self._running.get(each.start.follows)) is not None:
            each = followed
        return each.start.id

    def _start_suspects(self) -> None:
        """Start waiting trees with a suspect, one on each host without a suspect."""
        for rank in self._ranks():
            while self._waiting_families and rank not in self._suspects:
                for each in self._waiting_families.popleft():
                    if self._running.get(each.start.id) is each:  # False if dropped meanwhile
                        each.host = rank
                        self._send(rank, each.start)
                        if each.losses >= SUSPECT_AFTER_LOSSES:
                            self._suspects.setdefault(rank, set()).add(each.start.id)

    def _clear_suspect(self, each: _Running) -> None:
        """Drop the suspicion, because the trajectory has passed the turn in which its host died,
        has ended, or has left the host."""
        here = self._suspects.get(each.host, set())
        if each.start.id in here:
            here.remove(each.start.id)
            if not here:
                del self._suspects[each.host]
                self._start_suspects()

    def _finished(self, trajectory: p.Trajectory) -> None:
        running = self._running.pop(trajectory.id)
        self._deaths.pop(running.host, None)
        self._clear_suspect(running)
        finished, wanted = self.progress
        self.progress = (finished + (trajectory.phase is self._waited_for), wanted)
        group = self.groups.finished(trajectory)
        if group is not None:
            self.finished[trajectory.group] = group
            self._hub.group_ended(trajectory.group)
            for late in self.groups.late(trajectory.group):
                self._cancel(late)
        self._hub.trajectory_ended(trajectory)  # This may drop the group.
        if trajectory.group in self.finished and trajectory.phase is p.Phase.TRAIN:
            accepted = teaches(group, self._config.algorithm.dynamic_sampling)
            self._hub.feed(
                ev.GroupFinished(at=time.time(), group=trajectory.group, accepted=accepted)
            )

    def _failed(self, m: p.TrajectoryFailed, lost: bool = False) -> None:
        """Replace a failed trajectory by another member, or its task by another task. `lost`: it
        failed because of its hosts' deaths. Raises `RunFailed` if too many tasks fail each time."""
        running = self._running.pop(m.id)
        self._hub.progress_at = time.time()
        self.scoring_failures += m.scoring
        self._on_fault(f"{'scoring' if m.scoring else 'environment'} failed", f"{m.id}: {m.error}")
        self._hub.cancel(m.id)
        try:
            after = self.groups.failed_trajectory(m.id, m.group, m.error, lost, m.certain)
        except control.TooManyFailures as error:
            raise RunFailed(str(error)) from None
        if after.given_up:
            self._drop_task(m.group, after)
        self._start(after.starts)
        self._clear_suspect(running)

    def _drop_task(self, group: str, after: control.Replaced) -> None:
        """Drop the trajectories of a task that was given up."""
        self._on_fault("task given up", after.given_up)
        self._hub.group_ended(group)
        self._leave_out(after.running, after.done)

    def _leave_out(self, running: Iterable[str], done: Iterable[p.Trajectory]) -> None:
        """Cancel trajectories, and forget finished ones, which then count for no batch."""
        for trajectory in running:
            self._cancel(trajectory)
        for trajectory in done:
            self._hub.log.forget(trajectory.id)
            self.counts.tokens_dropped += trajectory.own_tokens
            finished, wanted = self.progress
            self.progress = (finished - (trajectory.phase is self._waited_for), wanted)


def _host_name(index: int) -> str:
    """Return the host's name in the scheduler's events."""
    return f"environment-{index}"
