"""What the processes of bench_sync.py share: encodings in the codec's place, shards that were
saved, memory.

The rivals stand where `rose.transfer.codec` does; store, hashes, relay and flip are the product's
for all.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import xxhash

RANKS = 2
WARM_UP = 3  # steps


# --------------------------------------------------------------------------- encodings


def codec_of(name: str):
    """What `rose.transfer.publish` and `.stage` ask of the codec. A first byte of 0 says that no
    base is needed."""
    from rose.transfer import codec

    if name == "ours":
        return codec
    encode, apply = {"dense": (None, None), "coo": (_coo, _apply_coo), "xor": (_xor, _apply_xor)}[
        name
    ]

    def encoded(new: np.ndarray, old: np.ndarray | None) -> np.ndarray:
        parts = [new] if old is None or encode is None else encode(new, old)
        head = np.array([old is not None and encode is not None, 0, 0, 0], np.uint8)
        return np.concatenate([head, *(part.view(np.uint8) for part in parts)])

    def info(payload) -> SimpleNamespace:
        return SimpleNamespace(needs_base=bool(payload[0]))

    def decode(payload) -> np.ndarray:
        return np.frombuffer(payload, np.uint16, offset=4).copy()

    def applied(payload, values: np.ndarray) -> None:
        if info(payload).needs_base:
            apply(memoryview(payload)[4:], values)
        else:
            values[:] = decode(payload)

    return SimpleNamespace(encode=encoded, decode=decode, info=info, apply=applied)


def _coo(new: np.ndarray, old: np.ndarray) -> list[np.ndarray]:
    at = np.flatnonzero(new != old).astype(np.int32)
    return [at, new[at]]


def _apply_coo(data: memoryview, values: np.ndarray) -> None:
    count = len(data) // 6
    values[np.frombuffer(data, np.int32, count)] = np.frombuffer(data, np.uint16, count, 4 * count)


def _xor(new: np.ndarray, old: np.ndarray) -> list[np.ndarray]:
    import zstandard

    return [np.frombuffer(zstandard.ZstdCompressor(level=1).compress((new ^ old).data), np.uint8)]


def _apply_xor(data: memoryview, values: np.ndarray) -> None:
    import zstandard

    values ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint16)


# --------------------------------------------------------------------------- shards that were saved


class Shards:
    """Patterns of each rank's blocks after each kept step, in the order of the plan, one file
    each."""

    def __init__(self, folder: str | Path):
        from rose.transfer.blocks import size
        from rose.transfer.edge import read_plan
        from rose.transfer.source import Folder

        self.folder = Path(folder)
        self.plan, _ = read_plan(Folder(self.folder))
        ends = [0] * self.plan.world
        self.at: list[tuple[int, int]] = []  # offset in bytes, values
        for block in self.plan.blocks:
            values = size(block, self.plan.tensors[block.tensor].columns)
            self.at.append((ends[block.owner], values))
            ends[block.owner] += 2 * values
        self.nbytes = ends
        self._numbers = {block: number for number, block in enumerate(self.plan.blocks)}

    def file(self, step: int, rank: int) -> Path:
        return self.folder / f"step-{step}.rank-{rank}"

    def read(self, step: int, block) -> np.ndarray:
        """(n,) uint16, read anew: as much memory as a trainer's own copy."""
        offset, count = self.at[self._numbers[block]]
        return np.fromfile(self.file(step, block.owner), np.uint16, count, offset=offset)

    def tensors(self, step: int) -> dict:
        """Whole, name -> bfloat16 tensor."""
        import torch

        from rose.transfer.blocks import rectangles

        made = {
            t.name: np.empty((t.size // t.columns, t.columns), np.uint16) for t in self.plan.tensors
        }
        for block in self.plan.blocks:
            tensor, values, at = self.plan.tensors[block.tensor], self.read(step, block), 0
            for r in rectangles(block, tensor.columns):
                part = made[tensor.name][r.first_row : r.last_row, r.first_column : r.last_column]
                part[:] = values[at : at + r.size].reshape(part.shape)
                at += r.size
        return {
            t.name: torch.from_numpy(made[t.name].view(np.int16))
            .view(torch.bfloat16)
            .reshape(t.shape)
            for t in self.plan.tensors
        }


def digest(tensors: dict) -> str:
    """xxh3-128 over all tensors by name."""
    import torch

    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].detach().contiguous().view(torch.uint8).numpy().data.cast("B"))
    return state.hexdigest()


def release() -> None:
    """Give back to the system what is free: else the next peak would hide in it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """Resident bytes of a process, above those of the moment when this was made."""

    def __init__(self, process: int | str = "self"):
        self._process = Path("/proc", str(process))
        self._base = self._now("VmRSS")

    def reset(self) -> None:
        """The peak is of what comes from here."""
        (self._process / "clear_refs").write_text("5")

    @property
    def peak(self) -> int:
        return self._now("VmHWM") - self._base

    def _now(self, field: str) -> int:
        line = next(
            x for x in (self._process / "status").read_text().splitlines() if x.startswith(field)
        )
        return int(line.split()[1]) * 1024
