"""Episodes for scripts/sandbox/bench_sandbox.py, of scripted commands and of a model's, and what
policies recover of them when their sandboxes are killed.

Scripted are three kinds, after Crab's (arXiv 2604.28138): state in the shell, a repair of code, a server in the
background. Three quarters of their turns only read, as an agent's do. None depends on time: a
command that waits polls for its condition. The last command shows the whole state; a fault-free run
defines the right output.

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
from typing import Any, Protocol

from rose.agent.chat import ChatFormat
from rose.agent.envs import _ladder
from rose.config import Model
from rose.models import resolve
from rose.parts.sandbox import Sandbox, SandboxError, Spec
from rose.parts.sandbox.checkpointer import CLASSIFIED, FULL, Checkpointer, restore
from rose.parts.sandbox.engine import Engine
from rose.parts.sandbox.envs.terminal import BASH
from rose.parts.sandbox.inspector import FILES, NONE, PROCESS

WAIT_S = 120.0
KEPT = 1000  # turns kept of a sandbox, more than any episode has
CHAT, ONLY_FILES, REPLAY = "chat only", "files only", "shell replay"
POLICIES = (CHAT, ONLY_FILES, REPLAY, FULL, CLASSIFIED)
RUNGS = ("print", "replace")  # alternating; "find" would have folders of the same names
SEEN_TURNS = 2
SEEN = 160  # characters of a command's output that the model sees
NEW_TOKENS = 32
WRITE = "mkdir work; cd work; for name in {names}; do echo {words} > $name; done"


@dataclass(frozen=True)
class Turn:
    """A command. `tokens`: those of the model that chose it; `shown`: its output."""

    command: str
    tokens: tuple[int, ...] = ()
    shown: str = ""


class Episode(Protocol):
    """An agent's episode of `length` turns. Faults must not change the output of `check`."""

    name: str
    check: str
    length: int

    def next(self, turns: list[Turn]) -> Turn:
        """Return the agent's next turn after `turns`, with `shown` left empty."""
        ...


@dataclass(frozen=True)
class Scripted:
    name: str
    commands: tuple[str, ...]
    check: str

    @property
    def length(self) -> int:
        return len(self.commands)

    def next(self, turns: list[Turn]) -> Turn:
        return Turn(self.commands[len(turns)])


PROJECT = """\
import os, random
chosen = random.Random(7)
for package in ("calc", "report", "store", "web"):
    os.makedirs(f"src/{package}", exist_ok=True)
    for number in range(30):
        with open(f"src/{package}/part{number}.py", "w") as file:
            for line in range(chosen.randrange(20, 90)):
                file.write(f"def f{line}(x):\\n    return x * {chosen.random()}\\n\\n")
with open("src/calc/total.py", "w") as file:
    file.write("def total(values):\\n    return sum(values) - 1\\n\\n\\ndef mean(values):\\n"
               "    return total(values) / (len(values) + 1)\\n")
os.makedirs("tests")
with open("tests/test_total.py", "w") as file:
    file.write("from calc.total import mean, total\\nassert total([1, 2]) == 3, 'total'\\n"
               "assert mean([1, 3]) == 2, 'mean'\\nprint('passed')\\n")
"""
REPAIR = Scripted(
    "repair",
    (
        f"cat > make.py <<'X'\n{PROJECT}X\npython3 make.py; rm make.py",
        "ls -R | head -20; git --version",
        "export PYTHONPATH=/app/src PYTHONDONTWRITEBYTECODE=1",
        "python3 tests/test_total.py",
        "cat tests/test_total.py",
        "grep -rn 'def total' src | head",
        "cat src/calc/total.py",
        "sed -i 's/sum(values) - 1/sum(values)/' src/calc/total.py",
        "python3 tests/test_total.py",
        "grep -n mean src/calc/total.py",
        "find src -name '*.py' | wc -l; wc -l src/calc/*.py | tail -1",
        "sed -i 's/(len(values) + 1)/len(values)/' src/calc/total.py",
        "python3 tests/test_total.py",
        "cat src/calc/total.py",
        "head -3 src/web/part1.py; ls tests",
        "python3 -m py_compile src/calc/total.py 2>&1 | head -2; ls src/calc | wc -l",
    ),
    "python3 tests/test_total.py; cat src/calc/total.py; pwd; cat src/*/*.py | cksum",
)

