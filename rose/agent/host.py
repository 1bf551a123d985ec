"""An environment host: runs trajectories, each an asyncio task that requests one turn at a time.

The host owns its trajectories to their end. It sends a `TurnRequest` and gets a `TurnResult`, and
does not notice when engines join or leave in between.
"""

from __future__ import annotations

import asyncio
import pkgutil
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path

import msgspec

from rose import protocol as p
from rose.agent.blocked import Blocked, LoopWatch, called
from rose.agent.chat import ChatFormat
from rose.agent.envs import _workers, build, check
from rose.agent.envs.base import player_of, store_of
from rose.agent.forks import Fork, Forks
from rose.agent.guard import EnvironmentFailure, ScoringFailure, TaskFailure
from rose.agent.loop import run_trajectory
from rose.agent.moves import Moves
from rose.agent.own_time import OwnTime
from rose.agent.playing import Player, Store
from rose.agent.scoring import Scoring
from rose.agent.snapshots import Snapshot, Snapshots
from rose.comm.tasks import Tasks
from rose.comm.wire import COORDINATOR, WireError
from rose.config import Config, ConfigError
from rose.launch.layout import layout
from rose.models import resolve
from rose.observe.failed import Keeper
from rose.observe.recorder import NullRecorder

TASK_CHARACTERS = 200  # most characters of a task's name; the remainder is cut
STORE_S = 60.0  # most seconds to store the remaining checkpoints of sandboxes when the host ends

# Slurm ends a job with SIGTERM to all its processes. One of them may die, and fail a trajectory,
# before this process gets SIGTERM. So a failure is reported only after REPORT_DELAY_S seconds. If
# SIGTERM arrives meanwhile, the report is delayed by ENDING_DELAY_S more, and the job should end.
REPORT_DELAY_S, ENDING_DELAY_S = 0.5, 60.0


