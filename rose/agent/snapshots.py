"""Episodes on disk, after each turn of an environment that has `checkpoint`: where trajectories go
on when their host or their run has ended, without a turn or a step made again.

RUN/snapshots/TRAJECTORY/aAAA-tNNNN is, of attempt A of the run, the episode before turn N: its
XXH3-128, then msgpack. There are the last `KEPT`, and back to the newest that other hosts can
resume: what one names may still be on its way to them. A damaged one, or one that the environment
can't resume, is passed over for the one before. They are written while the model thinks; a disk
that refuses, or lags behind, costs snapshots and nothing else. The coordinator removes a
trajectory's folder, and the host that of one that was dropped. Left out: what `saved` names, which
is the environment's.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rose import protocol as p
from rose.agent.envs.base import Action, Step
from rose.config import Config
from rose.files import write_whole

KEPT = 2  # of a trajectory, the newest, at least
HASH = 16  # bytes
MOST_WORDS = 10  # about snapshots that could not be made


class Snapshot(msgspec.Struct, frozen=True):
    """An episode between two turns. `saved` is what the environment's `checkpoint` gave, None where
    `messages` and `played` are to be repeated (forks.py); `state` has the rest by the names that
    the loop has for it."""

    attempt: int
    digest: bytes  # of the configuration
    start: p.StartTrajectory
    tools: list[dict[str, Any]]
    task: dict[str, Any]
    started: float  # wall clock, seconds
    state: dict[str, Any]
    saved: bytes | None
    # of one that has just forked off another, where the environment saves nothing
    messages: list[dict[str, str]] = []
    played: tuple[tuple[Action, Step], ...] = ()

    @property
    def turns(self) -> int:
        return self.state["turns"]

    @property
    def made(self) -> tuple[int, int]:
        """Turns and their tokens, without those of the trajectory that it forked off."""
        inherited = sum(turns for _, turns in self.state["inherited"])
        tokens = sum(n for turn, n in self.state["turn_tokens"] if turn >= inherited)
        return self.turns - inherited, tokens


# Made here, by one thread: msgspec looks a dataclass up at its first use, in Python code; a host
# whose threads read their first snapshots at once died there of a segmentation fault.
_decoder = msgspec.msgpack.Decoder(Snapshot)


class Snapshots:
    """Of a host's trajectories. `folder`: the run's; `attempt`: of the run; `on_resume` takes each
    snapshot that an episode has gone on from, `on_saved` each that is on disk."""

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
        self._settled: dict[str, str] = {}  # trajectory -> the name of the newest that is
        self._words = 0

    def found(self, start: p.StartTrajectory) -> list[Snapshot]:
        """Those that the trajectory may go on from, the newest first."""
        found = []
        for path in sorted(self._files(start.id), reverse=True):
            try:
                snapshot = _read(path)
            except (OSError, ValueError) as error:
                self.say(f"{path} is damaged ({error}): the one before is taken")
                continue
            if self._fits(snapshot, start):
                found.append(snapshot)
        return found

    def _fits(self, snapshot: Snapshot, start: p.StartTrajectory) -> bool:
        """By this attempt of the run, or by weights that `start` allows."""
        same = msgspec.structs.replace(
            snapshot.start, oldest_version=start.oldest_version, newest_version=start.newest_version
        )
        if same != start or snapshot.digest != self.digests[start.domain]:
            return False
        if snapshot.attempt == self.attempt:
            return True
        versions = p.unpack_tokens(snapshot.state["versions"])
        made = versions[versions >= 0]
        return bool(
            made.size and made.min() >= start.oldest_version and made.max() <= start.newest_version
        )

    def expect(self, trajectory: str) -> None:
        """It begins: from here on what it keeps elsewhere is wanted (`open_checkpoints`)."""
        try:
            (self._folder / trajectory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.say(f"none of {trajectory} can be written: {error}")

    async def write(self, snapshot: Snapshot) -> None:
        """Returns when it is on disk, or never will be."""
        try:
            await asyncio.to_thread(self._write, snapshot)
        except Exception as error:  # Integers of a call may be larger than msgpack has a form for.
            self.say(f"a snapshot could not be written: {type(error).__name__}: {error}")
        else:
            self._on_saved(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        folder = self._folder / snapshot.start.id
        folder.mkdir(parents=True, exist_ok=True)
        data = msgspec.msgpack.encode(snapshot)
        write_whole(folder / self._name(snapshot.turns), xxhash.xxh3_128_digest(data) + data)
        settled = self._settled.get(snapshot.start.id, "")
        for old in sorted(self._files(snapshot.start.id))[:-KEPT]:
            if old.name < settled:
                old.unlink(missing_ok=True)

    def settled(self, trajectory: str, turns: int) -> None:
        """What its snapshot before this turn names can be restored by other hosts."""
        self._settled[trajectory] = self._name(turns)

    def _name(self, turns: int) -> str:
        return f"a{self.attempt:03d}-t{turns:04d}"

    def ended(self, trajectory: str) -> None:
        self._settled.pop(trajectory, None)

    def remove(self, trajectory: str) -> None:
        """All of it."""
        shutil.rmtree(self._folder / trajectory, ignore_errors=True)

    def _files(self, trajectory: str) -> list[Path]:
        with suppress(OSError):  # there is none
            folder = self._folder / trajectory
            return [path for path in folder.iterdir() if path.suffix != ".part"]
        return []

    def say(self, what: str) -> None:
        """In the host's log, a few times."""
        self._words += 1
        if self._words <= MOST_WORDS:
            last = "; no more is said of that" if self._words == MOST_WORDS else ""
            print(f"snapshots: {what}{last}", flush=True)


def _read(path: Path) -> Snapshot:
    """Raises OSError, and `ValueError` saying what is wrong with it."""
    data = path.read_bytes()
    if xxhash.xxh3_128_digest(data[HASH:]) != data[:HASH]:
        raise ValueError("its hash is another")
    return _decoder.decode(data[HASH:])


def _digest(config: Config, domain: str) -> bytes:
    """Of what makes the tokens and the states of this domain's episodes what they are."""
    env, model = config.environments[domain][1], config.model
    parts = [env.name, env.args, env.max_turns, env.max_new_tokens]
    parts += [model.name, model.max_context, model.tool_format, model.chat_template_args]
    return xxhash.xxh3_128_digest(msgspec.json.encode(parts, order="sorted"))
