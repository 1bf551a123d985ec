"""tests/soak/fuzz_transfer.py's part `bytes`: files with other bytes than were written. Not a
command."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fuzz_transfer_world import History, Tally, Weights, load, world

from rose.transfer import TransferError
from rose.transfer.source import Folder
from rose.transfer.store import FULL, INITIAL, MANIFEST, PLAN, Manifest, Step, edge_name, unseal
from tests.parts.relay.relays import TOKEN, Running

WAYS = 1 / 8  # of the flipped bytes: the other routes are taken too, which takes five times as long


def bytes_part(folder: Path, seed: int, every: int, tally: Tally) -> None:
    """Damage the three edges that end at version 2."""
    history, chance = History(seed), random.Random(seed)
    store = world(folder / "store", history, 3, full_every=2).store
    # The same weights, another lineage.
    other = world(folder / "other", history, 3, full_every=2).store
    for step in ((2, 1), (2, FULL), (2, INITIAL)):
        alone = folder / f"alone-{step[1]}"
        files = sorted((store / edge_name(*step)).iterdir())
        (alone / edge_name(*step)).mkdir(parents=True)
        for file in (store / PLAN, *files):
            os.link(file, alone / file.relative_to(store))  # damage shows in both
        edge = Damaged(store, alone, step, history, tally)
        for where in (store, alone):
            route = load(str(where), history, step[1], 2)[0]
            tally.require(route == [edge_name(*step)], f"{where}: another route")
        for file in [store / PLAN] * (step == (2, 1)) + files:
            for at in range(chance.randrange(every), file.stat().st_size, every):
                bit = chance.randrange(8)
                if not any(at in taken for taken in taken_of(file)):
                    with flipped(file, at, 1 << bit):
                        edge.harmless(file, f"byte {at} flipped")
                    continue
                what = f"seed {seed}: bit {bit} of byte {at} flipped"
                with flipped(file, at, 1 << bit):
                    edge.detected(file, what, chance.random() < WAYS)
                tally.count("bytes flipped")
            edge.cut_and_longer(file, every)
        edge.exchanged(other)
        edge.relayed(folder, files, chance, max(1, 8 // every))


def taken_of(file: Path) -> list[range]:
    """Bytes of the file that a reader takes: of a rank's file its table and its payloads."""
    if file.suffix == ".json":
        return [range(file.stat().st_size)]
    manifest = unseal((file.parent / MANIFEST).read_bytes(), Manifest, str(file))
    of = next(found for found in manifest.files if found.file == file.name)
    parts = (of.data_offset, of.data_size), (of.table_offset, of.table_size)
    return [range(offset, offset + size) for offset, size in parts]


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


def attempt(
    reader: Callable[[], tuple[list[str], Weights]],
    avoid: Step | None,
    file: Path,
    history: History,
    what: str,
    tally: Tally,
) -> None:
    """With `avoid` the reader must get to version 2 by another edge, without it must fail and name
    the file or a block."""
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
        tally.right(live, history.at(2), f"{what}: by {route}")
        noticed = avoid is not None and edge_name(*avoid) not in route
        tally.require(noticed, f"{what}: not noticed, by {route}")
        tally.count("reached by other routes")


@dataclass
class Damaged:
    """An edge whose files are damaged: `store` has other routes, `alone` has none. Both have the
    same files."""

    store: Path
    alone: Path
    step: Step
    history: History
    tally: Tally

    def harmless(self, file: Path, what: str) -> None:
        """No byte that a reader takes is another one."""
        live = load(str(self.alone), self.history, self.step[1], 2)[1]
        self.tally.right(live, self.history.at(2), f"{file}: {what}")
        self.tally.count("bytes that no reader takes")

    def detected(self, file: Path, what: str, ways: bool = True) -> None:
        """`file` is damaged: a reader of `alone` fails, one of `store` (with `ways`) avoids it."""
        what = f"{file}: {what}; read from version {self.step[1]}"
        self._attempt(self.alone, None, file, f"{what}, no other route")
        if ways:
            self._attempt(self.store, None if file.name == PLAN else self.step, file, what)

    def _attempt(
        self, where: Path | str, avoid: Step | None, file: Path, what: str, **more: str
    ) -> None:
        reader = partial(load, str(where), self.history, self.step[1], 2, **more)
        attempt(reader, avoid, file, self.history, what, self.tally)

    def cut_and_longer(self, file: Path, every: int) -> None:
        right = file.read_bytes()
        needed = max(taken.stop for taken in taken_of(file))
        for size in range(0, needed, max(1, every, len(right) // 200)):
            with content(file, right[:size]):
                self.detected(file, f"cut to {size} bytes")
            self.tally.count("cuts")
        wrong = self.detected if file.suffix == ".json" else self.harmless
        with content(file, right + b"\0"):
            wrong(file, "a byte was appended")

    def exchanged(self, other: Path) -> None:
        """Whole files that are right elsewhere: of another rank, another edge, another lineage."""
        edge = self.store / edge_name(*self.step)
        for file in sorted(edge.iterdir()):
            elsewhere = [*sorted(edge.iterdir()), other / file.relative_to(self.store)]
            elsewhere += [path / file.name for path in sorted(self.store.glob("v*/*"))]
            taken, right = taken_of(file), file.read_bytes()
            for source in elsewhere:
                data = source.read_bytes()
                if any(data[t.start : t.stop] != right[t.start : t.stop] for t in taken):
                    with content(file, data):
                        self.detected(file, f"has the content of {source}")
                    self.tally.count("files exchanged")
        # The whole edge, consistent in itself.
        right = {file: file.read_bytes() for file in edge.iterdir()}
        for file in right:
            file.write_bytes((other / file.relative_to(self.store)).read_bytes())
        self.detected(edge / MANIFEST, "the whole edge is of another lineage")
        for file, data in right.items():
            file.write_bytes(data)

    def relayed(self, folder: Path, files: list[Path], chance: random.Random, samples: int) -> None:
        """Some flipped bytes, read through a relay."""
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        for sample in range(samples):
            file = chance.choice(files)
            at = chance.choice([at for taken in taken_of(file) for at in taken])
            what = f"{file}: bit 0 of byte {at} flipped, through a relay"
            with flipped(file, at, 1):
                relay = Running(Folder(self.alone), folder / f"cache-{self.step[1]}-{sample}")
                try:
                    self._attempt(relay.url, None, file, what, token_file=str(token))
                finally:
                    relay.stop()
            self.tally.count("flips behind a relay")
