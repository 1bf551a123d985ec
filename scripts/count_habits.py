"""Count what a policy does on FrozenLake, step by step of its training: which habit it has when.

    python scripts/count_habits.py outputs/frozenlake
    python scripts/count_habits.py outputs/frozenlake --every 10

Reads the saved trajectories (observe.save_trajectories=true), also while the run goes on.
docs/frozenlake.md says what each column counts. Left out: slippery lakes, whose moves are not what
the policy chose. Exit code 1 if the trajectories have no lakes or are damaged, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table

from rose.agent.envs.frozen_lake import DIRECTIONS
from rose.parts.report.trajectories import Shown, Texts, read, saved_steps
from scripts.make_tiny_model import distances

# Columns of text. The widest heading then fits on one line, also where the output is a file.
WIDTH = 132
OPEN = ("F", "G")
FORWARD = ("down", "right")
BESIDE = " ".join(rf"{direction} (\w+)" for direction in DIRECTIONS)
LAKE_OR_MOVE = re.compile(
    rf'(?P<lake>(?:[PFHG](?: [PFHG])+\n)+){BESIDE}|"direction": "(?P<move>{"|".join(DIRECTIONS)})"'
)
COLUMNS = {"solved": "solved", "fell": "fell", "late": "no turns left", "equal": "groups all alike"}
COLUMNS |= {"forward": "right or down", "hole": "into hole", "dead": "in dead end"}
COLUMNS |= {"back": "steps back", "fork": "shorter way"}


class Shares:
    """Count how often each thing of `COLUMNS` happened, and how often it could have happened."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, name: str, happened: bool) -> None:
        self._counts[name][0] += happened
        self._counts[name][1] += 1

    def text(self, name: str) -> str:
        happened, possible = self._counts[name]
        return f"{happened / possible:.0%}" if possible else "-"


def moves(text: str) -> Iterator[tuple[list[list[str]], dict[str, str], str]]:
    """(rows of the lake, what lies in each direction, direction that was chosen) of each turn."""
    lake = None
    for found in LAKE_OR_MOVE.finditer(text):
        if found["lake"]:
            rows = [line.split(" ") for line in found["lake"].splitlines()]
            lake = rows, dict(zip(DIRECTIONS, found.groups()[1:5], strict=True))
        elif lake:
            yield *lake, found["move"]
            lake = None


def count_move(rows: list[list[str]], beside: dict[str, str], chosen: str, shares: Shares) -> bool:
    """Add one move to `shares`; returns whether it was made in a dead end."""
    shares.add("forward", chosen in FORWARD)
    if "H" in beside.values():
        shares.add("hole", beside[chosen] == "H")
    ways = [direction for direction in FORWARD if beside[direction] in OPEN]
    if not ways:
        shares.add("back", beside[chosen] in OPEN)
    if len(ways) == 2 and chosen in FORWARD:
        r, c = next((r, row.index("P")) for r, row in enumerate(rows) if "P" in row)
        left = distances(rows)
        down, right = left.get((r + 1, c)), left.get((r, c + 1))
        if down != right:
            shorter = "down" if right is None or (down is not None and down < right) else "right"
            shares.add("fork", chosen == shorter)
    return not ways


def count_episode(text: str, episode: Shown, shares: Shares) -> int:
    """Add one trajectory to `shares`; returns the number of its moves."""
    dead_ends = [count_move(*move, shares) for move in moves(text)]
    solved, late = bool(episode.record["success"]), bool(episode.record["truncated"])
    shares.add("solved", solved)
    shares.add("late", late)
    shares.add("fell", not solved and not late)
    shares.add("dead", any(dead_ends))
    return len(dead_ends)


def count(run: Path, steps: list[int], texts: Texts) -> Shares:
    """The shares over `steps`. Raises `ValueError` for a step without moves on a lake."""
    shares = Shares()
    for step in steps:
        made = 0
        for _, group in groupby(read(run, step), key=lambda t: t.record["group"]):
            group = list(group)
            made += sum(count_episode(texts.of(t.samples[0].tokens), t, shares) for t in group)
            shares.add("equal", len({t.reward for t in group}) == 1)
        if not made:
            raise ValueError(
                f"{run}: step {step} has no moves on a lake; give the folder of a run of "
                f"env=frozen_lake{', whose model is there' if texts.missing else ''}"
            )
    return shares


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the run's folder, as outputs/frozenlake")
    parser.add_argument("--every", type=int, default=5, metavar="N", help="training steps a row")
    args = parser.parse_args(arguments)
    steps = saved_steps(args.run)
    if not steps:
        parser.error(f"{args.run}: no rollouts/step-N.msgpack there; give the folder of a run")
    if args.every < 1:
        parser.error(f"--every {args.every}: at least 1")
    table, texts = Table("steps", *COLUMNS.values(), box=box.SIMPLE_HEAD), Texts(args.run)
    try:
        for _, block in groupby(steps, key=lambda step: (step - 1) // args.every):
            block = list(block)
            shares = count(args.run, block, texts)
            table.add_row(f"{block[0]}-{block[-1]}", *map(shares.text, COLUMNS))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    Console(width=WIDTH).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
