"""Check the GPUs of a node: driver and CUDA, memory, links, /dev/shm; each with the remedy.

    python -m rose.parts.doctor.devices WANTED SHM_GIB        on a node of a Slurm job; emits its findings as events

`nvidia-smi` reports the driver; a separate process reports whether torch can use it. Left out: correct
results and speed (scripts/gpu_check.py), and NCCL (all_reduce.py).
"""  # noqa: E501

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.config import Config, ConfigError
from rose.launch import gpus
from rose.parts.doctor.finding import IMPORT_S, Ended, Finding, emit, run

FIELDS = "index,name,driver_version,memory.total,memory.free,compute_cap,mig.mode.current"
# CUDA's version -> the oldest Linux driver, by CUDA's notes on "minor version compatibility".
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
OLDEST_GPU = (8, 0)  # bfloat16, which all GPU presets train in, needs Ampere
# Share of a GPU's memory that must be free. With less, another process is on it, and vLLM refuses.
FREE_SHARE = 0.95
SHM = Path("/dev/shm")
# GiB for NCCL and vLLM's worker queues. With a container's default of 64 MiB both fail.
LEAST_SHM_GIB = 1.0
GIB = 2**30

PART = "GPUs here"
INSTALL = "make gpu, or pip install --no-deps -r requirements/gpu.txt into its own environment"


@dataclass(frozen=True)
class Gpu:
    """A line of `nvidia-smi --query-gpu`. Memory is in MiB; `capability` (9, 0) is sm_90."""

    index: int
    name: str
    driver: str
    total_mib: int
    free_mib: int
    capability: tuple[int, int]
    sliced: bool  # True if cut into MIG slices


def parse(text: str) -> list[Gpu]:
    """Return the GPUs in the lines of `nvidia-smi --query-gpu=FIELDS
    --format=csv,noheader,nounits`; skip other lines."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS.split(",")) or not cells[0].isdigit():
            continue
        index, name, driver, total, free, capability, mig = cells
        sm = tuple(map(int, re.findall(r"\d+", capability)[:2])) or (0, 0)
        memory = _number(total), _number(free)
        found.append(Gpu(int(index), name, driver, *memory, sm, mig == "Enabled"))
    return found


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0  # "[N/A]" for a GPU in MIG mode


def links(matrix: str) -> dict[tuple[int, int], str]:
    """Return the matrix of `nvidia-smi topo -m` as (GPU, GPU) -> NV18, PIX, SYS ..., each pair
    once."""
    found = {}
    for line in matrix.splitlines():
        cells = re.sub(r"\x1b\[[\d;]*m", "", line).split()
        if cells and (row := re.fullmatch(r"GPU(\d+)", cells[0])) and "X" in cells:
            for column, cell in enumerate(cells[1 : cells.index("X")]):
                found[(column, int(row[1]))] = cell
    return found


def examine(c: Config) -> list[Finding]:
    """Return the findings about this machine, compared with what the run needs here."""
    local = c.cluster.kind == "local"
    return of_node(c.cluster.gpus if local else 0, shm_gib(c) if local else 0.0)


def shm_gib(c: Config) -> float:
    """Return the GiB of /dev/shm that the mirror of a machine's rollout ranks may take."""
    return c.transfer.mirror_gib if c.cluster.gpus and c.rollout.replay is None else 0.0


def of_node(wanted: int, shm: float) -> list[Finding]:
    """Return the findings about this node. `wanted`: GPUs that the run will have here; `shm`: GiB
    that it may take of /dev/shm."""
    smi = shutil.which("nvidia-smi")
    asked = run([smi, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]) if smi else None
    listed = parse(asked.out) if asked else []
    room = shared_memory(shm, "failed" if wanted or listed else "warning")
    if not listed:
        if not wanted and not (asked and asked.code):
            return [Finding("ok", PART, "none, and none needed on this machine"), room]
        fails = asked and (asked.code or asked.err)
        words = f"none of {wanted}: " if wanted else "none: "
        words += f"nvidia-smi: {asked.last}" if fails else "no NVIDIA driver"
        remedy = (
            "nvidia-smi must list them (a container needs --nv or its like; a reboot mends a "
            "driver that was just updated), or use cluster=local"
        )
        return [Finding("failed" if wanted else "warning", PART, words, remedy), room]
    seen = run([sys.executable, "-m", "rose.parts.doctor.devices", "torch"], deadline_s=IMPORT_S)
    found = [here(listed, wanted), *named(wanted), cuda(listed, seen), room, *old(listed)]
    if len(listed) > 1:
        found.append(between(links(run([smi, "topo", "-m"]).out), seen))
    return found


