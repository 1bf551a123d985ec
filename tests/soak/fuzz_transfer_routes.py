"""tests/soak/fuzz_transfer.py's part `routes`: which edges lead from these weights to those. Not a
command."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch
from fuzz_transfer_world import TIMEOUT_S, WHOLE, History, Tally, committed, load, world

from rose.transfer import TransferError
from rose.transfer.live import Live
from rose.transfer.receive import Receiver, whole
from rose.transfer.store import FULL, INITIAL, MANIFEST, Step, edge_name
from tests.transfer.worlds import same


def routes_part(folder: Path, seed: int, gaps: int, tally: Tally) -> None:
    history, chance, versions = History(seed), random.Random(seed), 48
    store = world(folder / "long", history, versions).store
    for behind in range(1, 41):
        want = chance.randrange(behind, versions)
        have = chance.choice([want - behind, want - behind, INITIAL, None])
        route, live = load(str(store), history, have, want)
        chain = [edge_name(version, version - 1) for version in range(have or 0, want + 1)][1:]
        what = f"{behind} versions behind {want}: by {route}"
        tally.require(route == chain or route[0].endswith(("full", "from-initial")), what)
        tally.right(live, history.at(want), what)
        tally.count("late joiners")
    _wrong_bases(store, history, chance, tally)
    for number in range(seed, seed + gaps):
        _gaps(folder / f"gaps-{number}", number, tally)
    _replaced(folder / "replaced", history, tally)


def _wrong_bases(store: Path, history: History, chance: random.Random, tally: Tally) -> None:
    """One value of the live weights is altered, or they are another version's; and a step back."""
    for name, tensor in history.at(0).items():
        for have in (INITIAL, 7, 11):
            live, kind = history.live(have), {2: torch.int16, 4: torch.int32}
            at = chance.randrange(tensor.numel())
            live[name].view(-1).view(kind[tensor.element_size()])[at] ^= 1
            route, live = load(str(store), history, have, 12, live)
            what = f"value {at} of {name} was not version {have}'s: by {route}"
            tally.right(live, history.at(12), what)
            tally.count("wrong bases")
    for said, true in ((7, 6), (11, 12), (3, INITIAL)):
        route, live = load(str(store), history, said, 12, history.live(true))
        tally.right(live, history.at(12), f"version {true} was said to be {said}: by {route}")
        tally.count("wrong bases")
    for have, want in ((40, 3), (1, 0), (30, 30)):
        route, live = load(str(store), history, have, want)
        tally.right(live, history.at(want), f"from {have} back to {want}: by {route}")
        tally.count("steps back")


def _gaps(store: Path, seed: int, tally: Tally) -> None:
    """Some edges are gone, some lack a file: the reader succeeds if and only if there is a way."""
    history, chance, versions = History(seed), random.Random(seed), 12
    world(store, history, versions, full_every=4)
    edges = committed(store)
    share = chance.uniform(0.2, 0.95)
    for step in chance.sample(sorted(edges, key=str), round(len(edges) * share)):
        folder = store / edge_name(*step)
        gone = chance.choice([None, folder / MANIFEST, folder / "rank-00001.h5"])
        shutil.rmtree(folder) if gone is None else gone.unlink()
        edges.remove(step)
    for _ in range(6):
        want, have = chance.randrange(versions), chance.choice([None, INITIAL, *range(versions)])
        starts = [version for version, base in edges if base is FULL] + [have] * (have is not None)
        there = want in _reached(edges, starts)
        names = sorted(edge_name(*step) for step in edges)
        text = f"seed {seed}: from {have} to {want} with {names}"
        try:
            route, live = load(str(store), history, have, want)
        except TransferError as error:
            tally.require(not there, f"{text}: there is a way: {error}")
            needed = [f"version {want}", *(edge_name(*s) for s in edges if s[0] == want)]
            told = all(each in str(error) for each in needed)
            tally.require(told, f"{text}: doesn't say what is there: {error}")
            tally.count("gaps named")
        else:
            tally.right(live, history.at(want), f"{text}: by {route}")
            tally.require(there, f"{text}: reached by {route}, which should not be")
            tally.count("gaps passed")
    shutil.rmtree(store)


def _reached(edges: set[Step], starts: list[int]) -> set[int]:
    """The versions to which edges lead from these."""
    found = set(starts)
    while more := {version for version, base in edges if base in found} - found:
        found |= more
    return found


def _replaced(store: Path, history: History, tally: Tally) -> None:
    """Another attempt makes the store anew while a reader has it open."""
    world(store, history, 3)
    live = history.live(INITIAL)
    receiver = Receiver(str(store), None, None, whole, Live(live))
    receiver.stage(INITIAL, 1, 1, WHOLE, TIMEOUT_S).flip()
    world(store, History(10**6), 3)
    try:
        receiver.stage(1, 2, 1, WHOLE, TIMEOUT_S).flip()
        tally.violation(f"{store}: a version of another attempt was taken for this one's")
    except TransferError as error:
        tally.require("lineage" in str(error), f"{store}: names no lineage: {error}")
    tally.require(same(live, history.at(1)), f"{store}: the weights were touched")
    receiver.close()
    tally.count("stores replaced")
