"""Find what the parts (the folders of rose/parts) add to the core, which imports none by its name.

A part adds by a module with one of these names:

    modes.py    Modes of `python launch.py` besides training. `MODES`: values of the key `mode`.
                `GROUPS`: overrides that these modes need, as sim=default. `SECTION`: the section of
                conf/ that only these modes read. `main(trees, console, command)`: runs the composed
                trees of a command line and returns the exit code; raises `ConfigError`.
    envs/       Environments, one file each (rose/agent/envs).
    commands.py Dictionaries, each optional. `COMMANDS`: commands of `rose`, the module that runs
                each. `JOBS`: kinds of Slurm jobs that help a run (rose/launch/lent.py), the module
                that submits each. `KEYS`: sections of keys that a run has not, the command whose
                command line has each.
    shared_device.py `engine_args(gpus, tensor_parallel)`: vLLM's arguments of a rollout engine that
                shares its device. `register()`: patches vLLM in the processes of such an engine.
    doctor.py   `findings()`: what `rose doctor` reports of this machine for the part.
    views.py    `write(observe, run_dir)`: writes the files that people look at, once an attempt has
                ended. `PAGE`: the name of the one that the run's last lines point to.
    draft_methods.py `METHODS`: values of rollout.draft.method besides vLLM's. `engine_args(draft)`:
                vLLM's arguments of such an engine. `Sender(hub, send)`: sends engines `DraftText`;
                its `observe` gets the coordinator's events, its `group_ended` each ended group.
                `Receiver(engine, died)`: `add` takes the messages at a rank, `run` passes them on.
    scorers.py  `build(name, args)`: the scorer of `reward`. `whole_paths(args)`: its arguments with
                absolute paths.
    reward_rank.py `RewardRank`: a rank of the run with workers that compute scores.
    reward_jobs.py `RewardJobs`: requests Slurm jobs with further workers.
    hybrid_devices.py `HybridDevices`: the coordinator's `Devices` of a run with rollout.hybrid.
    trackers.py `check(observe)`: raises `ConfigError` for a tracker that isn't installed.
                `start(config, run_dir)`: the run's `QueuedTracker`s (rose/observe/metrics.py).
    relay_client.py `Relayed(where, token, timeout_s)`: the `Source` (rose/transfer/source.py) of
                weights at a relay's URL.
    run_report.py `html(run_dir)`: what a run's report shows below its borrowed ranks.
    algorithms.py `ALGORITHMS`: RL algorithms by name.
    policies.py `POLICIES`: scheduling policies by kind, and by name.

Left out: other packages' entry points (rose/config/outside.py).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any

from rose.places import PACKAGE


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of the parts that are there, sorted."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules([str(PACKAGE / "parts")])))


@functools.cache
def modules(name: str) -> dict[str, ModuleType]:
    """Import the module `name` of each part that has it; return them by the parts' names."""
    paths = {part: f"rose.parts.{part}.{name}" for part in names()}
    return {
        part: importlib.import_module(path)
        for part, path in paths.items()
        if importlib.util.find_spec(path) is not None
    }


def only(name: str) -> Any:
    """Import the module `name` of the one part that has it; None without this part."""
    return next(iter(modules(name).values()), None)


def missing(module: str) -> str:
    """Return the text of an error for what needs a module of ROSE, as rose.parts.relay, that isn't
    there."""
    return f"needs {module.replace('.', '/')}, which is missing in this copy of ROSE"


def modes() -> dict[str, ModuleType]:
    """Return the module that runs each mode besides train, by the mode."""
    return {mode: module for module in modules("modes").values() for mode in module.MODES}


def draft_methods() -> dict[str, ModuleType]:
    """Return the module of each method of speculative decoding that a part adds, by the method."""
    return {m: module for module in modules("draft_methods").values() for m in module.METHODS}


def merged(name: str, attribute: str) -> dict[str, Any]:
    """Merge the dictionaries that the parts' modules `name` have as `attribute`."""
    found = (getattr(module, attribute, {}) for module in modules(name).values())
    return {key: value for each in found for key, value in each.items()}


def of_a_command(key: str) -> str:
    """Return which command has `key`, a key that a run has not; "" if none."""
    for section, command in merged("commands", "KEYS").items():
        if f"{key}.".startswith(f"{section}."):
            return f"a key of `rose {command}`, on whose command line it belongs; a run has it not"
    return ""
