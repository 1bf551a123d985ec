"""Tabulate for the simulator the drafts that a recorded run would have accepted, by siblings.

    python scripts/replay_drafts.py run=outputs/smollm                            # prints it
    python scripts/replay_drafts.py run=outputs/smollm out=conf/sim/draft/calls.yaml

Replays the trajectories of RUN/rollouts through the engines' own proposer (rollout/draft=group),
one after the other within each group. A drafted token counts as accepted if it is the token that
was sampled. So nothing is computed, and the machine's load has no influence. The replay is repeated
`orders` times, each time with another member of a group first. With as many orders as a group has
members, each member takes every place, so that places differ by their siblings alone. A draft ends
where its chance falls below one of `CHANCES`, as in the engines' gate. The tokens that a step of a
decoding request drafts and has accepted are counted by the number of siblings that have ended by
then, and by the longest draft. `lookup_s`: the median seconds of a request's lookup.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.parts.drafts.proposer import GroupProposer
from rose.observe import trajectories
from scripts.harness import Failed, keyed

SIBLINGS = (0, 1, 2, 4, 8)  # levels; each begins at this number of siblings
# The last accepts every draft that is found (loops.MIN_CHANCE).
CHANCES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1, 0.02)
LENGTHS = (2, 4, 8)  # longest drafts in tokens
MEMORY = 2**30  # bytes for the texts of all groups, which is no bound here


class Cut:
    """A stand-in for the engines' gate: a draft goes on while its chance is at least `chance`."""

    def __init__(self, chance: float) -> None:
        self.chance = chance

    def looks_up(self) -> bool:
        return True

    def decide(self, chances: np.ndarray) -> np.ndarray:
        return np.count_nonzero(chances >= self.chance, axis=1)

    def accepted(self, tokens: int) -> None:
        """Do nothing: this gate does not learn."""

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        """Do nothing: this gate does not learn."""


class Replay:
    """A pass over a run's groups, with one longest draft and one least chance."""

    def __init__(self, most: int, chance: float) -> None:
        config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=most))
        self.proposer = GroupProposer(config)
        self._batch = SimpleNamespace(req_ids=[])
        self.proposer.begin(SimpleNamespace(input_batch=self._batch), False, MEMORY)
        self.proposer.gate = Cut(chance)
        self.counts = np.zeros((len(SIBLINGS), 3))  # steps, drafted, accepted tokens
        self.seconds: list[float] = []  # seconds of each lookup

    def group(self, name: str, members: list[trajectories.Sample]) -> None:
        """Replay the members one after the other."""
        for siblings, member in enumerate(members):
            level = np.searchsorted(SIBLINGS, siblings, side="right") - 1
            tokens = member.tokens.copy()  # numba needs a writable array, which the file's isn't
            for turn, (start, end) in enumerate(turns(member)):
                self._batch.req_ids = [f"{name}.{siblings}.t{turn}#1"]
                self.counts[level] += self._turn(tokens, start, end)
        self.proposer.drop([name])

    def _turn(self, tokens: np.ndarray, start: int, end: int) -> tuple[int, int, int]:
        """Return the turn's steps after the prompt's, and their drafted and accepted tokens."""
        at, new, steps, drafted, accepted = start + 1, 1, 0, 0, 0
        while True:
            began = time.perf_counter()
            sampled, count = [tokens[at - new : at].tolist()], np.array([at])
            [draft] = self.proposer.propose(sampled, count, tokens[None, :at])
            self.seconds.append(time.perf_counter() - began)
            if at >= end:
                return steps, drafted, accepted
            hits = 0
            while hits < min(len(draft), end - at) and draft[hits] == tokens[at + hits]:
                hits += 1
            new = min(hits + 1, end - at)
            steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + new - 1
            at += new


def turns(sample: trajectories.Sample) -> Iterator[tuple[int, int]]:
    """Yield the first and one past the last token of each turn."""
    for part in sample.parts():
        if part.made:
            yield part.start, part.start + len(part.tokens)


def recorded(run: Path) -> dict[str, list[trajectories.Sample]]:
    """Return the groups with one history a member. Raises `Failed` if none has several members."""
    found: dict[str, list[trajectories.Sample]] = {}
    for step in trajectories.saved_steps(run):
        for shown in trajectories.read(run, step):
            if len(shown.samples) == 1:
                group = f"g{step}-{shown.id.partition('.')[0]}"
                found.setdefault(group, []).append(shown.samples[0])
    groups = {name: members for name, members in found.items() if len(members) > 1}
    if not groups:
        raise Failed(f"run={run}: no groups of several trajectories in its folder rollouts")
    return groups


def replayed(groups: dict[str, list], most: int, chance: float, orders: int) -> Replay:
    replay = Replay(most, chance)
    for number, (name, members) in itertools.product(range(orders), groups.items()):
        first = number * len(members) // orders
        replay.group(f"{name}-{number}", [*members[first:], *members[:first]])
    return replay


def table(groups: dict[str, list], orders: int) -> dict:
    """Return the content of a file of conf/sim/draft."""
    seconds, lengths = [], []
    for most in LENGTHS:
        runs = [replayed(groups, most, chance, orders) for chance in CHANCES]
        steps = np.array([run.counts for run in runs])  # (chances, levels, 3)
        if not steps[0, :, 0].all():
            largest = max(map(len, groups.values()))
            raise Failed(f"groups of {largest} trajectories at most: more than {SIBLINGS[-1]}")
        drafted, accepted = (steps[:, :, 1:] / steps[:, :, :1]).round(3).T
        lengths.append({"tokens": most, "drafted": drafted, "accepted": accepted})
        seconds += [second for run in runs for second in run.seconds]
    return {
        "lookup_s": float(f"{np.median(seconds):.2g}"),
        "siblings": list(SIBLINGS),
        "chances": list(CHANCES),
        "lengths": lengths,
    }


def yaml(found: dict, head: tuple[str, ...]) -> str:
    """Format the table as YAML, with a row of numbers a line."""
    lines = [f"# {line}" for line in head]
    lines += [f"{key}: {json.dumps(found[key])}" for key in ("lookup_s", "siblings", "chances")]
    lines.append("lengths:")
    for each in found["lengths"]:
        lines.append(f"  - tokens: {each['tokens']}")
        for key in ("drafted", "accepted"):
            rows = [json.dumps(row) for row in each[key].tolist()]
            lines.append(f"    {key}:")
            lines += [f"      - {row}" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    given = keyed(sys.argv[1:], __doc__, run="", orders=16, out="")
    run = Path(given["run"])
    groups = recorded(run)
    members = [member for group in groups.values() for member in group]
    tokens = sum(int(member.mask.sum()) for member in members)
    head = (
        f"{len(members)} trajectories in {len(groups)} groups, {tokens} tokens, of",
        (run / "command.txt").read_text(encoding="utf-8").strip(),
        f"python scripts/replay_drafts.py run={run} orders={given['orders']}",
    )
    text = yaml(table(groups, given["orders"]), head)
    if given["out"]:
        Path(given["out"]).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
