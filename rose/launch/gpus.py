"""Find which GPUs a process was given, and which of them are a rank's own. Starts nothing but
nvidia-smi; imports no torch.

CUDA_VISIBLE_DEVICES lists a process's GPUs: indices (`4,5`), UUIDs (`GPU-5c89852c-...`, or their
beginnings) or MIG slices (`MIG-c6d4f1ef-...`). Empty means none, absent means all. A plan numbers a
node's GPUs from 0. Its numbers are places in this list, and a rank gets the names at its places.
Left out: whether a GPU works (rose/parts/doctor, scripts/gpu_check.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.config import Config, ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/version")  # exists while NVIDIA's kernel module is loaded
NONE_GIVEN = ("", "-1", "NoDevFiles")  # values by which users and Slurm mean "no GPU"
# Seconds for nvidia-smi. A driver that must initialise its GPUs first takes some seconds per GPU.
COMMAND_DEADLINE_S = 60.0

_GPU = re.compile(r"GPU (\d+): (.*?)(?: \(UUID: (GPU-[^)]+)\))?$")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # Slurm's "2(x3)": 2 tasks on each of 3 nodes
_SLICE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)$")


@dataclass(frozen=True)
class Device:
    """A GPU as `nvidia-smi -L` lists it. `slices`: the names of its MIG slices."""

    index: int
    name: str
    uuid: str
    slices: tuple[str, ...] = ()


def parse(listing: str) -> tuple[Device, ...]:
    """Return the devices in the output of `nvidia-smi -L`, in its order."""
    found: list[Device] = []
    for line in listing.splitlines():
        if gpu := _GPU.match(line):
            found.append(Device(int(gpu[1]), gpu[2], gpu[3] or ""))
        elif found and (cut := _SLICE.match(line)):
            last = found[-1]
            found[-1] = Device(last.index, last.name, last.uuid, (*last.slices, cut[1]))
    return tuple(found)


def installed() -> tuple[Device, ...] | None:
    """Return this machine's GPUs, or only the Slurm step's if it has device cgroups. Return None if
    a driver is loaded but nvidia-smi, which lists them, is missing."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None if DRIVER.exists() else ()
    try:
        done = subprocess.run(
            [smi, "-L"], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"nvidia-smi -L gave no answer within {COMMAND_DEADLINE_S:g} s: the driver hangs; "
            "`dmesg` may show an Xid error, and the node wants a restart"
        ) from None
    return parse(done.stdout)


def given(here: Sequence[Device] | None, variable: str | None) -> tuple[str, ...]:
    """Return the names of this process's GPUs, in CUDA's order. `here`: the result of `installed`;
    `variable`: the value of CUDA_VISIBLE_DEVICES, None if unset.

    Raises `ConfigError` for a name that no GPU of this machine has, and for a name that is listed
    twice, because CUDA then sees no GPU at all.
    """
    if variable is None:
        return tuple(
            name for device in here or () for name in device.slices or (str(device.index),)
        )
    if variable.strip() in NONE_GIVEN:
        return ()
    words = [word.strip() for word in variable.split(",")]
    if here == ():
        return ()
    names = [_name(word, here, variable) for word in words]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"{VARIABLE}={variable}: names {twice} twice; CUDA then sees no GPU at all"
        )
    return tuple(names)


def _name(word: str, here: Sequence[Device] | None, variable: str) -> str:
    """Return the GPU's name for `word`, an element of CUDA_VISIBLE_DEVICES. The beginning of a UUID
    is completed, because vLLM queries NVML, which knows only whole UUIDs."""
    if here is None:
        return word
    if word.isdigit():
        found = [word] if any(device.index == int(word) for device in here) else []
    elif word.startswith("MIG-GPU-"):
        # Older drivers write MIG-GPU-<uuid>/<instance>/<compute instance>.
        found = [word] if any(device.uuid and device.uuid in word for device in here) else []
    else:
        names = [name for device in here for name in (device.uuid, *device.slices)]
        found = [name for name in names if word and name.startswith(word)]
    if len(found) != 1:
        what = f"{len(found)} GPUs begin with {word}" if found else f"no GPU is called {word!r}"
        raise ConfigError(
            f"{VARIABLE}={variable}: {what}; nvidia-smi -L lists here {_listed(here)}"
        )
    return found[0]


def _listed(here: Sequence[Device]) -> str:
    return ", ".join(f"{device.index} ({device.uuid or device.name})" for device in here)


