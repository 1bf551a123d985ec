"""Read ZeRO's saved states by parameter and index, for any number of ranks and any stage.

Every rank's file has its share of each group's flat float32 values and of Adam's two moments. Below
stage 3 the file itself says which parameter each range of the share belongs to
(`param_slice_mappings`). At stage 3 every parameter is split evenly, in the order of
`param_shapes`. Files are mapped into memory, so that only the requested values are read. So a run
with another number of ranks can continue, and each of its ranks holds no more than its own share.
DeepSpeed's universal checkpoint isn't used: it first writes all states once more (12 bytes a
parameter), and every rank reads whole parameters.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rose.trainer import adapter
from rose.trainer.shards import ShardReader
from rose.transfer.errors import Corrupted, Missing

PREFIX = "hf."  # beginning of `Policy`'s parameter names, before the name in the model's folder
# ZeRO's stage -> key of the state of torch's optimizer
BASE = {stage: "base_optimizer_state" for stage in (1, 2)} | {3: "optimizer_state_dict"}
WEIGHTS, MOMENTS = "float32", ("exp_avg", "exp_avg_sq")


class Range(NamedTuple):
    """Values `begin` to `end` of a flattened parameter, in `rank`'s group `group` from `at` on."""

    begin: int
    end: int
    rank: int
    group: int
    at: int