def here(listed: Sequence[Gpu], wanted: int) -> Finding:
    """Return the finding about the GPUs' number and free memory."""
    counts = Counter(gpu.name for gpu in listed)
    kinds = ", ".join(f"{count} x {name}" for name, count in counts.items())
    least = min(listed, key=lambda gpu: gpu.free_mib)
    words = (
        f"{kinds}, sm_{''.join(map(str, least.capability))}, {least.free_mib / 1024:.1f} of "
        f"{least.total_mib / 1024:.1f} GiB free"
        + (f" on GPU {least.index}" if len(listed) > 1 else "")
    )
    sliced = [gpu.index for gpu in listed if gpu.sliced]
    if len(listed) < wanted and not sliced:
        remedy = "lower cluster.gpus, trainer.ranks and rollout.workers, or take a larger machine"
        return Finding("failed", PART, f"{words}; the run wants {wanted}", remedy)
    if sliced:
        words += f"; GPU {sliced[0]} is cut into MIG slices"
        remedy = (
            "NCCL connects no slices: one trainer rank and engines with rollout.tensor_parallel=1 "
            "only; nvidia-smi -mig 0 undoes it"
        )
        return Finding("warning", PART, words, remedy)
    if least.free_mib < FREE_SHARE * least.total_mib:
        remedy = (
            "another process is on it (nvidia-smi names it); end it, or lower "
            "rollout.gpu_memory_utilization and name the other GPUs in CUDA_VISIBLE_DEVICES"
        )
        return Finding("warning", PART, words, remedy)
    return Finding("ok", PART, f"{words}; python scripts/gpu_check.py tries them")


def named(wanted: int) -> list[Finding]:
    """Return a failure if CUDA_VISIBLE_DEVICES leaves fewer GPUs than the run needs; []
    otherwise."""
    variable = os.environ.get(gpus.VARIABLE)
    try:
        names = gpus.given(gpus.installed(), variable)
    except ConfigError:
        return []  # an unknown name, which rose/parts/doctor/machine.py reports
    if variable is None or len(names) >= wanted:
        return []
    words = f"names {len(names)} GPUs; the run wants {wanted}"
    remedy = "name more or unset it, or lower cluster.gpus with trainer.ranks and rollout.workers"
    return [Finding("failed", f"{gpus.VARIABLE}={variable}", words, remedy)]


def cuda(listed: Sequence[Gpu], seen: Ended) -> Finding:
    """Compare the driver with the CUDA that torch was built for, and report whether torch
    computes."""
    part, driver = "driver and CUDA", listed[0].driver
    view = next((event for event in seen.events() if event["what"] == "torch"), None)
    if view is None:
        words = f"driver {driver}; torch does not import: {seen.last}"
        return Finding("failed", part, words, INSTALL)
    if view["cuda"] is None:
        words = f"driver {driver}; torch {view['version']} is not built for CUDA"
        return Finding("failed", part, words, INSTALL)
    words = f"driver {driver}, torch {view['version']} built for CUDA {view['cuda']}"
    oldest = OLDEST_DRIVER.get(int(view["cuda"].split(".")[0]))
    too_old = oldest is not None and int(driver.split(".")[0]) < oldest
    if not view["error"]:
        words += f"; torch computes on {view['count']}"
        if too_old:
            words += " (by a compatibility package: LD_LIBRARY_PATH must have it on every rank)"
        return Finding("ok", part, words)
    remedy = (
        "CUDA_VISIBLE_DEVICES may be empty; else `dmesg` may show an Xid error, and for an "
        "NVSwitch box nvidia-fabricmanager must run in the driver's version"
    )
    if too_old:
        remedy = f"CUDA {view['cuda']} needs driver {oldest} or later: ask the site, or load its "
        remedy += "cuda-compat package"
    return Finding("failed", part, f"{words}; torch: {view['error']}", remedy)


