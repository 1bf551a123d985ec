"""The check of digests for gpu_check.py: blocks of weights hashed on the device
(rose/transfer/digests.py), beside blocks that are read back and hashed on the host."""

from __future__ import annotations

import time

import msgspec

from scripts.run_weights import threads
from tests.gpu.frame import Report, check

COLUMNS = 4096
# Least share of the memory's bandwidth. It is low because 512 blocks at a time are a quarter of the
# warps that this GPU holds.
SHARE = 0.03


class Sizes(msgspec.Struct):
    gib: float  # GiB of bfloat16 weights
    parts: int  # tensor-parallel degree that cuts one of two tensors into bands of columns


@check(
    "blocks of weights hashed on the device: the host's hashes, GB/s",
    "versions are read back to be hashed, which works everywhere and takes seconds; tell us",
    {"cuda": Sizes(4.0, 4), "cpu": Sizes(0.02, 4)},
)
def digests(report: Report) -> None:
    """Hash whole rows, bands of columns, and runs that begin and end within rows."""
    import torch

    from rose.transfer import digests as found
    from rose.transfer.blocks import Tensor, cut
    from rose.transfer.live import Live
    from rose.transfer.receive import whole
    from rose.transfer.store import FORMAT, Plan

    sizes, device = report.sizes, torch.device(report.setup.device)
    rows = max(8, int(sizes.gib * 2**30) // (2 * 2 * COLUMNS))
    tensors = [Tensor(name, (rows, COLUMNS), "bfloat16") for name in ("rows", "bands")]
    bands = list(range(0, COLUMNS + 1, COLUMNS // sizes.parts))
    half = rows * COLUMNS // 2 + 264
    shards = {t.name: [(0, 0, half), (1, half, t.size)] for t in tensors}
    plan = Plan(FORMAT, "", 2, tensors, cut(tensors, {"bands": ([], bands)}, shards, 2))
    live = Live({t.name: torch.randn(t.shape, device=device).bfloat16() for t in tensors})
    places, host = whole(plan, live), Host(live)
    report.say(f"{len(places)} blocks")
    seconds, hashes = {}, {}
    for name, of in (("host", host), ("device", live), ("device, again", live)):
        began = time.monotonic()
        hashes[name] = found.digests(of, places, threads())
        seconds[name] = time.monotonic() - began
    report.figure("hashed there", found.hashes_on_device(live), equal=bool(report.gpus))
    differ = sum(hashes["host"][b] != h for b, h in hashes["device"].items())
    report.figure("hashes differ", differ, most=0)
    report.figure("the first time", seconds["device"], "s")
    rates, nbytes = report.setup.rates, sum(2 * t.size for t in tensors)
    rate, bound = nbytes / seconds["device, again"] / 1e9, rates[1] and rates[1] / 1e9
    remedy = "transfer.verify_every=8 reads an eighth at each version"
    report.share("hashes", rate, "GB/s", bound, SHARE, "HBM", remedy)
    report.figure("read back and hashed on the host", nbytes / seconds["host"] / 1e9, "GB/s")


class Host:
    """Live parameters whose blocks are all read back to the host."""

    on_gpu = False

    def __init__(self, live) -> None:
        self.view, self.side_stream, self.device = live.view, live.side_stream, live.device