def for_launcher(c: Config) -> tuple[str, ...]:
    """Return the names of the GPUs that the launcher of a run on this machine may hand out. Raises
    `ConfigError` if these are fewer than cluster.gpus, or if MIG slices would have to work
    together."""
    if c.cluster.gpus == 0:
        return ()
    here, variable = installed(), os.environ.get(VARIABLE)
    names = given(here, variable)
    if len(names) < c.cluster.gpus:
        raise ConfigError(
            f"cluster.gpus={c.cluster.gpus}: {_how_many(names, here, variable)}; lower it together "
            "with trainer.ranks and rollout.workers, or look at the plan with cluster.dry_run=true"
        )
    together = {
        "trainer.ranks": c.trainer.ranks,
        "rollout.tensor_parallel": c.rollout.tensor_parallel,
    }
    sliced = next((name for name in names[: c.cluster.gpus] if name.startswith("MIG-")), None)
    for key, count in together.items():
        if sliced and count > 1:
            raise ConfigError(
                f"{key}={count}: {sliced} is a MIG slice, and NCCL connects no MIG slices; give "
                f"whole GPUs, or {key}=1"
            )
    return names


def _how_many(names: Sequence[str], here: Sequence[Device] | None, variable: str | None) -> str:
    if here == ():
        return "this machine has 0 (nvidia-smi lists none: no NVIDIA GPU, or no driver)"
    if variable is None:
        return f"this machine has {len(names)}"
    return f"{VARIABLE}={variable} gives this launcher {len(names)}"


def own(places: Sequence[int], names: Sequence[str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a rank with these places in the list of names."""
    return ",".join(names[place] for place in places)


def of_step(places: Sequence[int], variable: str | None, who: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a rank that srun started, with these places on its node.
    `variable`: its value in the rank's step, None if unset. Slurm shows a task all of the step's
    GPUs or, if it has bound the task, only the task's own. `who` names the rank in the error.

    Raises RuntimeError for any other number of GPUs.
    """
    if variable is None:  # at a site that lets users choose GPUs
        return ",".join(map(str, places))
    names = [] if variable.strip() in NONE_GIVEN else variable.split(",")
    if len(names) > max(places):
        return own(places, names)
    if len(names) == len(places):
        return variable
    raise RuntimeError(
        f"{who} is to use GPU {', '.join(map(str, places))} of its node's, and its Slurm step "
        f"shows {len(names)} ({VARIABLE}={variable!r}); cluster.slurm.*.gpus_per_node must be what "
        "the nodes have, and cluster.mpi.srun and SLURM_GPU* variables must not bind tasks to "
        "fewer"
    )


def of_task(count: int, who: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for this Slurm task, which needs `count` GPUs. If it sees other
    tasks' GPUs too, SLURM_LOCALID decides which are its own. Return {} if it sees only its own
    GPUs, or exactly as many as it needs. `environ`: the task's variables at its start.

    Raises `ConfigError` if it sees fewer, or only GPUs of tasks with a lower SLURM_LOCALID.
    """
    variable = environ.get(VARIABLE)
    names = given(installed(), variable)
    at, total = int(environ.get("SLURM_LOCALID", "0")), environ.get("SLURM_GPUS_ON_NODE", "")
    shared = total.isdigit() and len(names) >= int(total) and at > 0
    if len(names) >= count and (
        _all_its_own(len(names), environ) or len(names) == count and not shared
    ):
        return {}
    if len(names) >= (at + 1) * count:
        return {VARIABLE: own(range(at * count, (at + 1) * count), names)}
    seen = ", ".join(names) if names else "none"
    raise ConfigError(
        f"{who} needs {count} GPUs, and this task, number {at} on {os.uname().nodename} "
        "(SLURM_LOCALID), sees "
        f"{len(names)} in all ({seen}; "
        f"{VARIABLE}={variable!r}){', as the tasks before it do' if shared else ''}; "
        f"submit it with --gpus-per-task={count}"
    )


def _all_its_own(count: int, environ: Mapping[str, str]) -> bool:
    """True if no other task sees the `count` GPUs that this process sees, in three cases:
    1. The process is no task of Slurm's.
    2. Slurm has bound it to fewer GPUs than the step has on this node (SLURM_GPUS_ON_NODE).
    3. It is the only task on its node.

    Two variables are no help. In a bound task SLURM_STEP_GPUS has only the task's own GPUs.
    SLURM_GPUS_PER_TASK comes from the batch script.
    """
    if "SLURM_LOCALID" not in environ:
        return True
    total = environ.get("SLURM_GPUS_ON_NODE", "")
    words = (
        _TASKS.fullmatch(word) for word in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")
    )
    # The tasks of each node: "2(x3),1" is 2, 2, 2, 1.
    tasks = [int(word[1]) for word in words if word for _ in range(int(word[2] or 1))]
    node = int(environ.get("SLURM_NODEID", "0"))
    return total.isdigit() and count < int(total) or tasks[node : node + 1] == [1]
