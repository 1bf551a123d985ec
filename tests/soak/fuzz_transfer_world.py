"""What tests/soak/fuzz_transfer.py's parts share: weights that follow from a seed, stores of them,
readers, and the tally. Not a command."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from rose.transfer import TransferError
from rose.transfer.edge import Edge, list_edges, read_plan
from rose.transfer.live import Live
from rose.transfer.receive import Receiver, whole
from rose.transfer.source import Folder
from rose.transfer.stage import stage
from rose.transfer.store import FULL, INITIAL, MANIFEST, PLAN, Step, edge_name
from tests.transfer.worlds import World, same

SHAPES = {"sparse": (40, 12), "columns": (24, 12), "dense": (96,), "frozen": (30,), "norm": (24,)}
CUTS = {"sparse": ([0, 20, 40], []), "columns": ([], [0, 6, 12])}
WHOLE = 1 << 30  # dense bytes: all
TIMEOUT_S = 30.0
Weights = dict[str, torch.Tensor]
fork = multiprocessing.get_context("fork")


class History:
    """The weights of every version, bit for bit a function of the seed and the version alone. The
    tensors differ in how they change, so that every kind of payload occurs: delta, planes, raw and
    unchanged, in 2 and 4 bytes."""

    def __init__(self, seed: int):
        chance = np.random.default_rng([seed, 0])
        self._seed = seed
        first = {}
        for name, shape in SHAPES.items():
            drawn = torch.from_numpy(chance.normal(0, 0.02, shape).astype(np.float32))
            first[name] = drawn if name == "norm" else drawn.bfloat16()
        self._made = [first | {"noise": self._noise(chance)}]

    @staticmethod
    def _noise(chance: np.random.Generator) -> torch.Tensor:
        patterns = chance.integers(-(2**31), 2**31, 16).astype(np.int32)
        return torch.from_numpy(patterns).view(torch.float32)

    def at(self, version: int) -> Weights:
        """Not to be written to."""
        while len(self._made) <= version + 1:
            self._made.append(self._next(len(self._made)))
        return self._made[version + 1]

    def live(self, version: int | None) -> Weights:
        """A copy to load another version into; zeros if null."""
        if version is None:
            return {name: torch.zeros_like(t) for name, t in self.at(INITIAL).items()}
        return {name: t.clone() for name, t in self.at(version).items()}

    def _next(self, number: int) -> Weights:
        chance, made = np.random.default_rng([self._seed, number]), dict(self._made[-1])
        for name in ("sparse", "columns", "norm"):
            patterns = made[name].view(torch.int32 if name == "norm" else torch.int16).clone()
            step = chance.choice([-2, -1, 1, 300], patterns.shape, p=[0.1, 0.4, 0.4, 0.1])
            step[chance.random(patterns.shape) > 0.1] = 0
            patterns += torch.from_numpy(step).to(patterns.dtype)
            made[name] = patterns.view(made[name].dtype)
        made["dense"] = torch.from_numpy(chance.normal(0, 0.02, made["dense"].shape)).bfloat16()
        made["noise"] = self._noise(chance)
        return made


def world(
    store: Path,
    history: History,
    versions: int,
    full_every: int = 1000,
    keep: int = 1000,
    timeout_s: float = TIMEOUT_S,
) -> World:
    """A store of the versions 0 to `versions` - 1, by two ranks, the first of which waits so long
    for the second one's file."""
    weights = history.at(INITIAL)
    made = World(store, weights, CUTS, full_every=full_every, keep=keep, timeout_s=timeout_s)
    for version in range(versions):
        made.weights = history.at(version)
        made.publish(version)
        made.tidy()
    return made


def load(
    where: str,
    history: History,
    have: int | None,
    want: int,
    live: Weights | None = None,
    token_file: str | None = None,
) -> tuple[list[str], Weights]:
    """The edges by which a reader came to `want`, and the weights that it has then."""
    live = history.live(have) if live is None else live
    receiver = Receiver(where, None, token_file, whole, Live(live))
    try:
        staged = receiver.stage(have, want, 1, WHOLE, TIMEOUT_S)
        staged.flip()
        staged.check()
    finally:
        receiver.close()
    return staged.route, live


def committed(store: Path) -> set[Step]:
    edges = list_edges(Folder(store))
    return {step for step in edges if (store / edge_name(*step) / MANIFEST).exists()}


@dataclass
class Tally:
    """What one part found. `violations`: each with what is needed to see it again."""

    counts: Counter = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _said: float = field(default_factory=time.monotonic)

    def count(self, what: str) -> None:
        self.counts[what] += 1
        if time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            print("   ", self, file=sys.stderr, flush=True)

    def violation(self, text: str) -> None:
        self.violations.append(text)
        print("VIOLATION:", text, flush=True)

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.violation(text)

    def right(self, live: Weights, weights: Weights, text: str) -> None:
        """Require that the live weights are these, bit for bit."""
        self.require(same(live, weights), f"WRONG WEIGHTS: {text}")

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in self.counts.items())


def start(call: Callable, *arguments) -> multiprocessing.Process:
    """In a forked process, whose end is its own."""

    def run() -> None:
        torch.set_num_threads(1)
        try:
            call(*arguments)
            os._exit(0)
        except BaseException as error:
            print(f"{call.__name__}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    process = fork.Process(target=run, daemon=True)
    process.start()
    return process


def consistent(store: Path, history: History, what: str, tally: Tally) -> None:
    """Every committed edge makes of its base's weights exactly its version's, and the newest
    version is reached."""
    if not (store / PLAN).exists():
        tally.count("killed before the plan was written")
        return
    source = Folder(store)
    plan, digest = read_plan(source)
    edges = committed(store)
    tally.counts["folders left without a manifest"] += len(list_edges(source) - edges)
    for version, base in edges:
        live, places = history.live(base), whole(plan, None)
        try:
            edge = Edge(source, version, base, plan, digest)
            stage(Live(live), plan, places, [edge], base is not None, 1, WHOLE).flip()
        except TransferError as error:
            tally.violation(f"{what}: {error}")
            continue
        tally.right(live, history.at(version), f"{what}: by {edge_name(version, base)}")
        tally.count("committed edges right")
    if not edges:
        return
    newest = max(version for version, _ in edges)
    for have in [INITIAL] + [None] * any(base is FULL for _, base in edges):
        try:
            route, live = load(str(store), history, have, newest)
        except TransferError as error:
            tally.violation(f"{what}: from {have}: {error}")
        else:
            tally.right(live, history.at(newest), f"{what}: from {have} by {route}")
            tally.count("newest versions reached")
