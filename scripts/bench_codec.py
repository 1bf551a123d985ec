"""Compare the transfer codec with its rivals: bytes, their ratio to the entropy bound, and speed.

    python scripts/bench_codec.py                              # made-up values
    python scripts/bench_codec.py outputs/smollm --steps 2     # and the last versions of runs' stores
    python scripts/bench_codec.py outputs/smollm --elements 0 --only ours,gapdiff

Every encoding works on blocks of 4 Mi values and is decoded in place onto the older values; every
result is compared bit by bit. Speed is in GB/s of model bytes on one thread, the best of
`--rounds`, by the CPU clock. bound: entropy of which values change plus entropy of the integer
differences, each as independent draws over the whole model.
"""

from __future__ import annotations

import math
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.transfer import codec
from scripts.csv_tables import show, write_csv
from scripts.harness import flagged, listed
from scripts.run_weights import RIVALS, Patterns, Rival, last_versions, patterns

BLOCK = 1 << 22  # values
FRACTIONS = (0.001, 0.01, 0.05, 0.2, 0.5, 1.0)
# Chance that a synthetic difference grows by one more: 1.64 bits of entropy with the sign.
STEP_TAIL = 0.13
WAYS = ("encode", "decode")
Block = tuple[Patterns, Patterns]  # new, old values


def made_up(elements: int, fraction: float) -> list[Block]:
    """Return Gaussian bfloat16 weights, a `fraction` of them moved, mostly by one bit pattern."""
    draw = np.random.default_rng(0)
    blocks = []
    for start in range(0, elements, BLOCK):
        size = min(BLOCK, elements - start)
        old = draw.standard_normal(size, np.float32) * np.float32(0.02)
        old = (old.view(np.uint32) >> 16).astype(np.uint16)
        at = np.flatnonzero(draw.random(size, np.float32) < fraction)
        new = old.copy()
        moved = draw.geometric(1 - STEP_TAIL, at.size) * draw.choice([-1, 1], at.size)
        new[at] += moved.astype(np.uint16)
        blocks.append((new, old))
    return blocks


def of_run(run: Path, steps: int) -> list[list[Block]]:
    """Return the blocks of a run's last `steps` versions, each with that of the version before."""
    from rose.transfer.receive import materialise

    store, versions = last_versions(run, steps + 1)
    every = [{name: patterns(t) for name, t in materialise(store, v).items()} for v in versions]
    return [
        [
            (new[at : at + BLOCK], old[name][at : at + BLOCK])
            for name, new in now.items()
            for at in range(0, new.size, BLOCK)
        ]
        for old, now in pairwise(every)
    ]


def entropy(counts: np.ndarray) -> float:
    """Return the entropy of one draw in bits."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bound(blocks: list[Block]) -> float:
    """Return the entropy bound of all blocks in bytes."""
    total, changed = sum(new.size for new, _ in blocks), []
    for new, old in blocks:
        at = np.flatnonzero(new != old)
        changed.append(new[at].astype(np.int64) - old[at])
    differences = np.concatenate(changed)
    counts = np.unique(differences, return_counts=True)[1]
    where = np.array([differences.size, total - differences.size])
    return (total * entropy(where) + differences.size * entropy(counts)) / 8


def measure(rival: Rival, workload: str, blocks: list[Block], limit: float, rounds: int) -> dict:
    """Encode and decode all blocks. Raises `SystemExit` if a block comes back different."""
    raw = sum(new.nbytes for new, _ in blocks)
    best = [math.inf, math.inf]
    for _ in range(rounds):
        values = [old.copy() for _, old in blocks]
        began = time.process_time()
        payloads = [rival.encode(*block) for block in blocks]
        encoded = time.process_time()
        for payload, older in zip(payloads, values, strict=True):
            rival.apply(payload, older)
        took = encoded - began, time.process_time() - encoded
        best = [*map(min, best, took)]
        if not all(np.array_equal(a, new) for a, (new, _) in zip(values, blocks, strict=True)):
            raise SystemExit(f"{rival.name} on {workload}: a block came back different")
    size = sum(map(len, payloads))
    row: dict = {"workload": workload, "encoding": rival.name, "MB": size / 1e6}
    row |= {"of_bound": size / limit if limit else math.nan, "of_raw": size / raw}
    return row | {f"{way}_GBs": raw / s / 1e9 for way, s in zip(WAYS, best, strict=True)}


def main(argv: list[str] | None = None) -> int:
    args = flagged(__doc__, argv, "RUN", only="", steps=2, elements=8 * BLOCK, rounds=3, csv=Path)
    chosen = listed("--only", args.only, RIVALS)
    codec.compile_all()
    rows = []

    def run(workload: str, blocks: list[Block]) -> None:
        limit = bound(blocks)
        found = [measure(RIVALS[name], workload, blocks, limit, args.rounds) for name in chosen]
        rows.extend(found)
        show(found, f"bound {limit / 1e6:.3f} MB")

    if args.elements:
        for fraction in FRACTIONS:
            run(f"{100 * fraction:g}% changed", made_up(args.elements, fraction))
    for folder in map(Path, args.words):
        for number, blocks in enumerate(of_run(folder, args.steps), 1):
            run(f"{folder.name}, step {number}", blocks)
    if args.csv:
        write_csv(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
