"""Kill sandboxes for scripts/sandbox/bench_sandbox.py: how much each policy recovers, at which cost.

A policy is played once without a fault, and the sandbox is closed. Then, for each turn, a sandbox
is restored from that turn's checkpoint and plays to the end. Its final output, and a model's tokens
on the way, must equal those of an episode without faults and without checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rose.parts.sandbox import Sandbox, SandboxError, Spec
from rose.parts.sandbox.checkpointer import CLASSIFIED, FULL, Checkpointer, restore
from rose.parts.sandbox.engine import Engine
from rose.parts.sandbox.inspector import FILES, NONE, PROCESS
from scripts.sandbox.bench_sandbox_episodes import Episode, Scripted, Turn

WAIT_S = 120.0
KEPT = 1000  # turns kept of a sandbox, more than any episode has
CHAT, ONLY_FILES, REPLAY = "chat only", "files only", "shell replay"
POLICIES = (CHAT, ONLY_FILES, REPLAY, FULL, CLASSIFIED)


@dataclass
class Played:
    """A fault-free episode. `shown`: the output of its check. `exposed`: for each turn, seconds
    that the next command waited for the checkpoint."""

    turns: list[Turn]
    shown: str = ""
    seconds: float = 0.0
    exposed: list[float] = field(default_factory=list)

    @property
    def end(self) -> tuple:
        """The part of an episode that a fault must not change. Outputs of turns are left out,
        because they may name times and processes."""
        return self.shown, [(turn.command, turn.tokens) for turn in self.turns]


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Engine]:
    """Open a store of captures in folders of its own."""
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        local = Path(folder, "local")
        engine = await Engine(Path(folder, "shared"), local=local, keep=KEPT).open()
        try:
            yield engine
        finally:
            await engine.close()


async def command(box: Sandbox, text: str) -> str:
    result = await box.run(text, WAIT_S)
    if result.code is None or result.restarted:
        raise SandboxError(f"{text!r}: {result.words()}")
    return result.output


async def play(
    box: Sandbox,
    episode: Episode,
    think_s: float = 0.0,
    keeper: Checkpointer | None = None,
    before: Sequence[Turn] = (),
) -> Played:
    """Play the turns that follow `before`, and the final check. After each turn the agent thinks
    for `think_s` while the checkpoint is taken."""
    began, played = time.monotonic(), Played([*before])
    while (turn := len(played.turns) + 1) <= episode.length:
        made = await asyncio.to_thread(episode.next, played.turns)
        played.turns.append(replace(made, shown=await command(box, made.command)))
        ended = time.monotonic()
        if keeper is not None:
            await keeper.after_turn(turn)
        done = time.monotonic()
        await asyncio.sleep(max(0.0, ended + think_s - done))
        played.exposed.append(max(0.0, done - ended - think_s))
    played.seconds = time.monotonic() - began
    played.shown = await command(box, episode.check)
    return played


async def begin(box: Sandbox, engine: Engine, policy: str) -> Any:
    if policy == CHAT:
        return None
    keeper = Checkpointer(box, engine, "bench", policy if policy in (FULL, CLASSIFIED) else FILES)
    await keeper.begin()
    return keeper


@dataclass
class Recovered:
    """The recovery of one policy on one episode. `right`: kills after which the episode ended as
    without a fault; `captured`: bytes of its captures; `stored`: bytes that were new to the
    store."""

    played: Played
    right: int = 0
    captured: int = 0
    stored: int = 0


async def bring_back(policy: str, engine: Engine, saved: bytes | None) -> Sandbox:
    if saved is None:
        return await Sandbox.start(Spec())
    box = (await restore(saved, engine)).box
    if policy == ONLY_FILES:  # ends the restored shell with the state replayed into it
        await box.run("kill -9 $$", WAIT_S)
    return box


async def kill_at_each_turn(
    episode: Episode, policy: str, think_s: float, wanted: tuple
) -> Recovered:
    """Play the episode, then restore and finish it once for each turn. `wanted`: the episode's
    `end` without faults and without checkpoints."""
    async with opened() as engine:
        box = await Sandbox.start(Spec())
        keeper = await begin(box, engine, policy)
        made = Recovered(await play(box, episode, think_s, keeper))
        turns = range(1, episode.length + 1)
        saved: dict[int, bytes | None] = dict.fromkeys(turns)
        if keeper is not None:
            await keeper.settled(turns[-1])
            saved = {turn: keeper.saved(turn) for turn in turns}
            made.captured = engine.counters.raw_bytes
            made.stored = engine.counters.stored_bytes
        await box.close()
        for turn in turns:
            box = await bring_back(policy, engine, saved[turn])
            with contextlib.suppress(SandboxError):
                again = await play(box, episode, before=made.played.turns[:turn])
                made.right += again.end == wanted
            await box.close()
        return made


@dataclass(frozen=True)
class Save:
    """The turns that were captured as `kind`: their share of all turns, the median seconds, and the
    mean of the bytes that were new to the store."""

    kind: str
    share: float
    seconds: float
    stored: float


async def saves(episode: Scripted, policy: str, think_s: float) -> list[Save]:
    """Play an episode and return the costs of its turns, by kind of capture."""
    async with opened() as engine, await Sandbox.start(Spec()) as box:
        keeper = await begin(box, engine, policy)
        made: dict[str, list[tuple[float, float]]] = {NONE: [], FILES: [], PROCESS: []}
        for turn, text in enumerate(episode.commands, 1):
            await command(box, text)
            before, stored = dict(keeper.stats), engine.counters.stored_bytes
            await keeper.after_turn(turn)
            await keeper.settled(turn)
            await asyncio.sleep(think_s)
            took = keeper.stats["seconds"] - before["seconds"]
            (kind,) = (k for k in made if keeper.stats[k] > before[k])
            made[kind].append((took, engine.counters.stored_bytes - stored))
    found = []
    for kind, each in made.items():
        if each:
            seconds, sizes = zip(*each, strict=True)
            costs = statistics.median(seconds), statistics.mean(sizes)
            found.append(Save(kind, len(each) / episode.length, *costs))
    return found


async def restoring(episode: Episode, times: int) -> tuple[float, int]:
    """Return the median seconds of a restore from a full checkpoint of the end, and its bytes."""
    async with opened() as engine:
        async with await Sandbox.start(Spec()) as box:
            await play(box, episode)
            keeper = await begin(box, engine, FULL)
            await keeper.after_turn(1)
            await keeper.settled(1)
            saved = keeper.saved(1)
        took = []
        for _ in range(times):
            began = time.monotonic()
            back = await restore(saved, engine)
            took.append(time.monotonic() - began)
            await back.box.close()
        return statistics.median(took), engine.counters.stored_bytes
