"""The checks of the machine for gpu_check.py: driver, packages, compilers, speeds, memory left.

Raw speeds come first, because all other speeds are read against them: a GPU that is throttled,
shared or cut by MIG shows here.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from rose.parts.doctor import devices
from rose.parts.doctor.devices import FREE_SHARE, GIB
from rose.parts.doctor.finding import run
from scripts.harness import REPOSITORY
from tests.gpu.frame import Report, Setup, check, timed

# Distributions whose versions a figure may depend on.
PACKAGES = "torch triton vllm deepspeed transformers liger-kernel numpy numba mpi4py".split()
LEAST_SHM_GIB = 8.0
LEAST_DISK_GIB = 5.0


class Machine(msgspec.Struct):
    copied_bytes: int  # bytes of the device-to-device copy
    matrix: int  # side of the square matrices that are multiplied
    repeats: int
    shm_gib: float  # GiB that /dev/shm must have free
    disk_gib: float


class Ranks(msgspec.Struct):
    backend: str
    ranks: int | None  # null for all GPUs


class Nothing(msgspec.Struct):
    """The sizes of a check that has none."""


def visible(listed: int) -> int:
    """Return how many of `listed` GPUs a process that is started here sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return listed
    names = [one.strip() for one in given.split(",")]
    return min(listed, sum(name not in ("", "-1") for name in names))


