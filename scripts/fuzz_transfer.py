"""Weight transfer under damage: a reader reaches exactly the right weights, or says what is missing.

    python scripts/fuzz_transfer.py                                  # all parts, some minutes on one core
    python scripts/fuzz_transfer.py --part kills --kills 500 --seed 7
    python scripts/fuzz_transfer.py --part bytes --every 50          # each 50th byte only

bytes   every byte of every file of four edges (full, from-initial, delta, squashed) flipped, one at a time; files cut,
        lengthened, exchanged, of another lineage. With other routes the reader must take one, and with none it must
        fail and name the file or the block. A sample of it through a relay.
kills   writers (two processes) and readers are SIGKILLed at random moments: what is committed is whole and right, live
        weights are the old version or the new one. Then collector and readers at once, for `--seconds`.
routes  late joiners, gaps, a wrong base, an older version, a store replaced by another attempt's.
disk    files may not grow beyond a limit, every limit; as root also a disk of 256 KiB.

The weights of a version follow from the seed and its number (`History`), so nothing has to be remembered across a
kill. Exit code 1, and what is needed to see it again, if something does not hold. Left out: machines that lose power
(files are synced before they are renamed, which no test here can tell).
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from relays import TOKEN, Running  # noqa: E402

from rose.transfer import TransferError, codec  # noqa: E402
from rose.transfer.edge import StoredEdge, read_plan  # noqa: E402
from rose.transfer.publish import Publisher  # noqa: E402
from rose.transfer.receive import Receiver, whole  # noqa: E402
from rose.transfer.route import Step, present, shortest  # noqa: E402
from rose.transfer.source import Folder  # noqa: E402
from rose.transfer.stage import Live, stage  # noqa: E402
from rose.transfer.store import FULL, INITIAL, MANIFEST, PLAN, edge_name  # noqa: E402
from tests.transfer.worlds import Model, World, same  # noqa: E402

PARTS = ("bytes", "kills", "routes", "disk")
CUTS = {"sparse": ([0, 20, 40], []), "columns": ([], [0, 6, 12])}
WHOLE = 1 << 30  # dense bytes: all
WAYS = 1 / 8  # of the flipped bytes: the other routes are taken too, which takes five times as long
TIMEOUT_S = 30.0
WRITER_S, READER_S = 0.8, 0.4  # within which a kill comes; about a dozen versions
Weights = dict[str, torch.Tensor]
fork = multiprocessing.get_context("fork")


# --------------------------------------------------------------------------- what is right


class History:
    """The weights of every version, bit for bit a function of the seed and the version alone. The tensors differ in
    how they change, so that every kind of payload occurs: delta, dense, raw and unchanged, in 2 and 4 bytes."""

    def __init__(self, seed: int):
        chance = np.random.default_rng([seed, 0])
        self._seed = seed
        normal = {name: torch.from_numpy(chance.normal(0, 0.02, shape).astype(np.float32)) for name, shape in
                  (("sparse", (40, 12)), ("columns", (24, 12)), ("dense", (96,)), ("frozen", (30,)), ("norm", (24,)))}
        self._made = [{name: t if name == "norm" else t.bfloat16() for name, t in normal.items()}
                      | {"noise": self._noise(chance)}]

    @staticmethod
    def _noise(chance: np.random.Generator) -> torch.Tensor:
        return torch.from_numpy(chance.integers(-2**31, 2**31, 16).astype(np.int32)).view(torch.float32)

    def at(self, version: int) -> Weights:
        """Not to be written to."""
        while len(self._made) <= version + 1:
            self._made.append(self._next(len(self._made)))
        return self._made[version + 1]

    def live(self, version: int | None) -> Weights:
        """A copy to load another version into; zeros if null."""
        return {name: torch.zeros_like(t) if version is None else t.clone()
                for name, t in self.at(INITIAL if version is None else version).items()}

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


def world(store: Path, history: History, versions: int, full_every: int = 1000, keep: int = 1000) -> World:
    """A store of the versions 0 to `versions` - 1, by two ranks."""
    made = World(store, history.at(INITIAL), CUTS, full_every=full_every, keep=keep, timeout_s=0.5)
    for version in range(versions):
        made.weights = history.at(version)
        made.publish(version)
        made.tidy()
    return made


def load(where: str, history: History, have: int | None, want: int, live: Weights | None = None,
         token_file: str | None = None) -> tuple[list[str], Weights]:
    """The edges by which a reader came to `want`, and the weights that it has then."""
    live = history.live(have) if live is None else live
    receiver = Receiver(where, None, token_file, whole, Live(live), f"fuzz-{os.getpid()}")
    try:
        staged = receiver.stage(have, want, 1, WHOLE, TIMEOUT_S)
        staged.flip()
        staged.check()
    finally:
        receiver.close()
    return staged.route, live


def committed(store: Path) -> set[Step]:
    return {step for step in present(Folder(store)) if (store / edge_name(*step) / MANIFEST).exists()}


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

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in self.counts.items())


# --------------------------------------------------------------------------- bytes


def bytes_part(folder: Path, seed: int, every: int, tally: Tally) -> None:
    """Damage the four edges that end at version 2."""
    history, chance = History(seed), random.Random(seed)
    store = world(folder / "store", history, 3, full_every=2).store
    other = world(folder / "other", history, 3, full_every=2).store  # the same weights, another lineage
    for step in ((2, 1), (2, 0), (2, FULL), (2, INITIAL)):
        alone = folder / f"alone-{step[1]}"
        files = sorted((store / edge_name(*step)).iterdir())
        (alone / edge_name(*step)).mkdir(parents=True)
        for file in (store / PLAN, *files):
            os.link(file, alone / file.relative_to(store))  # damage shows in both
        for where in (store, alone):
            tally.require(load(str(where), history, step[1], 2)[0] == [edge_name(*step)], f"{where}: another route")
        damaged = [store / PLAN, *files] if step == (2, 1) else files
        for file in damaged:
            for at in range(chance.randrange(every), file.stat().st_size, every):
                bit = chance.randrange(8)
                with flipped(file, at, 1 << bit):
                    detected(store, alone, step, file, history, f"seed {seed}: bit {bit} of byte {at} flipped", tally,
                             chance.random() < WAYS)
                tally.count("bytes flipped")
            _cut_and_longer(store, alone, step, file, history, chance, every, tally)
        _exchanged(store, alone, step, other, history, tally)
        _relayed(folder, alone, step, files, history, chance, max(1, 8 // every), tally)


@contextmanager
def flipped(file: Path, at: int, mask: int) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR)
    try:
        right = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([right[0] ^ mask]), at)
        yield
    finally:
        os.pwrite(descriptor, right, at)
        os.close(descriptor)


@contextmanager
def content(file: Path, data: bytes) -> Iterator[None]:
    """The file has this content for a while, in all stores that share it."""
    right = file.read_bytes()
    try:
        file.write_bytes(data)
        yield
    finally:
        file.write_bytes(right)


def detected(store: Path, alone: Path, step: Step, file: Path, history: History, what: str, tally: Tally,
             ways: bool = True) -> None:
    """`file` of the edge `step` is damaged: `store` has other routes (looked at with `ways`), `alone` has none."""
    what = f"{file}: {what}; read from version {step[1]}"
    attempt(lambda: load(str(alone), history, step[1], 2), None, file, history, what + ", no other route", tally)
    if ways:
        attempt(lambda: load(str(store), history, step[1], 2), None if file.name == PLAN else step, file, history, what,
                tally)


def attempt(reader: Callable[[], tuple[list[str], Weights]], avoid: Step | None, file: Path, history: History,
            what: str, tally: Tally) -> None:
    """With `avoid` the reader must get to version 2 by another edge, without it must fail and name the file or a
    block."""
    try:
        route, live = reader()
    except TransferError as error:
        tally.require(avoid is None, f"{what}: no other route was taken: {error}")
        named = file.name in str(error) or re.search(r"block \d+|rank \d", str(error))
        tally.require(bool(named), f"{what}: neither file nor block in: {error}")
        tally.count("refused by name")
    except Exception as error:
        tally.violation(f"{what}: {type(error).__name__}: {error}")
    else:
        tally.require(same(live, history.at(2)), f"{what}: WRONG WEIGHTS by {route}")
        tally.require(avoid is not None and edge_name(*avoid) not in route, f"{what}: not noticed, by {route}")
        tally.count("reached by other routes")


def _cut_and_longer(store: Path, alone: Path, step: Step, file: Path, history: History, chance: random.Random,
                    every: int, tally: Tally) -> None:
    right = file.read_bytes()
    for size in range(0, len(right), max(1, every, len(right) // 200)):
        with content(file, right[:size]):
            detected(store, alone, step, file, history, f"cut to {size} bytes", tally)
        tally.count("cuts")
    with content(file, right + b"\0"):
        if file.suffix == ".json":
            detected(store, alone, step, file, history, "a byte was appended", tally)
        else:  # the manifest says how long the file is; the rest is never read
            tally.require(same(load(str(alone), history, step[1], 2)[1], history.at(2)), f"{file}: a byte appended")


def _exchanged(store: Path, alone: Path, step: Step, other: Path, history: History, tally: Tally) -> None:
    """Whole files that are right elsewhere: of another rank, another edge, another lineage."""
    edge = store / edge_name(*step)
    for file in sorted(edge.iterdir()):
        elsewhere = [*sorted(edge.iterdir()), other / file.relative_to(store),
                     *(path / file.name for path in sorted(store.glob("v*/*")))]
        for source in elsewhere:
            if (data := source.read_bytes()) != file.read_bytes():
                with content(file, data):
                    detected(store, alone, step, file, history, f"has the content of {source}", tally)
                tally.count("files exchanged")
    right = {file: file.read_bytes() for file in edge.iterdir()}  # the whole edge, consistent in itself
    for file in right:
        file.write_bytes((other / file.relative_to(store)).read_bytes())
    detected(store, alone, step, edge / MANIFEST, history, "the whole edge is of another lineage", tally)
    for file, data in right.items():
        file.write_bytes(data)


def _relayed(folder: Path, alone: Path, step: Step, files: list[Path], history: History, chance: random.Random,
             samples: int, tally: Tally) -> None:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    for sample in range(samples):
        file = chance.choice([file for file in files])
        at = chance.randrange(file.stat().st_size)
        with flipped(file, at, 1):
            relay = Running(Folder(alone), folder / f"cache-{step[1]}-{sample}")
            try:
                attempt(lambda: load(relay.url, history, step[1], 2, token_file=str(token)), None, file, history,
                        f"{file}: bit 0 of byte {at} flipped, through a relay", tally)
            finally:
                relay.stop()
        tally.count("flips behind a relay")


# --------------------------------------------------------------------------- kills


class Processes:
    """What `Publisher` needs of its peers, for ranks that are processes forked from this one."""

    def __init__(self, world: int):
        self.world, self.rank = world, 0
        self._gate, self._values = fork.Barrier(world), fork.RawArray(ctypes.c_longlong, world)

    def barrier(self) -> None:
        self._gate.wait(TIMEOUT_S)

    def sum(self, value: int) -> int:
        self.barrier()
        self._values[self.rank] = value
        self.barrier()
        return sum(self._values)


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


def write(store: Path, history: History, rank: int, peers: Processes, full_every: int, keep: int,
          pause_s: float) -> None:
    """Publish and tidy without end."""
    peers.rank, model = rank, Model(history.at(INITIAL), CUTS, peers.world)
    publisher = Publisher(store, model.plan, peers, lambda block: model.read(block, rank), 1, full_every, keep,
                          TIMEOUT_S)
    version = 0
    while True:
        model.weights = history.at(version)
        publisher.publish(version)
        publisher.tidy()
        version += 1
        time.sleep(pause_s)


def writers(store: Path, history: History, full_every: int, keep: int, pause_s: float = 0.0) -> list:
    peers = Processes(2)
    return [start(write, store, history, rank, peers, full_every, keep, pause_s) for rank in range(2)]


def end(processes: list, order: random.Random | None = None) -> None:
    """SIGKILL; one some time before the other if there is an `order`."""
    for process in order.sample(processes, len(processes)) if order else processes:
        process.kill()
        if order and order.random() < 0.5:
            time.sleep(order.uniform(0.0, 0.05))
    for process in processes:
        process.join(TIMEOUT_S)


def wait_for(begun: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not begun() and time.monotonic() < deadline:
        time.sleep(0.02)


def killed_writers(folder: Path, seed: int, kills: int, tally: Tally) -> None:
    chance = random.Random(seed)
    for attempt_number in range(kills):
        # each second attempt makes the store of the one before anew, with the same weights: either's may stand there
        store = folder / f"attempt-{attempt_number // 2:03d}"
        run_seed = seed + attempt_number // 2
        full_every, keep = chance.randint(1, 6), chance.randint(1, 3)
        history, wait = History(run_seed), chance.uniform(0.02, WRITER_S)
        processes = writers(store, history, full_every, keep)
        wait_for(lambda: chance.random() < 0.1 or store.is_dir() and committed(store))
        time.sleep(wait)
        end(processes, chance)
        consistent(store, history, f"writer {attempt_number} (seed {seed}: history {run_seed}, full_every {full_every}, "
                   f"keep {keep}) killed after {wait:.3f} s", tally)
        tally.count("writers killed")
        if attempt_number % 2:
            shutil.rmtree(store, ignore_errors=True)


def consistent(store: Path, history: History, what: str, tally: Tally) -> None:
    """Every committed edge makes of its base's weights exactly its version's, and the newest version is reached."""
    if not (store / PLAN).exists():
        tally.count("killed before the plan was written")
        return
    source = Folder(store)
    plan, digest = read_plan(source)
    edges = committed(store)
    tally.counts["folders left without a manifest"] += len(present(source) - edges)
    for version, base in edges:
        live = history.live(base)
        try:
            staged = stage(Live(live), plan, whole(plan, None), [StoredEdge(source, version, base, plan, digest)],
                           base is not None, 1, WHOLE)
            staged.flip()
        except TransferError as error:
            tally.violation(f"{what}: {error}")
            continue
        tally.require(same(live, history.at(version)), f"{what}: {edge_name(version, base)} makes WRONG WEIGHTS")
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
            tally.require(same(live, history.at(newest)), f"{what}: from {have} WRONG WEIGHTS by {route}")
            tally.count("newest versions reached")


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
        made[name] = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape)
        made[name].copy_(tensor)
        at += -(-tensor.nbytes // 8) * 8
    return made


FLIPPING, HELD, LOADS = range(3)  # of a reader's state: within a flip, version in the live weights, versions loaded


def follow(store: Path, live: Weights, state, seed: int, versions: int) -> None:
    """Load versions at random without end, and say in `state` what is held."""
    chance = random.Random(seed)
    receiver = Receiver(str(store), None, None, whole, Slow(live, chance, 0.002), f"fuzz-{os.getpid()}")
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
        wait, reader_seed = chance.uniform(0.01, READER_S), chance.randrange(10**6)
        process = start(follow, store, live, state, reader_seed, versions)
        wait_for(lambda: chance.random() < 0.1 or state[LOADS])
        time.sleep(wait)
        alive = process.is_alive()
        end([process])
        what = f"reader {kill} (seed {seed}: {reader_seed}) killed after {wait:.3f} s"
        tally.require(alive, f"{what}: it had failed before")
        if state[FLIPPING]:
            tally.count("readers killed within a flip")
        else:
            tally.require(same(live, history.at(state[HELD])), f"{what}: its weights are not version {state[HELD]}'s")
            tally.count("readers killed while staging")
        tally.counts["versions loaded before"] += state[LOADS]
        want = chance.randrange(versions)
        route, successor = load(str(store), history, INITIAL, want)
        tally.require(same(successor, history.at(want)), f"{what}: its successor has WRONG WEIGHTS by {route}")


def chase(store: Path, history: History, seed: int, until: float, results) -> None:
    """Load the newest versions, or one somewhat older, while they are being collected."""
    chance, live, have = random.Random(seed), history.live(INITIAL), INITIAL
    receiver = Receiver(str(store), None, None, whole, Slow(live, chance, 0.01), f"fuzz-{os.getpid()}")
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
    processes = writers(store, history, full_every=3, keep=1, pause_s=0.02)
    wait_for(lambda: store.is_dir() and committed(store))
    results, until = fork.SimpleQueue(), time.monotonic() + seconds
    readers = [start(chase, store, history, seed + reader, until, results) for reader in range(3)]
    while not results.empty() or any(reader.is_alive() for reader in readers):
        if results.empty():
            time.sleep(0.01)
            tally.require(time.monotonic() < until + 2 * TIMEOUT_S, f"seed {seed}: a reader does not end")
            if tally.violations:
                break
            continue
        kind, text = results.get()
        if kind == "wrong":
            tally.violation(f"seed {seed}: a reader has WRONG WEIGHTS: {text}")
        elif kind == "failed":
            tally.require(bool(re.search(r"version \d+|v\d{6}/", text)), f"seed {seed}: names no version: {text}")
            tally.require("mixture" not in text, f"seed {seed}: a flip broke off: {text}")
            tally.count("loads of collected versions refused")
        elif kind == "right":
            tally.count("loads beside the collector")
    tally.require(all(process.is_alive() for process in processes), f"seed {seed}: a writer failed")
    tally.require(all(process.exitcode == 0 for process in readers), f"seed {seed}: a reader failed")
    end([*processes, *readers])
    tally.require(tally.counts["loads beside the collector"] > tally.counts["loads of collected versions refused"],
                  f"seed {seed}: most loads failed")
    consistent(store, history, f"seed {seed}: after {seconds:g} s beside readers", tally)


# --------------------------------------------------------------------------- routes


def routes_part(folder: Path, seed: int, gaps: int, tally: Tally) -> None:
    history, chance, versions = History(seed), random.Random(seed), 48
    store = world(folder / "long", history, versions).store
    for behind in range(1, 41):
        want = chance.randrange(behind, versions)
        have = want - behind
        bound = max(1, 2 * math.floor(math.log2(behind)))
        direct = shortest(list(committed(store)), have, want)
        tally.require(len(direct) <= bound, f"{behind} versions behind {want}: {len(direct)} edges, at most {bound}")
        route, live = load(str(store), history, have, want)
        bound = 1 + 2 * math.floor(math.log2(max(2, want))) if route[0].endswith("full") else bound
        tally.require(len(route) <= bound, f"{behind} versions behind {want}: {route}, at most {bound} edges")
        tally.require(same(live, history.at(want)), f"{behind} versions behind {want}: WRONG WEIGHTS by {route}")
        tally.count("late joiners")
    _wrong_bases(store, history, chance, tally)
    for gap in range(gaps):
        _gaps(folder / f"gaps-{gap}", History(seed + gap), random.Random(seed + gap), f"seed {seed + gap}", tally)
    _replaced(folder / "replaced", history, tally)


def _wrong_bases(store: Path, history: History, chance: random.Random, tally: Tally) -> None:
    """One value of the live weights is altered, or they are another version's; and a step back."""
    for name, tensor in history.at(0).items():
        for have in (INITIAL, 7, 11):
            live = history.live(have)
            at = chance.randrange(tensor.numel())
            patterns = live[name].view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
            patterns[at] ^= 1
            route, live = load(str(store), history, have, 12, live)
            tally.require(same(live, history.at(12)), f"value {at} of {name} was not version {have}'s: WRONG WEIGHTS by "
                          f"{route}")
            tally.count("wrong bases")
    for said, true in ((7, 6), (11, 12), (3, INITIAL)):
        route, live = load(str(store), history, said, 12, history.live(true))
        tally.require(same(live, history.at(12)), f"version {true} was said to be {said}: WRONG WEIGHTS by {route}")
        tally.count("wrong bases")
    for have, want in ((40, 3), (1, 0), (30, 30)):
        route, live = load(str(store), history, have, want)
        tally.require(same(live, history.at(want)), f"from {have} back to {want}: WRONG WEIGHTS by {route}")
        tally.count("steps back")


