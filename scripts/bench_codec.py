"""Compare the transfer codec with its rivals: bytes, their ratio to the entropy bound, and speed.

    python scripts/bench_codec.py                              # made-up values
    python scripts/bench_codec.py outputs/smollm --steps 2     # and the last versions of runs' stores
    python scripts/bench_codec.py outputs/smollm --elements 0 --only ours,gapdiff

Every encoding works on blocks of 4 Mi values and is decoded in place onto the older values; every
result is compared bit by bit. `--elements`: made-up values. Speed is in GB/s of model bytes, the
best of `--rounds`. One thread
is timed by the CPU clock, so that other programs on the machine count less; `--threads` over blocks
are timed by the wall clock. bound: entropy of which values change plus entropy of the integer
differences, each as independent draws over the whole model. A run stores its versions in
`model.dtype`, and keeps transfer.keep_versions of them.
"""

from __future__ import annotations

import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from rose.transfer import codec
from scripts.csv_tables import shown, write_csv
from scripts.harness import flagged, listed
from scripts.run_weights import RIVALS, Patterns, Rival, last_versions, patterns

BLOCK = 1 << 22  # values
FRACTIONS = (0.001, 0.01, 0.05, 0.2, 0.5, 1.0)
# Chance that a synthetic difference grows by one more: 1.64 bits of entropy with the sign.
STEP_TAIL = 0.13
Block = tuple[Patterns, Patterns]  # new, old values


class Row(NamedTuple):
    workload: str
    encoding: str
    MB: float
    of_bound: float
    of_raw: float
    encode_GBs: float  # GB/s on one thread
    decode_GBs: float
    encode_all_GBs: float
    decode_all_GBs: float


def made_up(elements: int, fraction: float) -> list[Block]:
    """Return Gaussian bfloat16 weights, a `fraction` of them moved, mostly by one bit pattern."""
    draw = np.random.default_rng(0)
    blocks = []
    for size in sizes(elements):
        old = draw.standard_normal(size, np.float32) * np.float32(0.02)
        old = (old.view(np.uint32) >> 16).astype(np.uint16)
        at = np.flatnonzero(draw.random(size, np.float32) < fraction)
        new = old.copy()
        moved = draw.geometric(1 - STEP_TAIL, at.size) * draw.choice([-1, 1], at.size)
        new[at] += moved.astype(np.uint16)
        blocks.append((new, old))
    return blocks


def noise(elements: int) -> list[Block]:
    """Return blocks of uniform random bits, which no encoding can shrink."""
    draw = np.random.default_rng(0)
    return [
        tuple(draw.integers(0, 65536, size, dtype=np.uint16) for _ in range(2))
        for size in sizes(elements)
    ]


def sizes(elements: int) -> list[int]:
    return [min(BLOCK, elements - start) for start in range(0, elements, BLOCK)]


def of_run(run: Path, steps: int) -> list[list[Block]]:
    """Return the blocks of a run's last `steps` versions, each with that of the version before."""
    from rose.transfer.receive import materialise

    before, found = None, []
    store, versions = last_versions(run, steps + 1)
    for version in versions:
        now = {name: patterns(t) for name, t in materialise(store, version).items()}
        if before is not None:
            found.append(
                [
                    (new[at : at + BLOCK], before[name][at : at + BLOCK])
                    for name, new in now.items()
                    for at in range(0, new.size, BLOCK)
                ]
            )
        before = now
    return found


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


def measure(
    rival: Rival, workload: str, blocks: list[Block], limit: float, threads: int, rounds: int
) -> Row:
    """Encode and decode all blocks. Raises `SystemExit` if a block comes back different."""
    raw = sum(new.nbytes for new, _ in blocks)
    speeds = []
    for workers, clock in ((1, time.process_time), (threads, time.perf_counter)):
        with ThreadPoolExecutor(workers) as pool:
            best = [math.inf, math.inf]
            for _ in range(rounds):
                began = clock()
                payloads = list(pool.map(lambda block: rival.encode(*block), blocks))
                best[0] = min(best[0], clock() - began)
                values = [old.copy() for _, old in blocks]
                began = clock()
                list(pool.map(rival.apply, payloads, values))
                best[1] = min(best[1], clock() - began)
                same = [np.array_equal(a, new) for a, (new, _) in zip(values, blocks, strict=True)]
                if not all(same):
                    raise SystemExit(f"{rival.name} on {workload}: a block came back different")
        speeds += [raw / seconds / 1e9 for seconds in best]
    size = sum(map(len, payloads))
    ratio = size / limit if limit else math.nan
    return Row(workload, rival.name, size / 1e6, ratio, size / raw, *speeds)


def whole(name: str, blocks: list[Patterns]) -> str:
    """Return the size and speed of blocks that are encoded without a base, on one thread."""
    raw = sum(block.nbytes for block in blocks)
    began = time.process_time()
    payloads = [codec.encode(block, None) for block in blocks]
    encoded = time.process_time()
    back = [codec.decode(payload) for payload in payloads]
    decoded = time.process_time()
    if not all(map(np.array_equal, back, blocks)):
        raise SystemExit(f"{name}: a block came back different")
    return (
        f"{name} without a base: {sum(p.size for p in payloads) / raw:.5f} of its bytes, encode "
        f"{raw / (encoded - began) / 1e9:.2f}, decode {raw / (decoded - encoded) / 1e9:.2f} GB/s"
    )


def main(argv: list[str] | None = None) -> int:
    cores = len(os.sched_getaffinity(0))
    args = flagged(__doc__, argv, "RUN", only="", steps=2, elements=8 * BLOCK, threads=cores,
                   rounds=3, csv=Path)  # fmt: skip
    chosen = listed("--only", args.only, RIVALS)
    codec.compile_all()
    console, rows = Console(width=140), []

    def run(workload: str, blocks: list[Block]) -> None:
        limit = bound(blocks)
        found = [
            measure(RIVALS[name], workload, blocks, limit, args.threads, args.rounds)
            for name in chosen
        ]
        rows.extend(found)
        console.print(shown([row._asdict() for row in found], f"bound {limit / 1e6:.3f} MB"))

    if args.elements:
        for fraction in FRACTIONS:
            run(f"{100 * fraction:g}% changed", made_up(args.elements, fraction))
        run("noise to noise", noise(args.elements))
        print(whole("Gaussian values", [new for new, _ in made_up(args.elements, 0)]))
        print(whole("noise", [new for new, _ in noise(args.elements)]))
    for folder in map(Path, args.words):
        for number, blocks in enumerate(of_run(folder, args.steps), 1):
            run(f"{folder.name}, step {number}", blocks)
        print(whole(f"{folder.name}", [new for new, _ in blocks]))
    if args.csv:
        write_csv(args.csv, [row._asdict() for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