class TrajectoryHost:
    """Runs trajectories, each as an asyncio task that `spawn` starts. `send` sends a message to the
    coordinator; `failed` keeps failed trajectories for inspection."""

    def __init__(
        self,
        config: Config,
        chat: ChatFormat,
        send: Callable[[p.Message], None],
        spawn: Callable[[Coroutine], asyncio.Task],
        recorder: NullRecorder,
        scoring: Scoring | None = None,
        snapshots: Snapshots | None = None,
        checkpoints: Store | None = None,
        moves: Moves | None = None,
        failed: Keeper | None = None,
    ) -> None:
        self._moves, self._failed = moves, failed
        self._released: set[str] = set()  # trajectories that stop here to resume on another host
        self._dropped: set[str] = set()  # running trajectories that the coordinator cancelled
        self._scoring, self._snapshots, self._checkpoints = scoring, snapshots, checkpoints
        self._config, self._chat, self._recorder = config, chat, recorder
        self._send, self._spawn = send, spawn
        self._trajectories: dict[str, asyncio.Task] = {}
        self._turns: dict[str, asyncio.Future[p.TurnResult]] = {}
        self._own: dict[str, OwnTime] = {}  # clocks of the running trajectories' own time
        self._forks = Forks()
        self._players: dict[str, Player] = {}  # module:Class -> its object
        self._job_ends = False  # True once this process has got SIGTERM

    def on_sigterm(self) -> None:
        """Note that the job ends, which may cause failures from now on."""
        self._job_ends = True

    def handle(self, message: p.Message) -> None:
        match message:
            case p.StartTrajectory():
                fork = self._forks.expect(message)
                self._forks.begin(message.id)
                self._trajectories[message.id] = self._spawn(self._run(message, fork))
            case p.TurnResult():
                future = self._turns.pop(message.turn, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case p.TrajectoryScored() if self._scoring is not None:
                self._scoring.handle(message)
            case p.ReleaseTrajectory() if self._moves is not None:
                if message.id in self._trajectories:  # otherwise its end has been reported
                    self._moves.request_move(message.id)
                    self._release(message.id)
            case p.CancelTrajectory():
                task = self._trajectories.pop(message.id, None)
                if task is not None:
                    self._dropped.add(message.id)
                    task.cancel()
                else:
                    self._spawn(self._drop(message.id))
            case _:
                raise ValueError(f"an environment host has no use for {type(message).__name__}")

    async def _run(
        self, start: p.StartTrajectory, fork: asyncio.Future[Fork | None] | None
    ) -> None:
        """Play a trajectory, and report its end or failure to the coordinator."""
        began = time.time()
        try:
            trajectory = await self._play(start, fork)
            self._finish(start, trajectory)
        except EnvironmentFailure as failure:
            await asyncio.sleep(REPORT_DELAY_S)
            if self._job_ends:
                await asyncio.sleep(ENDING_DELAY_S)
            kinds = isinstance(failure, ScoringFailure), isinstance(failure, TaskFailure)
            words = f"{failure} ({failure.task})" if failure.task else str(failure)
            self._send(p.TrajectoryFailed(start.id, start.group, start.domain, words, *kinds))
            if self._failed is not None:
                kept = failure.cause, failure.task, failure.output, failure.made
                self._failed.keep(start, *kept)
            self._forget(start.id)
        else:
            self._recorder.span(
                "trajectory",
                max(began, trajectory.started),
                time.time(),
                trajectory=start.id,
                turns=trajectory.turns,
                tokens=trajectory.response_tokens,
                reward=trajectory.reward,
            )
            self._forget(start.id)
        finally:
            self._trajectories.pop(start.id, None)
            if self._moves is not None:
                self._moves.end(start.id)
            if start.id in self._released:
                self._released.discard(start.id)
                self._forget(start.id)
                self._send(p.TrajectoryReleased(self._moves.rank, start.id))
            self._forks.end(start.id)
            if start.id in self._dropped:
                self._dropped.discard(start.id)
                self._spawn(self._drop(start.id))

    def _finish(self, start: p.StartTrajectory, trajectory: p.Trajectory) -> None:
        """Send a trajectory that has ended. Raises `EnvironmentFailure` if it is too large."""
        try:
            self._send(p.TrajectoryFinished(trajectory))
        except WireError as error:
            key, member = self._config.environments[start.domain]
            lower = f"lower {key}.max_turns={member.max_turns}"
            failure = EnvironmentFailure(start.id, f"{error}; {lower}")
            failure.made, failure.task = trajectory, trajectory.task
            raise failure from None

    def saved(self, snapshot: Snapshot) -> None:
        """Report a snapshot that is on disk, and release its trajectory if that is to move."""

        async def report() -> None:
            if await self._moves.saved(snapshot):
                self._release(snapshot.start.id)

        if self._moves is not None:
            self._spawn(report())

    def _release(self, trajectory: str) -> None:
        """Stop a trajectory that is to move, if it waits for the turn after its newest snapshot.
        Otherwise do nothing; this is called again at its next turn or snapshot."""
        leaves = self._moves.leaves_before(trajectory) in self._turns
        if leaves and (task := self._trajectories.pop(trajectory, None)) is not None:
            self._released.add(trajectory)
            task.cancel()

    async def _drop(self, trajectory: str) -> None:
        """Remove the snapshots of a cancelled trajectory and the states of its environment."""
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.remove, trajectory)
        self._forget(trajectory)

    def _forget(self, trajectory: str) -> None:
        """Let the store remove the states of the trajectory's environment."""
        if self._checkpoints is not None:
            self._checkpoints.ended(trajectory)

    async def _play(
        self, start: p.StartTrajectory, fork: asyncio.Future[Fork | None] | None
    ) -> p.Trajectory:
        """Build the environment and play the trajectory in it. Raises `EnvironmentFailure`."""
        c = self._config
        key, member = c.environments[start.domain]
        try:
            limit_s = member.step_timeout_s
            environment = called(f"{member.name}'s constructor", limit_s, lambda: build(member))
        except (ConfigError, Blocked) as error:
            # The launcher could build it, so the fault may be temporary. One trajectory fails.
            raise EnvironmentFailure(start.id, str(error)) from error
        if self._checkpoints is not None and store_of(environment) is not None:
            await asyncio.to_thread(self._snapshots.expect, start.id)
            environment.keep_checkpoints(self._checkpoints, start.id)
        if self._moves is not None:
            self._moves.begin(start.id, environment)
        rest = (
            self._chat,
            self._request_turn,
            member,
            key,
            c.model.max_context,
            self._sampling(start, member.max_new_tokens),
            time.time,
            self._scoring,
        )
        try:
            async with OwnTime(start.id, member.trajectory_timeout_s, key) as own:
                self._own[start.id] = own
                _workers.QUEUED.set(own.paused)
                if (kind := player_of(environment)) is not None:
                    if kind not in self._players:
                        self._players[kind] = pkgutil.resolve_name(kind)(c)
                    made = await self._players[kind].play(start, environment, *rest)
                else:
                    forks = self._forks if c.rollout.branch.ways else None
                    waits = None if fork is None else asyncio.ensure_future(own.waiting(fork))
                    rest += (self._snapshots, forks, waits)
                    made = await run_trajectory(start, environment, *rest)
        except EnvironmentFailure as failure:
            failure.task = _task_name(environment, start.env_seed, limit_s)
            raise
        finally:
            self._own.pop(start.id, None)
        task = _task_name(environment, start.env_seed, limit_s)
        return msgspec.structs.replace(made, task=task)

    async def close(self) -> None:
        for player in self._players.values():
            await player.close()
        if self._failed is not None:
            await asyncio.to_thread(self._failed.close)
        if self._checkpoints is not None:
            await self._checkpoints.close(STORE_S)

    def _sampling(self, start: p.StartTrajectory, max_new: int) -> p.Sampling:
        rollout = self._config.rollout
        if start.phase is p.Phase.EVAL:
            return p.Sampling(max_new, temperature=self._config.eval.of(start.domain)[1])
        return p.Sampling(
            max_new, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
        )

    async def _request_turn(self, request: p.TurnRequest) -> p.TurnResult:
        future = asyncio.get_running_loop().create_future()
        self._turns[request.turn] = future
        self._send(request)
        if self._moves is not None:
            self._release(request.trajectory)
        try:
            own = self._own.get(request.trajectory)
            with own.paused() if own is not None else nullcontext():
                return await future  # no timeout here: the scheduler has a deadline for stalls
        finally:
            self._turns.pop(request.turn, None)


