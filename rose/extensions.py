"""Find what the parts (the folders of rose/parts) add to the core, which imports none by its name.

A part adds by a module with one of these names:

    modes.py    Modes of `python launch.py` besides training. `MODES`: values of the key `mode`.
                `GROUPS`: overrides that these modes need, as sim=default. `SECTION`: the section of
                conf/ that only these modes read. `main(trees, console, command)`: runs the composed
                trees of a command line and returns the exit code; raises `ConfigError`.
    envs/       Environments, one file each (rose/agent/envs).
    doctor.py   `findings()`: what `rose doctor` reports of this machine for the part.
    policies.py `POLICIES`: scheduling policies by kind, and by name.

Left out: other packages' entry points (rose/config/outside.py).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from types import ModuleType

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


def modes() -> dict[str, ModuleType]:
    """Return the module that runs each mode besides train, by the mode."""
    return {mode: module for module in modules("modes").values() for mode in module.MODES}
