"""Small shell tasks of three kinds (rungs): list a folder, print a file, replace a word.

A seed determines the task. One command solves it. All words that vary in it are in the instruction,
so that a model of half a million parameters can learn it. Scripts may import this file, because it
needs only Python's standard library.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NAMES = ("apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "robot")
COLOURS = ("red", "blue", "green", "black", "white", "pink", "gold", "grey")
RUNGS = ("find", "print", "replace")
SYSTEM = "You work in a shell. Do what is asked with one call of bash."


def function_tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    """Return the OpenAI schema of a tool whose arguments are texts."""
    parameters = {
        "type": "object",
        "properties": {each: {"type": "string"} for each in arguments},
        "required": list(arguments),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


BASH = function_tool("bash", "Run a shell command.", "command")


@dataclass(frozen=True)
class Rung:
    """A task of the ladder, which `command` solves. `files`: path -> content at the start.
    `expected`: text that the output must have (find, print), or content of `target` (replace)."""

    kind: str
    instruction: str
    command: str
    files: dict[str, str]
    target: str
    expected: str


def draw(seed: int, rungs: tuple[str, ...] = RUNGS) -> Rung:
    """Return the task of `seed`, of one of the kinds `rungs`."""
    rng = random.Random(seed)
    kind = rng.choice(rungs)
    name, (old, new) = rng.choice(NAMES), rng.sample(COLOURS, 2)
    secret = f"{rng.getrandbits(40):010x}"
    if kind == "find":
        files = {f"{each}/{rng.getrandbits(40):010x}": "" for each in NAMES if each != name}
        files[f"{name}/{secret}"] = ""
        return Rung(kind, f"List {name}", f"ls {name}", files, "", secret)
    if kind == "print":
        files = {each: f"{rng.getrandbits(40):010x}\n" for each in NAMES if each != name}
        files[name] = f"{secret}\n"
        return Rung(kind, f"Print {name}", f"cat {name}", files, "", secret)
    before = " ".join(rng.sample([*COLOURS, secret], len(COLOURS) + 1))
    files = dict.fromkeys(NAMES, f"{before}\n")
    command = f"sed -i s/{old}/{new}/ {name}"
    instruction = f"Replace {old} by {new} in {name}"
    changed = before.replace(old, new)
    return Rung(kind, instruction, command, files, name, f"{changed}\n")


def demonstrate(rung: Rung, noise: float, rng: random.Random) -> str:
    """Return the solving command, each argument replaced at random with probability `noise`."""

    def word(right: str, others: tuple[str, ...]) -> str:
        return rng.choice(others) if rng.random() < noise else right

    if rung.kind != "replace":
        verb, name = rung.command.split()
        return f"{verb} {word(name, NAMES)}"
    _, _, change, name = rung.command.split()
    _, old, new, _ = change.split("/")
    old, new, name = word(old, COLOURS), word(new, COLOURS), word(name, NAMES)
    return f"sed -i s/{old}/{new}/ {name}"
