"""tests/soak/fuzz_transfer.py's part `kills`: writers and readers that end at any moment, readers
beside a collector. Not a command."""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from fuzz_transfer_world import (
    CUTS,
    TIMEOUT_S,
    WHOLE,
    History,
    Tally,
    Weights,
    committed,
    consistent,
    fork,
    load,
    start,
    world,
)

from rose.transfer import TransferError
from rose.transfer.live import Live
from rose.transfer.publish import Publisher
from rose.transfer.receive import Receiver, whole
from rose.transfer.store import INITIAL
from tests.transfer.worlds import Model, same

# a kill comes that many versions into the work at most, and then within that moment
VERSIONS, MOMENT_S = (12, 0.06)


class Processes:
    """What `Publisher` needs of its peers, for ranks that are processes forked from this one."""

    def __init__(self, world: int):
        self.world, self.rank = world, 0
        self._gate, self._values = fork.Barrier(world), fork.RawArray(ctypes.c_longlong, world)
        self.published = fork.RawValue(ctypes.c_longlong, 0)  # versions, by rank 0

    def barrier(self) -> None:
        self._gate.wait(TIMEOUT_S)

    def sum(self, value: int) -> int:
        self.barrier()
        self._values[self.rank] = value
        self.barrier()
        return sum(self._values)


def write(
    store: Path,
    history: History,
    rank: int,
    peers: Processes,
    full_every: int,
    keep: int,
    pause_s: float,
) -> None:
    """Publish and tidy without end."""
    peers.rank, model = rank, Model(history.at(INITIAL), CUTS, peers.world)
    settings = 1, full_every, keep, TIMEOUT_S
    publisher = Publisher(store, model.plan, peers, partial(model.read, rank=rank), *settings)
    version = 0
    while True:
        model.weights = history.at(version)
        publisher.publish(version)
        publisher.tidy()
        version += 1
        if rank == 0:
            peers.published.value = version
        time.sleep(pause_s)


def writers(
    store: Path, history: History, full_every: int, keep: int, pause_s: float = 0.0
) -> tuple[list, Processes]:
    peers, more = Processes(2), (full_every, keep, pause_s)
    return [start(write, store, history, rank, peers, *more) for rank in range(2)], peers


def end(processes: list, order: random.Random | None = None) -> None:
    """SIGKILL; one some time before the other if there is an `order`."""
    for process in order.sample(processes, len(processes)) if order else processes:
        process.kill()
        if order and order.random() < 0.5:
            time.sleep(order.uniform(0.0, 0.05))
    for process in processes:
        process.join(TIMEOUT_S)


def alive(processes: list) -> bool:
    return all(process.is_alive() for process in processes)