def _gaps(store: Path, history: History, chance: random.Random, what: str, tally: Tally) -> None:
    """Some edges are gone, some lack a file: the reader succeeds if and only if there is a way."""
    versions = 12
    world(store, history, versions, full_every=4)
    edges = committed(store)
    for step in chance.sample(sorted(edges, key=str), round(len(edges) * chance.uniform(0.2, 0.95))):
        folder = store / edge_name(*step)
        chance.choice([lambda: shutil.rmtree(folder), (folder / MANIFEST).unlink, (folder / "rank-00001.h5").unlink])()
        edges.remove(step)
    for _ in range(6):
        want, have = chance.randrange(versions), chance.choice([None, INITIAL, *range(versions)])
        starts = [version for version, base in edges if base is FULL] + [have] * (have is not None)
        there = any(shortest(list(edges), begin, want) is not None for begin in starts)
        text = f"{what}: from {have} to {want} with {sorted(edge_name(*step) for step in edges)}"
        try:
            route, live = load(str(store), history, have, want)
        except TransferError as error:
            tally.require(not there, f"{text}: there is a way: {error}")
            names = str(error)
            tally.require(f"version {want}" in names and all(edge_name(*s) in names for s in edges if s[0] == want),
                          f"{text}: doesn't say what is there: {error}")
            tally.count("gaps named")
        else:
            tally.require(same(live, history.at(want)), f"{text}: WRONG WEIGHTS by {route}")
            tally.require(there, f"{text}: reached by {route}, which should not be")
            tally.count("gaps passed")
    shutil.rmtree(store)