SHELL = Scripted(
    "shell",
    (
        "id -u; uname -s",
        "ls /usr | head",
        "twice() { echo $1$1; }",
        "cat /etc/hostname",
        "set -o pipefail; umask 027",
        "find /etc -name passwd",
        "rate=5; declare -A seen=([one]=1)",
        "echo $rate ${seen[one]}",
        "cd /usr/share",
        "ls | head -2; twice a",
        "exec 8>>/tmp/log",
        "echo one >&8; cat /tmp/log",
        "wc -c /tmp/log; umask",
        "echo $((rate * 2)); type twice | head -1",
        "echo two >&8",
        "cat /tmp/log; echo ${!seen[@]}",
    ),
    "twice 1; echo $rate ${seen[one]}; umask; set -o | grep pipefail; pwd; echo 3 >&8; cat /tmp/log",
)

COUNTER = """\
import socket
server, count = socket.create_server(("127.0.0.1", 8080)), 0
while True:
    client, _ = server.accept()
    count += 1
    client.sendall(f"{count}\\n".encode())
    client.close()
"""
SERVER = Scripted(
    "server",
    (
        "ls /; python3 --version",
        f"cat > counter.py <<'X'\n{COUNTER}X",
        "cat > ask <<'X'\n#!/bin/bash\ncat < /dev/tcp/127.0.0.1/8080\nX\nchmod +x ask",
        "cat counter.py",
        # Waits for port 8080 (1F90) in /proc, because the server would count a request.
        "python3 counter.py & until grep -q ':1F90 ' /proc/net/tcp; do :; done",
        "ps | head -3; ls -la",
        "./ask",
        "grep -n count counter.py",
        "cat ask; wc -l counter.py",
        "./ask; ./ask",
        "jobs; head -2 counter.py",
        "ls -la /app; cat /proc/loadavg | wc -w",
    ),
    "./ask; jobs | wc -l; ls",
)

EPISODES = (SHELL, REPAIR, SERVER)


class Sampled:
    """An `Episode` of errands in one shell, by sampled commands. Raises `ConfigError`.

    The tiny model with which `+experiment=terminal` begins prints and changes files, one errand a
    turn; the first turn writes them. The output of the last commands is in its system message,
    where it confuses the model least. Each turn has its own seed, so that an episode that continues
    in the same state has the same tokens. Left out: engines with batches, whose rounding differs
    from run to run.
    """

    name = "model"
    check = "head *; pwd"

    def __init__(self, model: Model, length: int = 16) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.length = length
        torch.set_num_threads(1)
        folder = resolve(model)
        self._chat = ChatFormat.of(folder, model)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def next(self, turns: list[Turn]) -> Turn:
        if not turns:
            words = " ".join(_ladder.COLOURS)
            return Turn(WRITE.format(names=" ".join(_ladder.NAMES), words=words))
        tokens = self._sample(self._context(turns), seed=len(turns))
        call = getattr(self._chat.parse(self._chat.decode(tokens), [BASH]), "call", None)
        command = call.arguments.get("command") if call is not None else None
        return Turn(command if isinstance(command, str) else ":", tuple(tokens))

    def _context(self, turns: list[Turn]) -> list[int]:
        seen = "".join(turn.shown[:SEEN] for turn in turns[-SEEN_TURNS:])
        errand = _ladder.draw(len(turns), (RUNGS[len(turns) % 2],)).instruction
        messages = [
            {"role": "system", "content": f"{seen}{_ladder.SYSTEM}"},
            {"role": "user", "content": errand},
        ]
        return self._chat.start(messages, [BASH])

    def _sample(self, context: list[int], seed: int) -> list[int]:
        """Sample tokens until an end-of-turn token, at most `NEW_TOKENS`."""
        import torch

        drawn, made, cache = torch.Generator().manual_seed(seed), list[int](), None
        with torch.inference_mode():
            while len(made) < NEW_TOKENS and not (made and made[-1] in self._chat.eos_ids):
                given = torch.tensor([made[-1:] or context])
                step = self._model(given, past_key_values=cache, use_cache=True)
                cache, chances = step.past_key_values, step.logits[0, -1].softmax(-1)
                made.append(int(torch.multinomial(chances, 1, generator=drawn)))
        return made


# --------------------------------------------------------------------------- kills


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