def _task_name(environment: object, seed: int, limit_s: float) -> str:
    """Return the environment's name for the task of `seed`; "" if `task_name` fails."""
    what = f"{type(environment).__name__}.task_name"
    try:
        name = str(called(what, limit_s, lambda: environment.task_name(seed)))
    # A user's method may be missing or raise. No trajectory fails because of a name.
    except (Exception, Blocked, SystemExit, KeyboardInterrupt):
        return ""
    return name[:TASK_CHARACTERS].encode("utf-8", "backslashreplace").decode()


async def open_store(config: Config, snapshots: Path, recorder: NullRecorder) -> Store | None:
    """Open the store for states of this run's environments. It keeps a state while the trajectory
    has a folder in `snapshots`. None without a store or checkpoints. Raises `ConfigError`."""
    for _, member in config.environments.values():
        opened = store_of(build(member))
        if opened is not None:
            return await opened(config, snapshots, recorder)
    return None


async def run(
    rank: int,
    config: Config,
    send: Callable[[int, p.Message], None],
    receive: Callable[[], Awaitable[p.Message]],
    recorder: NullRecorder,
    folder: Path,
    attempt: int,
) -> None:
    """Run the host with the number `rank` until the coordinator sends `Shutdown`. `send(rank,
    message)` sends to a rank, `receive()` receives, and `folder` is for snapshots."""
    chat = ChatFormat.of(resolve(config.model), config.model)
    tasks = Tasks()
    # Check this machine before any trajectory. A thread does it, because imports take seconds.
    machine = await asyncio.to_thread(check, config.env, config.eval.sets)

    def resumed(snapshot: Snapshot) -> None:
        (turns, tokens), earlier = snapshot.state.own_turns(), snapshot.attempt != attempt
        send(COORDINATOR, p.TrajectoryResumed(snapshot.start.id, turns, tokens, earlier))

    if (checkpoints := await open_store(config, folder, recorder)) is not None:
        tasks.spawn(checkpoints.sweep())
    moves = Moves(rank, lambda m: send(COORDINATOR, m)) if config.moves_trajectories else None
    pools = [rank.rank for rank in layout(config) if rank.role is p.Role.REWARD]
    host = TrajectoryHost(
        config,
        chat,
        lambda message: send(COORDINATOR, message),
        tasks.spawn,
        recorder,
        Scoring(config.reward, pools, send) if pools else None,
        Snapshots(folder, attempt, config, resumed, lambda snapshot: host.saved(snapshot)),
        checkpoints,
        moves,
        Keeper(config.run_dir) if config.observe.save_trajectories else None,
    )

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, host.on_sigterm)

    async def handle() -> None:
        while not isinstance(message := await receive(), p.Shutdown):
            host.handle(message)

    watch = LoopWatch(
        lambda: send(rank, p.HostBeat()),
        lambda words: send(COORDINATOR, p.HostBlocked(rank, words)),
    )
    tasks.spawn(watch.run())
    send(COORDINATOR, p.HostReady(rank, machine))
    if moves is not None:
        tasks.spawn(moves.report_load())
    try:
        await tasks.run_until(handle())
    finally:
        # Closing gives cancelled trajectories time to close their environments.
        await tasks.close(config.step_timeout_s)
        await host.close()
