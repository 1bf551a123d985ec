"""The coordinator's half that runs groups: starts trajectories on the environment hosts, collects
them, drops them.

Groups are admitted, finish and are dropped at any time, also while the trainer trains or weights
are on their way; what a training step has not consumed stays. Which groups, and when, the
scheduler's batching policy says. Left out: turns (rose/coordinator/turns.py) and who counts as a
member of a group (rose/coordinator/control.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rose import protocol as p
from rose.config import Config
from rose.coordinator import control
from rose.coordinator.control import teaches
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import RunFailed
from rose.scheduler import events as ev

# Of a trajectory's host while its environment was in the same step. After the first number it is a
# suspect: it starts again where no other suspect is in such a step. So a further death there tells
# which it was, and one from outside fails one trajectory at most.
SUSPECT_LOSSES, MOST_LOSSES = 2, 3
NO_HOST = -1  # of a suspect that waits
NAMED = 5  # trajectories that a message names; the others are counted


@dataclass
class _Running:
    start: p.StartTrajectory
    host: int  # rank
    losses: int = 0  # of its host, before any start of it got beyond `turns` turns
    turns: int = 0  # the most that its environment had when a host of it died
    target: int | None = None  # rank of the host that it moves to, once its own has released it


class Rollouts:
    """`hosts`: the environment hosts' ranks by index, complete before the first group."""

    def __init__(
        self,
        config: Config,
        hub: TurnHub,
        send: Callable[[int, p.Message], None],
        hosts: dict[int, int],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._config, self._hub, self._send, self._hosts, self._on_fault = (
            config,
            hub,
            send,
            hosts,
            on_fault,
        )
        bounds = {
            name: control.Bounds(member.max_failures_in_row, member.max_failed_tasks, key)
            for name, (key, member) in config.environments.items()
        }
        self.groups = control.Groups(
            config.seed, bounds, config.deterministic, config.rollout.branch
        )
        self.finished: dict[
            str, list[p.Trajectory]
        ] = {}  # groups whose trajectories are all in, until they are taken
        self.dropped_groups = self.dropped_tokens = 0  # since `begin_step`
        self.scoring_failures = 0  # since `take_scoring_failures`
        self.staleness_max = (
            0  # of the groups last taken: newest version then, minus newest at their admission
        )
        self.progress = (0, 0)  # trajectories in, and wanted, of what is waited for
        self._running: dict[str, _Running] = {}
        self._suspects: dict[int, set[str]] = {}  # by host's rank: in the step that is suspicious
        # trajectories that wait for a host without suspects, with those that fork off each other
        self._apart: deque[list[_Running]] = deque()
        self.up: set[int] = set()  # hosts' ranks
        self._deaths: dict[int, int] = {}  # of a host, in a row: without progress of a trajectory
        # since `begin_step`
        self.hosts_lost = self.trajectories_restarted = self.trajectories_moved = 0
        self._admitted: dict[str, int] = {}  # training group -> newest version when it was admitted
        self._waited_for = p.Phase.TRAIN  # whose trajectories `progress` counts
        self._over = False

    # ----------------------------------------------------------------- what the step loop asks

    def begin_step(self, trajectories: int) -> None:
        """Counters start anew; the step waits for so many trajectories, of which some may be in."""
        self.dropped_groups = self.dropped_tokens = 0
        self.hosts_lost = self.trajectories_restarted = self.trajectories_moved = 0
        self._waited_for, self.progress = (
            p.Phase.TRAIN,
            (
                sum(len(g) for g in self.finished.values() if g[0].phase is p.Phase.TRAIN),
                trajectories,
            ),
        )

    def evaluate(self, tasks: dict[str, tuple[control.Task, int]], waited_for: bool) -> None:
        """Start held-out tasks: name of the group -> (task, how many trajectories of it).
        `waited_for`: progress counts them until the next step begins."""
        if waited_for:
            self._waited_for = p.Phase.EVAL
            self.progress = (0, sum(samples for _, samples in tasks.values()))
        for name, (task, samples) in tasks.items():
            self._start(self.groups.open(name, p.Phase.EVAL, task, samples))

    def take(self, names: list[str]) -> list[list[p.Trajectory]]:
        """Finished groups, which are forgotten here."""
        admitted = [self._admitted.pop(name) for name in names if name in self._admitted]
        self.staleness_max = max((self._hub.version - version for version in admitted), default=0)
        return [self.finished.pop(name) for name in names]

    def take_evaluated(self, names: list[str]) -> list[list[p.Trajectory]]:
        """Finished groups of held-out tasks, which are forgotten here."""
        return [self.finished.pop(name) for name in names]

    def forget(self, groups: str) -> None:
        """Snapshots of an earlier attempt's groups, whose names begin so."""
        self._hub.log.forget_prefix(groups)

    def take_scoring_failures(self) -> int:
        """Episodes without a score since this was asked, of evaluations, too."""
        failures, self.scoring_failures = self.scoring_failures, 0
        return failures

    def end(self) -> None:
        """No step will consume any: what runs is cancelled, and nothing is admitted any more."""
        self._over = True
        for name in self.groups.running_in(p.Phase.TRAIN):
            self.drop(name)

    def runs(self, trajectory: str) -> bool:
        """False once it is in, has failed or was cancelled: words about it are late."""
        return trajectory in self._running

    def in_environments(self) -> str:
        """Which trajectories no turn is waited for by, for a message: their environments act."""
        names = [name for name in sorted(self._running) if self._hub.in_environment(name)]
        if not names:
            return ""
        more = f" and {len(names) - NAMED} more" if names[NAMED:] else ""
        domains = sorted({self._running[name].start.domain for name in names})
        shown = f"{', '.join(names[:NAMED])}{more}"
        return f"; in their environments ({', '.join(domains)}): {shown}"

    # ----------------------------------------------------------------- the scheduler's actions

    def admit(self, index: int, name: str, spare: float) -> None:
        """`spare`: of a group's size, see `AdmitGroup`."""
        if self._over:
            return
        self._admitted[name] = self._hub.version
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
        self.dropped_groups += 1
        self.dropped_tokens += sum(t.own_tokens for t in done)
        for trajectory in running:
            self._cancel(trajectory)
        for trajectory in done:
            self._hub.log.forget(trajectory.id)

    def move(self, trajectory: str, host: str) -> None:
        """Have its host release it. Passed over when either is gone by now, and for trajectories
        that fork off each other, which are on one host."""
        names = {_host_name(index): rank for index, rank in self._hosts.items()}
        each, rank = self._running.get(trajectory), names.get(host)
        if each is None or rank not in self.up or each.host in (rank, NO_HOST):
            return
        followed = any(other.start.follows == trajectory for other in self._running.values())
        if each.target is None and not each.start.follows and not followed:
            each.target = rank
            self._send(each.host, p.ReleaseTrajectory(trajectory))

    def _released(self, m: p.TrajectoryReleased) -> None:
        """It goes on elsewhere; one that was started again meanwhile is another host's."""
        each = self._running[m.id]
        if each.host != m.rank or each.target is None:
            return
        target, each.target = each.target, None
        self._clear(each)
        self.trajectories_moved += 1
        self._hub.restart_trajectory(m.id)
        if target in self.up:
            each.host = target
            self._send(target, each.start)
        else:
            each.host = self._send_start(each.start)

    def _told(self, m: p.HostLoad | p.TrajectorySaved) -> None:
        """What the scheduler places trajectories by."""
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
        if running is not None:  # else it has just failed, and that was the reason
            if running.host != NO_HOST:
                self._send(running.host, p.CancelTrajectory(trajectory))
            self.dropped_tokens += self._hub.cancel(trajectory)
            self._clear(running)

    def _start(self, trajectories: list[p.StartTrajectory]) -> None:
        """Spread over the environment hosts by name, so that a resumed run does the same; one that
        forks off another goes where that is."""
        oldest, newest = self._hub.log.versions(self._hub.version)
        for message in trajectories:
            start = msgspec.structs.replace(message, oldest_version=oldest, newest_version=newest)
            self._running[start.id] = _Running(start, self._send_start(start))

    def _send_start(self, message: p.StartTrajectory) -> int:
        """The rank of the host that gets it: one that is up, if any is."""
        ranks = self._ranks()
        rank = ranks[p.seed_of(message.id) % len(ranks)]
        if (followed := self._running.get(message.follows)) is not None:
            rank = followed.host
        self._send(rank, message)
        return rank

    def _ranks(self) -> list[int]:
        """Of the hosts that are up, if any is; else of all."""
        every = [self._hosts[index] for index in sorted(self._hosts)]
        return [rank for rank in every if rank in self.up] or every

    # ----------------------------------------------------------------- messages

    def handle(self, message: p.Message) -> bool:
        """True when the message was about trajectories."""
        match message:
            case p.TurnRequest():
                if not self.runs(message.trajectory):
                    return True  # cancelled while this was on its way
                each = self._running[message.trajectory]
                if self._hub.turns_done(message.trajectory) >= each.turns:
                    self._clear(each)
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
                self._told(message)
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
        """Its trajectories start again, where they stood. Raises `RunFailed` when it dies again and
        again."""
        self._send(m.rank, p.HostForgotten())
        lost = [each for each in self._running.values() if each.host == m.rank]
        for each in lost:
            depth = self._hub.turns_done(each.start.id)
            if depth > each.turns:
                each.turns, each.losses = depth, 0
                self._deaths.pop(m.rank, None)
            # one that has still to fork off another did nothing on that host
            waits = not depth and each.start.follows in self._running
            if m.rank in self.up and not waits and self._hub.in_environment(each.start.id):
                each.losses += 1
        self.up.discard(m.rank)
        self._suspects.pop(m.rank, None)
        if self._config.moves_trajectories:
            [name] = [_host_name(index) for index, rank in self._hosts.items() if rank == m.rank]
            self._hub.feed(ev.HostLost(at=time.time(), host=name))
        deaths = self._deaths[m.rank] = self._deaths.get(m.rank, 0) + 1
        self.hosts_lost += 1
        what = f"the process of environment host rank {m.rank}"
        self._on_fault("environment host died", f"{what} {m.error}; {len(lost)} trajectories ran")
        if deaths > (most := self._config.rollout.host_restarts):
            raise RunFailed(
                f"{what} died {deaths} times in a row, without a turn in between "
                f"(rollout.host_restarts={most}); the last was {m.error}"
            )
        self._start_again(lost, m.error)

    def _start_again(self, lost: list[_Running], error: str) -> None:
        """What forks off each other stays together; what is suspicious waits for its turn."""
        families: dict[str, list[_Running]] = {}
        for each in lost:
            each.host, each.target = NO_HOST, None
            families.setdefault(self._root(each), []).append(each)
        for each in lost:
            start, losses = each.start, each.losses
            if start.id not in self._running:
                continue  # the end of another has dropped its group
            if losses >= MOST_LOSSES:
                why = f"its host died {losses} times in the same step of it, the last was {error}"
                self._failed(
                    p.TrajectoryFailed(start.id, start.group, start.domain, why), lost=True
                )
            else:
                self.trajectories_restarted += 1
                self._hub.restart_trajectory(start.id)
        for family in families.values():
            family = [each for each in family if self._running.get(each.start.id) is each]
            if any(each.losses >= SUSPECT_LOSSES for each in family):
                self._apart.append(family)
            else:
                for each in family:
                    each.host = self._send_start(each.start)
        self._start_suspects()

    def _root(self, each: _Running) -> str:
        """The trajectory that it forks off, or that one does, and so on, of those that run."""
        while (followed := self._running.get(each.start.follows)) is not None:
            each = followed
        return each.start.id

    def _start_suspects(self) -> None:
        """One family of them on each host."""
        for rank in self._ranks():
            while self._apart and rank not in self._suspects:
                for each in self._apart.popleft():
                    if self._running.get(each.start.id) is each:  # else it was dropped meanwhile
                        each.host = rank
                        self._send(rank, each.start)
                        if each.losses >= SUSPECT_LOSSES:
                            self._suspects.setdefault(rank, set()).add(each.start.id)

    def _clear(self, each: _Running) -> None:
        """It has got beyond the step that was suspicious, or has ended."""
        here = self._suspects.get(each.host, set())
        if each.start.id in here:
            here.remove(each.start.id)
            if not here:
                del self._suspects[each.host]
                self._start_suspects()

    def _finished(self, trajectory: p.Trajectory) -> None:
        running = self._running.pop(trajectory.id)
        self._deaths.pop(running.host, None)
        self._clear(running)
        self.progress = (
            self.progress[0] + (trajectory.phase is self._waited_for),
            self.progress[1],
        )
        group = self.groups.finished(trajectory)
        if group is not None:
            self.finished[trajectory.group] = group
            self._hub.group_ended(trajectory.group)
            for late in self.groups.late(trajectory.group):
                self._cancel(late)
        self._hub.trajectory_ended(trajectory)  # which may have dropped the group
        if trajectory.group in self.finished and trajectory.phase is p.Phase.TRAIN:
            accepted = teaches(group, self._config.algorithm.dynamic_sampling)
            self._hub.feed(
                ev.GroupFinished(at=time.time(), group=trajectory.group, accepted=accepted)
            )

    def _failed(self, m: p.TrajectoryFailed, lost: bool = False) -> None:
        """Another member takes its place, or another task that of its task. `lost`: it failed for
        its hosts' deaths. Raises `RunFailed` when too many tasks fail each time."""
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
            self._leave_task(m.group, after)
        self._start(after.starts)
        self._clear(running)

    def _leave_task(self, group: str, after: control.Replaced) -> None:
        """Nothing of a task that was given up is used."""
        self._on_fault("task given up", after.given_up)
        self._hub.group_ended(group)
        for trajectory in after.running:
            self._cancel(trajectory)
        for trajectory in after.done:
            self._hub.log.forget(trajectory.id)
            self.dropped_tokens += trajectory.own_tokens
            self.progress = (
                self.progress[0] - (trajectory.phase is self._waited_for),
                self.progress[1],
            )


def _host_name(index: int) -> str:
    """As the scheduler has it."""
    return f"environment-{index}"
