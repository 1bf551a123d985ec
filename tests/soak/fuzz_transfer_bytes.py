"""tests/soak/fuzz_transfer.py's part `bytes`: files with other bytes than were written. Not a
command."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzz_transfer_world import History, Tally, Weights, load, world

from rose.transfer import TransferError
from rose.transfer.source import Folder
from rose.transfer.store import FULL, INITIAL, MANIFEST, PLAN, Manifest, Step, edge_name, unseal
from tests.parts.relay.relays import TOKEN, Running
from tests.transfer.worlds import same

WAYS = 1 / 8  # of the flipped bytes: the other routes are taken too, which takes five times as long


def bytes_part(folder: Path, seed: int, every: int, tally: Tally) -> None:
    """Damage the three edges that end at version 2."""
    history, chance = History(seed), random.Random(seed)
    store = world(folder / "store", history, 3, full_every=2).store
    other = world(
        folder / "other", history, 3, full_every=2
    ).store  # the same weights, another lineage
    for step in ((2, 1), (2, FULL), (2, INITIAL)):
        alone = folder / f"alone-{step[1]}"
        files = sorted((store / edge_name(*step)).iterdir())
        (alone / edge_name(*step)).mkdir(parents=True)
        for file in (store / PLAN, *files):
            os.link(file, alone / file.relative_to(store))  # damage shows in both
        for where in (store, alone):
            tally.require(
                load(str(where), history, step[1], 2)[0] == [edge_name(*step)],
                f"{where}: another route",
            )
        damaged = [store / PLAN, *files] if step == (2, 1) else files
        for file in damaged:
            for at in range(chance.randrange(every), file.stat().st_size, every):
                bit = chance.randrange(8)
                if not any(at in taken for taken in taken_of(file)):
                    with flipped(file, at, 1 << bit):
                        harmless(alone, step, file, history, f"byte {at} flipped", tally)
                    continue
                with flipped(file, at, 1 << bit):
                    detected(
                        store,
                        alone,
                        step,
                        file,
                        history,
                        f"seed {seed}: bit {bit} of byte {at} flipped",
                        tally,
                        chance.random() < WAYS,
                    )
                tally.count("bytes flipped")
            _cut_and_longer(store, alone, step, file, history, chance, every, tally)
        _exchanged(store, alone, step, other, history, tally)
        _relayed(folder, alone, step, files, history, chance, max(1, 8 // every), tally)


def taken_of(file: Path) -> list[range]:
    """Bytes of the file that a reader takes: of a rank's file its table and its payloads."""
    if file.suffix == ".json":
        return [range(file.stat().st_size)]
    manifest = unseal((file.parent / MANIFEST).read_bytes(), Manifest, str(file))
    of = next(found for found in manifest.files if found.file == file.name)
    return [
        range(of.data_offset, of.data_offset + of.data_size),
        range(of.table_offset, of.table_offset + of.table_size),
    ]


def harmless(
    alone: Path, step: Step, file: Path, history: History, what: str, tally: Tally
) -> None:
    """No byte that a reader takes is another one."""
    live = load(str(alone), history, step[1], 2)[1]
    tally.require(same(live, history.at(2)), f"{file}: {what}: WRONG WEIGHTS")
    tally.count("bytes that no reader takes")


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


def detected(
    store: Path,
    alone: Path,
    step: Step,
    file: Path,
    history: History,
    what: str,
    tally: Tally,
    ways: bool = True,
) -> None:
    """`file` of the edge `step` is damaged: `store` has other routes (looked at with `ways`),
    `alone` has none."""
    what = f"{file}: {what}; read from version {step[1]}"
    attempt(
        lambda: load(str(alone), history, step[1], 2),
        None,
        file,
        history,
        what + ", no other route",
        tally,
    )
    if ways:
        attempt(
            lambda: load(str(store), history, step[1], 2),
            None if file.name == PLAN else step,
            file,
            history,
            what,
            tally,
        )


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
        tally.require(same(live, history.at(2)), f"{what}: WRONG WEIGHTS by {route}")
        tally.require(
            avoid is not None and edge_name(*avoid) not in route, f"{what}: not noticed, by {route}"
        )
        tally.count("reached by other routes")


def _cut_and_longer(
    store: Path,
    alone: Path,
    step: Step,
    file: Path,
    history: History,
    chance: random.Random,
    every: int,
    tally: Tally,
) -> None:
    right = file.read_bytes()
    needed = max(taken.stop for taken in taken_of(file))
    for size in range(0, needed, max(1, every, len(right) // 200)):
        with content(file, right[:size]):
            detected(store, alone, step, file, history, f"cut to {size} bytes", tally)
        tally.count("cuts")
    with content(file, right + b"\0"):
        if file.suffix == ".json":
            detected(store, alone, step, file, history, "a byte was appended", tally)
        else:
            harmless(alone, step, file, history, "a byte was appended", tally)


def _exchanged(
    store: Path, alone: Path, step: Step, other: Path, history: History, tally: Tally
) -> None:
    """Whole files that are right elsewhere: of another rank, another edge, another lineage."""
    edge = store / edge_name(*step)
    for file in sorted(edge.iterdir()):
        elsewhere = [
            *sorted(edge.iterdir()),
            other / file.relative_to(store),
            *(path / file.name for path in sorted(store.glob("v*/*"))),
        ]
        taken, right = taken_of(file), file.read_bytes()
        for source in elsewhere:
            data = source.read_bytes()
            if any(data[t.start : t.stop] != right[t.start : t.stop] for t in taken):
                with content(file, data):
                    detected(
                        store, alone, step, file, history, f"has the content of {source}", tally
                    )
                tally.count("files exchanged")
    # the whole edge, consistent in itself
    right = {file: file.read_bytes() for file in edge.iterdir()}
    for file in right:
        file.write_bytes((other / file.relative_to(store)).read_bytes())
    detected(
        store, alone, step, edge / MANIFEST, history, "the whole edge is of another lineage", tally
    )
    for file, data in right.items():
        file.write_bytes(data)


def _relayed(
    folder: Path,
    alone: Path,
    step: Step,
    files: list[Path],
    history: History,
    chance: random.Random,
    samples: int,
    tally: Tally,
) -> None:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    for sample in range(samples):
        file = chance.choice(files)
        at = chance.choice([at for taken in taken_of(file) for at in taken])
        with flipped(file, at, 1):
            relay = Running(Folder(alone), folder / f"cache-{step[1]}-{sample}")
            try:
                attempt(
                    lambda: load(relay.url, history, step[1], 2, token_file=str(token)),
                    None,
                    file,
                    history,
                    f"{file}: bit 0 of byte {at} flipped, through a relay",
                    tally,
                )
            finally:
                relay.stop()
        tally.count("flips behind a relay")
