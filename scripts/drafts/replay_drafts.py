"""Tabulate for the simulator the drafts that a recorded run would have accepted, by siblings.

    python scripts/drafts/replay_drafts.py run=outputs/smollm                            # prints it
    python scripts/drafts/replay_drafts.py run=outputs/smollm out=conf/sim/draft/calls.yaml

Replays the trajectories of RUN/rollouts through the engines' own proposer (rollout/draft=group),
one after the other within each group. A drafted token counts as accepted if it is the token that
was sampled, so the machine's load has no influence. The replay is repeated `orders` times, each
time with another member of a group first; with as many orders as members, places differ by their
siblings alone. A draft ends where its chance falls below one of `CHANCES`, as in the engines' gate.
The tokens that a step of a decoding request drafts and has accepted are counted by the number of
siblings that have ended by then, and by the longest draft. `lookup_s`: a lookup's median seconds.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.parts.drafts.gain import Gate
from rose.parts.drafts.proposer import GroupProposer
from rose.parts.report import trajectories
from scripts.harness import Failed, keyed

SIBLINGS = (0, 1, 2, 4, 8)  # levels; each begins at this number of siblings
# The last accepts every draft that is found (loops.MIN_CHANCE).
CHANCES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1, 0.02)
LENGTHS = (2, 4, 8)  # longest drafts in tokens
MEMORY = 2**30  # bytes for the texts of all groups, which is no bound here


class Cut(Gate):
    """A gate that doesn't learn: a draft goes on while its chance is at least `chance`."""

    def __init__(self, chance: float) -> None:
        super().__init__(adaptive=False)
        self.chance = chance

    def decide(self, chances: np.ndarray) -> np.ndarray:
        return np.count_nonzero(chances >= self.chance, axis=1)


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
            for turn, part in enumerate(part for part in member.parts() if part.made):
                self._batch.req_ids = [f"{name}.{siblings}.t{turn}#1"]
                end = part.start + len(part.tokens)
                self.counts[level] += self._turn(tokens, part.start, end)
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
        drafted, accepted = (steps[:, :, 1:] / steps[:, :, :1]).round(3).T.tolist()
        lengths.append({"tokens": most, "drafted": drafted, "accepted": accepted})
        seconds += [second for run in runs for second in run.seconds]
    return {
        "lookup_s": float(f"{np.median(seconds):.2g}"),
        "siblings": list(SIBLINGS),
        "chances": list(CHANCES),
        "lengths": lengths,
    }


def main() -> None:
    given = keyed(sys.argv[1:], __doc__, run="", orders=16, out="")
    run = Path(given["run"])
    groups = recorded(run)
    members = [member for group in groups.values() for member in group]
    tokens = sum(int(member.mask.sum()) for member in members)
    head = (
        f"{len(members)} trajectories in {len(groups)} groups, {tokens} tokens, of",
        (run / "command.txt").read_text(encoding="utf-8").strip(),
        f"python scripts/drafts/replay_drafts.py run={run} orders={given['orders']}",
    )
    found = table(groups, given["orders"])
    text = "".join(f"# {line}\n" for line in head)
    text += yaml.safe_dump(found, default_flow_style=None, sort_keys=False)
    if given["out"]:
        Path(given["out"]).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