def versions(setup: Setup) -> dict[str, str]:
    """Return the versions of the driver and of `PACKAGES`."""
    found = {"the driver": setup.driver} if setup.driver else {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


# --------------------------------------------------------------------------- machine


@check(
    "driver, packages, compiler, and what the device does raw",
    "rose doctor cluster=gpus says more of packages and driver",
    {
        "cuda": Machine(2**30, 8192, 5, LEAST_SHM_GIB, LEAST_DISK_GIB),
        "cpu": Machine(2**24, 256, 1, 0.1, 0.5),
    },
    150.0,
    least_gpus=0,
    needs_model=False,
)
def machine(report: Report) -> None:
    for name, version in versions(report.setup).items():
        report.figure(f"version of {name}", version)
    _host(report)
    if report.gpus:
        _driver(report)
        _compiler(report)
    _raw(report)


def _host(report: Report) -> None:
    cores, free = len(os.sched_getaffinity(0)), shutil.disk_usage(report.folder).free / GIB
    remedy = "engine, trainer and coordinator need a core each: ask for more (--cpus-per-task)"
    report.figure("cores for this process", cores, least=2, remedy=remedy)
    least, remedy = report.sizes.disk_gib, "--folder another one"
    report.figure("scratch folder free", free, "GiB", least=least, remedy=remedy)
    report.figure("Python", f"{sys.version.split()[0]} {sys.executable}")


def _driver(report: Report) -> None:
    """Check that the doctor, torch and the environment agree about driver and devices."""
    for finding in devices.of_node(max(1, report.setup.gpus), report.sizes.shm_gib):
        report.say(f"{finding.part}: {finding.words}")
        expected = {"equal": "ok"} if finding.state == "failed" else {}
        name = f"doctor: {finding.part}"
        report.figure(name, finding.state, remedy=finding.remedy, **expected)
    import torch

    report.figure("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
    torch.cuda.init()  # raises an error with the driver's message
    seen, remedy = torch.cuda.device_count(), "CUDA_VISIBLE_DEVICES names devices that aren't there"
    report.figure("GPUs that torch sees", seen, equal=report.setup.gpus, remedy=remedy)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        words = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        report.figure(f"GPU {index}", words)
        _free(report, index, "free", "another process holds memory there: nvidia-smi names it")
    done = run(["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"])
    if mode := done.out.partition("\n")[0].strip():
        remedy = "engine and trainer share a device: nvidia-smi -c 0 (as root)"
        report.figure("compute mode", mode, equal="Default", remedy=remedy)


def _free(report: Report, index: int, when: str, remedy: str) -> None:
    """Report the share of a GPU's memory that is free."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    expected = {"least": FREE_SHARE, "source": "of its memory", "remedy": remedy}
    report.figure(f"GPU {index}, {when}", free / total, **expected)


def _compiler(report: Report) -> None:
    """Check for a C compiler and Python's headers. Triton builds a launcher in C at first use;
    without them vLLM does not start."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "none"
    remedy = "Triton needs one: apt-get install gcc, or module load gcc"
    report.figure("C compiler", compiler, remedy=remedy)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    remedy = f"Triton compiles against {headers}: apt-get install python3-dev"
    report.figure("Python.h", headers.is_file(), equal=True, remedy=remedy)
    import torch

    from tests.gpu.kernel import add_one

    values = torch.zeros(1000, device="cuda")
    with report.took("Triton's first kernel"):
        add_one[(1,)](values, values.numel(), BLOCK=1024)
        report.figure("Triton kernel is right", bool((values == 1).all()), equal=True)


def _raw(report: Report) -> None:
    """Time a copy on the device, copies over the bus, and a product of bfloat16 matrices."""
    import torch

    sizes, device = report.sizes, torch.device(report.setup.device)
    rates = report.setup.rates
    source = torch.ones(sizes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = timed(lambda: target.copy_(source), device, sizes.repeats)
    rate, bound = 2 * sizes.copied_bytes / took / 1e9, rates[1] and rates[1] / 1e9
    name = "copy on the device, read and written"
    remedy = "throttled, shared, or a slice of MIG? nvidia-smi -q"
    report.share(name, rate, "GB/s", bound, 0.5, "HBM", remedy)
    host = torch.empty(sizes.copied_bytes // 4, dtype=torch.uint8, pin_memory=report.gpus)
    part = source[: len(host)]
    expected = {"least": 2.0, "source": "PCIe 3.0 x16 has 16"} if report.gpus else {}
    remedy = "weights and versions go over this bus: lspci -vv says its width"
    for name, work in (("to", lambda: host.copy_(part)), ("from", lambda: part.copy_(host))):
        rate = len(host) / timed(work, device, sizes.repeats) / 1e9
        report.figure(f"copy {name} the host, pinned", rate, "GB/s", **expected, remedy=remedy)
    square = {"size": (sizes.matrix, sizes.matrix), "dtype": torch.bfloat16, "device": device}
    a, b = torch.randn(**square), torch.randn(**square)
    took = timed(lambda: a @ b, device, sizes.repeats)
    rate, bound = 2 * sizes.matrix**3 / took / 1e12, rates[0] and rates[0] / 1e12
    name, remedy = "bfloat16 matrix product", "throttled or shared? nvidia-smi -q -d PERFORMANCE"
    report.share(name, rate, "TFLOP/s", bound, 0.3, "dense peak", remedy)
    error = float(((a[:64] @ b).float() - a[:64].float() @ b.float()).abs().max())
    error, source = error / sizes.matrix**0.5, "of a product's standard deviation"
    report.figure("its largest error", error, most=0.1, source=source)


@check(
    "what decides designs: an online step beside other work, pages, weights compared",
    "the card must be free: other work on it counts",
    {"cuda": Nothing(), "cpu": Nothing()},
    150.0,
    on_cpu=False,
    needs_model=False,
)
def micro(report: Report) -> None:
    """Run the kit's micro.py, and report its lines as figures."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_kit" / "micro.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for part, name, value, unit in csv.reader(child.stdout):
            ran = {"least": 1, "remedy": "the log has the error"} if name == "ran" else {}
            report.figure(f"{part}: {name}", float(value), unit, **ran)
    if child.returncode:
        raise RuntimeError(f"micro.py ended with code {child.returncode}")


@check(
    "an all-reduce between all GPUs",
    "NCCL_DEBUG=INFO says more; nvidia-smi topo -m shows the links; NCCL_P2P_DISABLE=1 in "
    "cluster.env goes around a broken one",
    {"cuda": Ranks("nccl", None), "cpu": Ranks("gloo", 2)},
    90.0,
    least_gpus=2,
    needs_model=False,
)
def nccl(report: Report) -> None:
    """Run the doctor's all-reduce, a rank per GPU, which checks the sum. Report its speed."""
    ranks, module = report.sizes.ranks or report.setup.gpus, "rose.parts.doctor.all_reduce"
    done = run([sys.executable, "-m", module, report.sizes.backend, str(ranks)])
    told = [event["gib_per_s"] for event in done.events() if event["what"] == "all-reduce"]
    print(done.out, done.err)
    if done.code or not told:
        raise RuntimeError(done.last)
    name, least = f"all-reduce between {ranks}, bus bandwidth", 1.0 if report.gpus else None
    remedy = "nvidia-smi topo -m shows the links; without NVLink PCIe gives 5 to 20"
    report.figure(name, told[0], "GiB/s", least=least, remedy=remedy)


@check(
    "nothing of these checks is left on the devices",
    "nvidia-smi names the process that holds memory",
    {"cuda": Nothing(), "cpu": Nothing()},
    60.0,
    on_cpu=False,
    needs_model=False,
)
def left(report: Report) -> None:
    """Check that the checks of this call hold no memory on the devices. Processes that a check
    leaves behind are ended by gpu_check.py."""
    import torch

    if not report.gpus:
        pytest.skip("no GPU to look at")
    for index in range(torch.cuda.device_count()):
        remedy = "nvidia-smi says which process holds it; if none does, the driver needs a reset"
        _free(report, index, "free at the end", remedy)


ALL_NEED = ("machine",)