def wait_for(begun: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not begun() and time.monotonic() < deadline:
        time.sleep(0.02)


def killed_writers(folder: Path, seed: int, kills: int, tally: Tally) -> None:
    chance = random.Random(seed)
    for attempt_number in range(kills):
        # each second attempt makes the store of the one before anew, with the same weights:
        # either's may stand there
        store = folder / f"attempt-{attempt_number // 2:03d}"
        run_seed = seed + attempt_number // 2
        full_every, keep = chance.randint(1, 6), chance.randint(1, 3)
        # progress, not time: a slow machine is killed as deep into the work as a fast one
        versions, moment = chance.randint(0, VERSIONS), chance.uniform(0.0, MOMENT_S)
        history = History(run_seed)
        processes, peers = writers(store, history, full_every, keep)
        wait_for(lambda: peers.published.value >= versions or not alive(processes))
        time.sleep(moment)
        lived = alive(processes)
        end(processes, chance)
        what = f"writer {attempt_number} (seed {seed}: history {run_seed}, "
        what += f"full_every {full_every}, keep {keep}) killed "
        what += f"{moment:.3f} s after {versions} versions"
        tally.require(lived, f"{what}: it had failed before")
        consistent(store, history, what, tally)
        tally.count("writers killed")
        if attempt_number % 2:
            shutil.rmtree(store, ignore_errors=True)


class Slow(Live):
    """Takes its time now and then, so that kills and collections come in the midst of it."""

    def __init__(self, parameters: Weights, chance: random.Random, pause_s: float):
        super().__init__(parameters)
        self._chance, self._pause_s = chance, pause_s

    def _pause(self) -> None:
        if self._chance.random() < 0.2:
            time.sleep(self._chance.uniform(0.0, self._pause_s))

    def read(self, place):
        self._pause()
        return super().read(place)

    def write(self, place, values) -> None:
        super().write(place, values)
        self._pause()


def shared(weights: Weights) -> Weights:
    """A copy in memory that outlives the process that writes to it."""
    memory = mmap.mmap(-1, 8 * len(weights) + sum(t.nbytes for t in weights.values()))
    made, at = {}, 0
    for name, tensor in weights.items():
        kind = {"dtype": tensor.dtype, "count": tensor.numel(), "offset": at}
        made[name] = torch.frombuffer(memory, **kind).view(tensor.shape)
        made[name].copy_(tensor)
        at += -(-tensor.nbytes // 8) * 8
    return made


# of a reader's state: within a flip, version in the live weights, versions loaded
FLIPPING, HELD, LOADS = range(3)


def follow(store: Path, live: Weights, state, seed: int, versions: int) -> None:
    """Load versions at random without end, and say in `state` what is held."""
    chance = random.Random(seed)
    receiver = Receiver(str(store), None, None, whole, Slow(live, chance, 0.002))
    while True:
        want = chance.randrange(versions)
        staged = receiver.stage(state[HELD], want, 1, chance.choice([0, 200, WHOLE]), TIMEOUT_S)
        state[FLIPPING] = 1
        staged.flip()
        state[HELD] = want
        state[FLIPPING] = 0
        state[LOADS] += 1


def killed_readers(folder: Path, seed: int, kills: int, tally: Tally) -> None:
    chance, history, versions = random.Random(seed), History(seed), 20
    store = world(folder / "read", history, versions, full_every=6).store
    for kill in range(kills):
        live, state = shared(history.at(INITIAL)), fork.RawArray(ctypes.c_longlong, [0, INITIAL, 0])
        loads, moment = chance.randint(0, VERSIONS), chance.uniform(0.0, MOMENT_S)
        reader_seed = chance.randrange(10**6)
        process = start(follow, store, live, state, reader_seed, versions)
        wait_for(lambda: state[LOADS] >= loads or not alive([process]))
        time.sleep(moment)
        lived = alive([process])
        end([process])
        what = f"reader {kill} (seed {seed}: {reader_seed}) killed {moment:.3f} s, {loads} loads in"
        tally.require(lived, f"{what}: it had failed before")
        if state[FLIPPING]:
            tally.count("readers killed within a flip")
        else:
            tally.right(live, history.at(state[HELD]), f"{what}: not version {state[HELD]}'s")
            tally.count("readers killed while staging")
        tally.counts["versions loaded before"] += state[LOADS]
        want = chance.randrange(versions)
        route, successor = load(str(store), history, INITIAL, want)
        tally.right(successor, history.at(want), f"{what}: its successor's by {route}")


def chase(store: Path, history: History, seed: int, until: float, results) -> None:
    """Load the newest versions, or one somewhat older, while they are being collected."""
    chance, live, have = random.Random(seed), history.live(INITIAL), INITIAL
    receiver = Receiver(str(store), None, None, whole, Slow(live, chance, 0.01))
    while time.monotonic() < until:
        time.sleep(chance.choice([0.0, 0.02, 0.3]))
        there = sorted({version for version, _ in committed(store)})
        if not there:
            continue
        want = chance.choice(there[-3:])
        try:
            staged = receiver.stage(have, want, 1, chance.choice([0, 200, WHOLE]), TIMEOUT_S)
            staged.flip()
        except TransferError as error:
            if "mixture" in str(error):
                have = None
            results.put(("failed", str(error)))
            continue
        have = want
        right = same(live, history.at(want))
        results.put(("right" if right else "wrong", f"version {want} by {staged.route}"))


def collected_meanwhile(folder: Path, seed: int, seconds: float, tally: Tally) -> None:
    """Three readers, and a writer that keeps a single version."""
    store, history = folder / "collected", History(seed)
    processes, _ = writers(store, history, full_every=3, keep=1, pause_s=0.02)
    wait_for(lambda: store.is_dir() and committed(store))
    results, until = fork.SimpleQueue(), time.monotonic() + seconds
    readers = [start(chase, store, history, seed + reader, until, results) for reader in range(3)]
    while not results.empty() or any(reader.is_alive() for reader in readers):
        if results.empty():
            time.sleep(0.01)
            in_time = time.monotonic() < until + 2 * TIMEOUT_S
            tally.require(in_time, f"seed {seed}: a reader does not end")
            if tally.violations:
                break
            continue
        kind, text = results.get()
        if kind == "wrong":
            tally.violation(f"seed {seed}: a reader has WRONG WEIGHTS: {text}")
        elif kind == "failed":
            named = bool(re.search(r"version \d+|v\d{6}/", text))
            tally.require(named, f"seed {seed}: names no version: {text}")
            broke = "mixture" in text  # the reader goes on from nothing
            tally.count("flips broken off" if broke else "loads of collected versions refused")
        elif kind == "right":
            tally.count("loads beside the collector")
    tally.require(alive(processes), f"seed {seed}: a writer failed")
    ended = all(process.exitcode == 0 for process in readers)
    tally.require(ended, f"seed {seed}: a reader failed")
    end([*processes, *readers])
    counts = tally.counts
    most = counts["loads beside the collector"] > counts["loads of collected versions refused"]
    tally.require(most, f"seed {seed}: most loads failed")
    consistent(store, history, f"seed {seed}: after {seconds:g} s beside readers", tally)