class SavedStates:
    """The states in a folder of DeepSpeed's files, which `ranks` ranks wrote at ZeRO's `stage` 1, 2
    or 3. Raises a `TransferError` that names a damaged or missing file, as `read` does."""

    def __init__(self, folder: Path, ranks: int, stage: int):
        self.folder, self.stage = Path(folder), stage
        self._saved = [_states(optimizer_file(folder, rank)) for rank in range(ranks)]
        self.ranges: dict[str, list[Range]] = defaultdict(list)  # keys: DeepSpeed's names
        self._find_even() if stage == 3 else self._find_mapped()

    def read(self, name: str, what: str, begin: int, out: torch.Tensor) -> None:
        """Fill `out`, (n,), with values of the parameter `name` from index `begin` on. `what` is
        its float32 weights (`WEIGHTS`) or one of Adam's moments (`MOMENTS`)."""
        end, filled = begin + len(out), 0
        for held in self.ranges.get(name, ()):
            low, high = max(begin, held.begin), min(end, held.end)
            if low < high:
                at = held.at + low - held.begin
                values = self._flats(held.rank, what)[held.group][at : at + high - low]
                out[low - begin :][: len(values)].copy_(values)
                filled += len(values)
        if filled != len(out):
            raise Corrupted(f"{self.folder}: has {filled} of {len(out)} values of {name} ({what})")

    def restore(self, optimizer, shards: ShardReader, rank: int) -> None:
        """Set this rank's share of ZeRO's `optimizer`, which `shards` describes, to the saved
        values. The caller must then make all ranks gather the weights."""
        # Moments are read into host memory, as a device may have no room; the optimizer moves them.
        zeros = functools.partial(torch.zeros_like, device="cpu")
        moments = {what: [zeros(flat) for flat in shards.flats] for what in MOMENTS}
        for part in shards.own():
            name = PREFIX + adapter.parameter_name(part.name)
            for what, groups in ((WEIGHTS, shards.flats), *moments.items()):
                values = groups[part.group].detach()[part.at :][: part.end - part.begin]
                self.read(name, what, part.begin, values)
        own = optimizer.state_dict()  # DeepSpeed's, with the float32 values of the new share
        base = own[BASE[own["zero_stage"].value]]
        step = self._base(0)["state"][0]["step"]  # Adam's number of updates
        base["state"] = {
            group: {"step": copy.deepcopy(step), **{what: m[group] for what, m in moments.items()}}
            for group in range(len(shards.flats))
        }
        optimizer.load_state_dict({rank: own}, load_from_fp32_weights=True)

    def _base(self, rank: int) -> dict[str, Any]:
        """Return the saved state of torch's optimizer on rank `rank`."""
        return self._saved[rank][BASE[self.stage]]

    def _flats(self, rank: int, what: str) -> list[torch.Tensor] | dict[int, torch.Tensor]:
        """Return rank `rank`'s flat values of each group; `what` as in `read`."""
        if what == WEIGHTS:
            key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
            return self._saved[rank][key]
        return {group: state[what] for group, state in self._base(rank)["state"].items()}

    def _find_mapped(self) -> None:
        """Find the ranges of stages 1 and 2, which the files list."""
        for rank, saved in enumerate(self._saved):
            for group, mapping in enumerate(saved["param_slice_mappings"]):
                for name, place in mapping.items():
                    before = self.ranges[name]
                    begin = before[-1].end if before else 0
                    end = begin + place.numel
                    before.append(Range(begin, end, rank, group, place.start))

    def _find_even(self) -> None:
        """Find the ranges of stage 3. The last rank's part of a parameter is padded. The groups
        form one sequence of values, so a part may extend over two groups."""
        shapes = mapped(model_file(self.folder, 0, 3))["param_shapes"]
        ranks, at = len(self._saved), 0
        ends: list[int] = []
        for flat in self._saved[0]["fp32_flat_groups"]:
            ends.append(flat.numel() + (ends[-1] if ends else 0))
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            size, part = shape.numel(), -(-shape.numel() // ranks)
            for rank in range(ranks):
                begin, end = min(rank * part, size), min((rank + 1) * part, size)
                self.ranges[name] += _across(ends, Range(begin, end, rank, 0, at))
            at += part


def _across(ends: list[int], whole: Range) -> Iterator[Range]:
    """Cut a range, whose `at` counts over all groups, into ranges within one group."""
    start = 0
    shift = whole.at - whole.begin  # index over all groups - index in the parameter
    for group, end in enumerate(ends):
        low, high = max(whole.begin, start - shift), min(whole.end, end - shift)
        if low < high:
            yield Range(low, high, whole.rank, group, low + shift - start)
        start = end


def model_file(folder: Path, rank: int, stage: int) -> Path:
    """Path of DeepSpeed's file with a rank's model; below stage 3 only the first rank has one."""
    name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
    return Path(folder) / f"{name}_model_states.pt"


def optimizer_file(folder: Path, rank: int) -> Path:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    path = Path(folder) / name
    return path if path.exists() else path.with_name(f"bf16_{name}")


def mapped(path: Path, objects: Sequence[Any] = ()) -> dict[str, Any]:
    """Map a file of DeepSpeed into memory, to read only used values. Raises what `loaded` does."""
    return loaded(path, objects, mmap=True)


def loaded(
    path: Path | str, objects: Sequence[Any] = (), map_location: Any = "cpu", mmap: bool = False
) -> Any:
    """Load any file of a checkpoint. An ordinary pickle can name any Python function, which is then
    called. Here it can name only tensors, plain values and `objects`. Raises `TransferError`."""
    try:
        with torch.serialization.safe_globals([*objects]):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except FileNotFoundError:
        raise Missing(f"{path}: not there") from None
    except MemoryError:
        raise
    except Exception as error:  # any error: a damaged pickle can make torch fail anywhere
        if named := re.search(r"GLOBAL (\S+) was not an allowed", str(error)):
            raise Corrupted(
                f"{path}: refused: it names the Python object {named[1]}, which is in no "
                "checkpoint of ROSE and could run a program; nothing of it was run. If nobody "
                "else has written to that folder, remove the checkpoint's folder to go on from "
                "the one before it"
            ) from None
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Corrupted(f"{path}: unreadable: {words}") from None


def _states(path: Path) -> dict[str, Any]:
    """Read the state of ZeRO's optimizer from a rank's file."""
    return mapped(path, deepspeed_objects())["optimizer_state_dict"]


def deepspeed_objects() -> list[Any]:
    """List the classes of the objects in DeepSpeed's files, for `loaded`."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler  # an import of seconds
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def member(kind: type, name: str) -> ZeroStageEnum:
        """Stand in for getattr, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
        if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
            raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}) is not allowed here")
        return ZeroStageEnum[name]

    return [LossScaler, ZeroStageEnum, fragment_address, (member, "builtins.getattr")]