def old(listed: Sequence[Gpu]) -> list[Finding]:
    """Return a warning for each GPU on which the presets can't run."""
    return [
        Finding(
            "warning",
            f"GPU {gpu.index}",
            f"{gpu.name} is sm_{''.join(map(str, gpu.capability))}",
            "bfloat16 needs sm_80 (A100) or newer; leave it out with CUDA_VISIBLE_DEVICES",
        )
        for gpu in listed
        if gpu.capability < OLDEST_GPU
    ]


def between(pairs: dict[tuple[int, int], str], seen: Ended) -> Finding:
    """Return the finding about the links between GPUs, and whether they can read each other's
    memory."""
    part = "links between GPUs"
    view = next((event for event in seen.events() if event["what"] == "torch"), {})
    kinds = ", ".join(f"{kind} ({n} pairs)" for kind, n in Counter(pairs.values()).items())
    blocked = view.get("no_peer", [])
    words = kinds or "nvidia-smi topo -m shows nothing"
    if blocked:
        a, b = blocked[0]
        words += f"; GPUs {a} and {b} can't read each other's memory ({len(blocked)} pairs)"
        remedy = (
            "NCCL goes through host memory there: training and tensor parallel are slower; IOMMU "
            "and PCI ACS settings are the usual cause"
        )
        return Finding("warning", part, words, remedy)
    if kinds and not any(kind.startswith("NV") for kind in pairs.values()):
        remedy = "ZeRO-3 and tensor parallel are bound by PCIe; prefer rollout.tensor_parallel=1"
        return Finding("warning", part, f"{words}: no NVLink", remedy)
    return Finding("ok", part, words)


def shared_memory(wanted_gib: float, too_small: str, folder: Path = SHM) -> Finding:
    """Return the finding about room for NCCL, vLLM's queues, and the mirror of new weights.
    `too_small`: the finding's state if NCCL and the queues have no room."""
    part = str(folder)
    try:
        size = os.statvfs(folder)
    except OSError as error:
        remedy = "mount a tmpfs there: NCCL and vLLM need it"
        return Finding("failed", part, str(error.strerror), remedy)
    total, free = (blocks * size.f_frsize / GIB for blocks in (size.f_blocks, size.f_bavail))
    words = f"{free:.1f} of {total:.1f} GiB free"
    if free < LEAST_SHM_GIB:
        remedy = (
            "NCCL and vLLM need 1 GiB: docker run --ipc=host or --shm-size=16g; Apptainer and "
            "pyxis share the node's; remove what ended processes left there"
        )
        return Finding(too_small, part, words, remedy)
    if free < wanted_gib:
        words += f", and new weights may take {wanted_gib:.0f} (transfer.mirror_gib)"
        remedy = "lower transfer.mirror_gib: ranks read the rest from files; or enlarge /dev/shm"
        return Finding("warning", part, words, remedy)
    return Finding("ok", part, words)


def findings(done: Ended) -> list[Finding]:
    """Return the findings that this program has emitted on another node."""
    found = [
        Finding(e["state"], f"{e['part']} on {e['node']}", e["words"], e["remedy"])
        for e in done.events()
        if e["what"] == "finding"
    ]
    remedy = "srun must start one task with GPUs there"
    return found or [Finding("failed", "GPUs of a node", done.last, remedy)]


def emit_torch() -> None:
    """Emit one event on how torch works with this machine's GPUs: {"what": "torch", "version",
    "cuda": the version that torch was built for or null, "count", "error": "" if torch computes on
    each GPU, "no_peer": pairs that can't read each other's memory}. Call this in a process of its
    own (`python -m rose.parts.doctor.devices torch`), since a broken driver can end the process."""
    import torch

    count, error, no_peer = 0, "", []
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
            count = torch.cuda.device_count()
            for index in range(count):
                torch.ones(2, device=f"cuda:{index}").sum().item()
            pairs = itertools.combinations(range(count), 2)
            no_peer = [p for p in pairs if not torch.cuda.can_device_access_peer(*p)]
        except RuntimeError as found:
            error = str(found).splitlines()[0]
        error = error or ("" if count else "it sees no GPU")
    version, cuda = torch.__version__, torch.version.cuda
    emit("torch", version=version, cuda=cuda, count=count, error=error, no_peer=no_peer)


if __name__ == "__main__":
    if sys.argv[1:] == ["torch"]:
        emit_torch()
        sys.exit()
    for finding in of_node(int(sys.argv[1]), float(sys.argv[2])):
        emit("finding", **finding._asdict())
