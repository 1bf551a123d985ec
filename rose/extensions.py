"""Find what the parts (folders of rose/parts) add to the core. The core imports no part by name.

A part adds features by modules with these names:

    modes.py    Modes of `python launch.py` besides training. `MODES`: values of the key `mode`.
                `GROUPS`: overrides that these modes need, such as sim=default. `SECTION`: the
                section of conf/ that only these modes read. `main(trees, console, command)`: runs
                the configurations of a command line (trees that Hydra composed, several in a
                sweep), returns the exit code, raises `ConfigError`.
    envs/       Environments, one file each (rose/agent/envs).
    commands.py Dictionaries, each optional. `COMMANDS`: command of `rose` -> module that runs it.
                `JOBS`: kind of Slurm jobs that help a run (rose/launch/lent.py) -> module that
                submits them. `KEYS`: section of the configuration that only one command has ->
                that command.
    shared_device.py `engine_args(gpus, rollout)`: vLLM's arguments of a rollout engine that shares
                its device. `register()`: patches vLLM in the processes of such an engine.
    doctor.py   `findings()`: what `rose doctor` reports of this machine for the part.
    views.py    `write(observe, run_dir)`: writes files for people to read, once an attempt has
                ended. `PAGE`: the file whose path a run prints as its report at the end.
    draft_methods.py `METHODS`: values of rollout.draft.method besides vLLM's. `engine_args(draft)`:
                vLLM's arguments of such an engine. `Sender(hub, send)`, in the coordinator: sends
                engines `DraftText`; `observe` gets each event, `group_ended` each ended group.
                `Receiver(engine, died)`, in a rollout rank: `add` takes each `DraftText`, `run`
                passes it on to the engine.
    scorers.py  `build(name, args)`: the scorer of `reward`. `whole_paths(args)`: its arguments with
                absolute paths.
    reward_rank.py `RewardRank`: a rank of the run with workers that compute scores.
    reward_jobs.py `RewardJobs`: requests Slurm jobs with further workers.
    hybrid_devices.py `HybridDevices`: the coordinator's `Devices` of a run with rollout.hybrid.
    trackers.py `check(observe)`: raises `ConfigError` for a tracker that isn't installed.
                `start(config, run_dir)`: the run's `QueuedTracker`s (rose/observe/metrics.py).
    relay_client.py `Relayed(where, token, timeout_s)`: the `Source` (rose/transfer/source.py) of
                weights at a relay's URL.
    run_report.py `html(run_dir)`: HTML for the end of a report's section "Borrowed ranks".
    algorithms.py `ALGORITHMS`: RL algorithms by name.
    policies.py `POLICIES`: kind of policy -> name -> policy.

Entry points of installed packages are found elsewhere (rose/config/outside.py).
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
    """Return the names of this copy's parts, sorted."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules([str(PACKAGE / "parts")])))


@functools.cache
def modules(name: str) -> dict[str, ModuleType]:
    """Import the module `name` of each part that has it. Return part -> module."""
    paths = {part: f"rose.parts.{part}.{name}" for part in names()}
    return {
        part: importlib.import_module(path)
        for part, path in paths.items()
        if importlib.util.find_spec(path) is not None
    }


def only(name: str) -> Any:
    """Import and return the module `name` of the only part that has it; None if no part has it."""
    return next(iter(modules(name).values()), None)


def missing(module: str) -> str:
    """Return an error's text for a feature whose `module`, such as rose.parts.relay, is missing."""
    return f"needs {module.replace('.', '/')}, which is missing in this copy of ROSE"


def modes() -> dict[str, ModuleType]:
    """Map each mode besides train to the module that runs it."""
    return {mode: module for module in modules("modes").values() for mode in module.MODES}


def draft_methods() -> dict[str, ModuleType]:
    """Map each method of speculative decoding that a part adds to its module."""
    return {m: module for module in modules("draft_methods").values() for m in module.METHODS}


def merged(name: str, attribute: str) -> dict[str, Any]:
    """Merge the dictionaries called `attribute` of all parts' modules called `name`."""
    found = (getattr(module, attribute, {}) for module in modules(name).values())
    return {key: value for each in found for key, value in each.items()}


def of_a_command(key: str) -> str:
    """Return an error's text if `key` belongs to a command's line and not to a run; else ""."""
    for section, command in merged("commands", "KEYS").items():
        if f"{key}.".startswith(f"{section}."):
            return f"a key of `rose {command}`, on whose command line it belongs; a run has it not"
    return ""