def _replaced(store: Path, history: History, tally: Tally) -> None:
    """Another attempt makes the store anew while a reader has it open."""
    world(store, history, 3)
    live = history.live(INITIAL)
    receiver = Receiver(str(store), None, None, whole, Live(live), "fuzz")
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


# --------------------------------------------------------------------------- disk


def disk_part(folder: Path, seed: int, every: int, tally: Tally) -> None:
    history = History(seed)
    sizes = {path.stat().st_size for path in world(folder / "sizes", history, 3, full_every=2).store.rglob("*.*")
             if path.is_file()}
    for limit in range(0, max(sizes) + 1, every):
        store = folder / "limited"
        said = _refused(store, history, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        _after_full_disk(said, store, history, f"no file above {limit} bytes", tally)
        shutil.rmtree(store)
    if os.geteuid() == 0:
        _small_disk(folder, history, range(0, 16, max(1, every // 256)), tally)


def _refused(store: Path, history: History, fill: Callable[[], object]) -> str:
    """How version 2 ended in a process of its own, with a store of two versions and then no room: "" if it was
    written."""
    said = fork.SimpleQueue()

    def publish() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # HDF5 tells of each object that it could not flush
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        made = world(store, history, 2, full_every=2)
        fill()
        made.weights = history.at(2)
        try:
            made.publish(2)
            made.tidy()
            said.put("")
        except Exception as error:
            said.put(f"{type(error).__name__}: {error}")

    process = start(publish)
    process.join(2 * TIMEOUT_S)
    return "no answer" if said.empty() else said.get()


def _after_full_disk(said: str, store: Path, history: History, what: str, tally: Tally) -> None:
    tally.require(not said or said.startswith(f"TransferError: {store}/v000002/"), f"{what}: no TransferError that names "
                  f"a file: {said}")
    tally.count("full disks" if said else "disks with room")
    left = [str(path) for path in store.rglob(".*")]
    tally.require(not left, f"{what}: left behind: {left}")
    consistent(store, history, what, tally)
    for version in (0, 1):
        try:
            route, live = load(str(store), history, INITIAL, version)
            tally.require(same(live, history.at(version)), f"{what}: WRONG WEIGHTS by {route}")
        except TransferError as error:
            tally.violation(f"{what}: version {version}: {error}")


def _small_disk(folder: Path, history: History, rooms: range, tally: Tally) -> None:
    """A real file system without room: for more and more of version 2 there is some."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]).returncode:
        print("    no small disk: this user may not mount", file=sys.stderr)
        return
    try:
        for pages in rooms:
            said = _refused(disk / "store", history, lambda: _fill(disk, pages))
            _after_full_disk(said, disk / "store", history, f"{pages} pages of room", tally)
            (disk / "filler").unlink()
            shutil.rmtree(disk / "store")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(disk: Path, pages: int) -> None:
    """But for so many pages of 4 KiB."""
    with (disk / "filler").open("wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail > pages:
            file.write(bytes(4096))


# --------------------------------------------------------------------------- all of it


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--every", type=int, default=1, help="of the bytes, and of the sizes of a full disk (x 16)")
    parser.add_argument("--kills", type=int, default=100, help="of writers, and as many of readers")
    parser.add_argument("--seconds", type=float, default=20.0, help="of readers beside the collector")
    parser.add_argument("--gaps", type=int, default=40, help="stores with gaps")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    torch.set_num_threads(1)
    codec.compile_all()
    failed = False
    for part in options.part or PARTS:
        tally, began = Tally(), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz-transfer-") as name:
            folder = Path(name)
            if part == "bytes":
                bytes_part(folder, options.seed, options.every, tally)
            elif part == "kills":
                killed_writers(folder, options.seed, options.kills, tally)
                killed_readers(folder, options.seed, options.kills, tally)
                collected_meanwhile(folder, options.seed, options.seconds, tally)
            elif part == "routes":
                routes_part(folder, options.seed, options.gaps, tally)
            else:
                disk_part(folder, options.seed, 16 * options.every, tally)
        print(f"{part}: {tally}, {len(tally.violations)} violations, {time.monotonic() - began:.0f} s", flush=True)
        failed |= bool(tally.violations)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
