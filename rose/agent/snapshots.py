"""Snapshots of trajectories on disk, after each turn of an environment that has `checkpoint`. After
its host or its run has ended, a trajectory resumes from its snapshot and repeats no turn or step.

RUN/snapshots/TRAJECTORY/aAAA-tNNNN is the state before turn N, from attempt A of the run: its
XXH3-128 hash, then msgpack. Snapshots are written while the model generates. If the disk fails or
is slow, they are skipped. If a snapshot is damaged or the environment can't resume it, the snapshot
before it is used. Data that an environment stores elsewhere reaches other hosts later. So the host
keeps the last `KEPT` snapshots and all since the newest that other hosts can resume. The
coordinator removes a trajectory's folder at its end, or the host if the trajectory is cancelled.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rose import protocol as p
from rose.agent.envs.base import Action, Environment, Start, Step
from rose.agent.forks import Fork
from rose.agent.guard import EnvironmentFailure, Guard, forget
from rose.agent.state import EpisodeState
from rose.config import Config
from rose.files import write_whole

KEPT = 2  # least number of newest snapshots that stay for each trajectory
HASH = 16  # bytes of an XXH3-128 hash
MOST_LINES = 10  # most lines in the host's log about snapshots that failed


class Snapshot(msgspec.Struct, frozen=True):
    """An episode between two turns. `saved`: the result of the environment's `checkpoint`. If it is
    None, the environment is restored by repeating the actions in `played` (forks.py)."""

    attempt: int
    digest: bytes  # hash of the configuration that the episode depends on (`_digest`)
    start: p.StartTrajectory
    tools: list[dict[str, Any]]
    task: dict[str, Any]
    started: float  # wall clock, seconds
    state: EpisodeState
    saved: bytes | None
    # Only in the first snapshot of a fork: results that repeated actions must return again.
    messages: list[dict[str, str]] = []
    played: tuple[tuple[Action, Step], ...] = ()

    @property
    def turns(self) -> int:
        return self.state.turns


# Created by one thread, at import: msgspec inspects a dataclass at its first use. When several
# threads decoded their first snapshots at the same time, this inspection crashed the process.
_decoder = msgspec.msgpack.Decoder(Snapshot)


class Snapshots:
    """The snapshots of a host's trajectories in `folder`. This attempt of the run writes them.
    `on_resume` gets each snapshot from which an episode resumed, `on_saved` each saved snapshot."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        config: Config,
        on_resume: Callable[[Snapshot], None],
        on_saved: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> None:
        self._folder, self.attempt = Path(folder), attempt
        self.digests = {name: _digest(config, name) for name in config.environments}
        self.on_resume, self._on_saved = on_resume, on_saved
        self._settled: dict[str, str] = {}  # trajectory -> newest file that other hosts can resume
        self._lines = 0  # lines logged

    def found(self, start: p.StartTrajectory) -> list[Snapshot]:
        """Return the snapshots that the trajectory may resume from, the newest first."""
        found = []
        for path in sorted(self._files(start.id), reverse=True):
            try:
                snapshot = _read(path)
            except (OSError, ValueError) as error:
                self.say(f"{path} is damaged ({error}): the snapshot before it is used")
                continue
            if self._fits(snapshot, start):
                found.append(snapshot)
        return found

    def _fits(self, snapshot: Snapshot, start: p.StartTrajectory) -> bool:
        """True if the snapshot belongs to this trajectory and configuration. If another attempt of
        the run took it, its tokens must also be of policy versions that `start` allows."""
        same = msgspec.structs.replace(
            snapshot.start, oldest_version=start.oldest_version, newest_version=start.newest_version
        )
        if same != start or snapshot.digest != self.digests[start.domain]:
            return False
        if snapshot.attempt == self.attempt:
            return True
        versions = p.unpack_tokens(snapshot.state.versions)
        made = versions[versions >= 0]
        return bool(
            made.size and made.min() >= start.oldest_version and made.max() <= start.newest_version
        )

    def expect(self, trajectory: str) -> None:
        """Create the trajectory's folder. While it exists, its environment's states stay stored."""
        try:
            (self._folder / trajectory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.say(f"none of {trajectory} can be written: {error}")

    async def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot and wait until it is on disk. A failure is logged, not raised."""
        try:
            await asyncio.to_thread(self._write, snapshot)
        except Exception as error:  # any type, such as for an integer too large for msgpack
            self.say(f"a snapshot could not be written: {type(error).__name__}: {error}")
        else:
            self._on_saved(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, and remove older snapshots that are no longer needed."""
        folder = self._folder / snapshot.start.id
        folder.mkdir(parents=True, exist_ok=True)
        data = msgspec.msgpack.encode(snapshot)
        write_whole(folder / self._name(snapshot.turns), xxhash.xxh3_128_digest(data) + data)
        settled = self._settled.get(snapshot.start.id, "")
        for old in sorted(self._files(snapshot.start.id))[:-KEPT]:
            if old.name < settled:
                old.unlink(missing_ok=True)

    def settled(self, trajectory: str, turns: int) -> None:
        """Note that other hosts can resume the trajectory's snapshot with this number of turns."""
        self._settled[trajectory] = self._name(turns)

    def _name(self, turns: int) -> str:
        return f"a{self.attempt:03d}-t{turns:04d}"

    def ended(self, trajectory: str) -> None:
        self._settled.pop(trajectory, None)

    def remove(self, trajectory: str) -> None:
        """Remove all snapshots of the trajectory."""
        shutil.rmtree(self._folder / trajectory, ignore_errors=True)

    def _files(self, trajectory: str) -> list[Path]:
        with suppress(OSError):  # the folder may be missing
            folder = self._folder / trajectory
            return [path for path in folder.iterdir() if path.suffix != ".part"]
        return []

    def say(self, what: str) -> None:
        """Write a line to the host's log. After `MOST_LINES` calls, write nothing."""
        self._lines += 1
        if self._lines <= MOST_LINES:
            last = "; later lines are omitted" if self._lines == MOST_LINES else ""
            print(f"snapshots: {what}{last}", flush=True)


class EpisodeSnapshots:
    """Takes the snapshots of one episode, while the model generates, if `env` has `checkpoint`.
    `snapshots` is None on a host without snapshots."""

    def __init__(
        self, snapshots: Snapshots | None, start: p.StartTrajectory, env: Environment, guard: Guard
    ) -> None:
        self._takes = getattr(env, "checkpoint", None) is not None
        self._snapshots = snapshots if self._takes or start.follows else None
        self._start, self._env, self._guard = start, env, guard
        self._capturing: asyncio.Task[None] | None = None  # saving of the environment's state
        self._writing: asyncio.Task[None] | None = None  # writing of the last snapshot
        self._settling: asyncio.Task[None] | None = None  # wait until other hosts can resume one

    async def resume(self, apply: Callable[[Fork], Awaitable[Start]]) -> tuple[Start, float] | None:
        """Restore the episode from its newest usable snapshot by `apply`. Return the environment's
        start, and the wall-clock time at which the episode began; None without such a snapshot."""
        if self._snapshots is None:
            return None
        for each in await asyncio.to_thread(self._snapshots.found, self._start):
            first = Start(each.messages, each.tools, each.task)
            try:
                await apply(Fork(first, each.played, each.saved, each.state))
            except EnvironmentFailure as failure:
                self._snapshots.say(f"turn {each.turns} can't be resumed: {failure}")
                continue
            self._snapshots.on_resume(each)
            return first, each.started
        return None

    async def write(self, fork: Fork, started: float) -> None:
        """Write the state that a fork copied from its parent, as the fork's first snapshot. The
        parent can't provide this state again, because it plays on."""
        if self._snapshots is not None:
            more = fork.first.messages, fork.played
            await self._snapshots.write(
                self._new_snapshot(fork.first, started, fork.state, fork.saved, *more)
            )

    def take(self, first: Start, started: float, state: EpisodeState) -> None:
        """Begin a snapshot of `state`, unless the last one is still being written."""
        if self._snapshots is None or not self._takes:
            return
        if self._writing is None or self._writing.done():
            self._capturing = asyncio.create_task(self._capture(first, started, state.copy()))

    async def _capture(self, first: Start, started: float, state: EpisodeState) -> None:
        """Save the environment's state; then begin to write the snapshot."""
        try:
            saved = await self._guard.checkpoint()
        except EnvironmentFailure as failure:
            self._snapshots.say(str(failure))
            return
        made = self._new_snapshot(first, started, state, saved)
        self._writing = asyncio.create_task(self._snapshots.write(made))
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle(made.turns))

    def _new_snapshot(self, first: Start, started: float, *state: Any) -> Snapshot:
        own = self._snapshots.attempt, self._snapshots.digests[self._start.domain]
        return Snapshot(*own, self._start, first.tools, first.task, started, *state)

    async def _settle(self, turns: int) -> None:
        """Wait until other hosts can resume the snapshot with this number of turns; note it."""
        settled = getattr(self._env, "settled", None)
        if settled is None or await settled():
            self._snapshots.settled(self._start.id, turns)

    async def captured(self) -> None:
        """Wait until the environment's state has been saved, if a snapshot has begun."""
        if self._capturing is not None:
            await self._capturing

    async def close(self) -> None:
        """Cancel saving the environment's state, and wait until no snapshot is being written."""
        if self._capturing is not None:
            self._capturing.cancel()
        if self._settling is not None:
            self._settling.add_done_callback(forget)
            self._settling.cancel()
        tasks = self._capturing, self._writing
        if left := [task for task in tasks if task is not None and not task.done()]:
            await asyncio.wait(left)
        if self._snapshots is not None:
            self._snapshots.ended(self._start.id)


def _read(path: Path) -> Snapshot:
    """Read and check a snapshot. Raises `OSError`, and `ValueError` if it is damaged."""
    data = path.read_bytes()
    if xxhash.xxh3_128_digest(data[HASH:]) != data[:HASH]:
        raise ValueError("its hash does not match its content")
    return _decoder.decode(data[HASH:])


def _digest(config: Config, domain: str) -> bytes:
    """Hash the settings that determine the tokens and states of the domain's episodes."""
    env, model = config.environments[domain][1], config.model
    parts = [env.name, env.args, env.max_turns, env.max_new_tokens]
    parts += [model.name, model.max_context, model.tool_format, model.chat_template_args]
    return xxhash.xxh3_128_digest(msgspec.json.encode(parts, order="sorted"))
