"""Episodes for scripts/sandbox/bench_sandbox.py: scripted commands, and those of a model.

Scripted are three kinds, after Crab's (arXiv 2604.28138): state in the shell, a repair of code, a server in the
background. Three quarters of their turns only read, as an agent's do. None depends on time: a
command that waits polls for its condition. The last command shows the whole state; a fault-free run
defines the right output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rose.agent.chat import ChatFormat
from rose.agent.envs import _ladder
from rose.config import Model
from rose.models import resolve
from rose.parts.sandbox.envs.terminal import BASH

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
