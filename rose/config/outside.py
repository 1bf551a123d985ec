"""Find the user's classes that a key names: by the entry point of an installed package, or as
package.module:Class.

ROSE's own names come first, so installing a package never changes what a configuration means. The
launcher and every rank search in the same way. They find a package that is installed in the run's
Python, or whose folder is in PYTHONPATH, which ranks inherit. Standard library only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rose.config.errors import ConfigError


@functools.cache  # called for each trajectory; installed packages don't change
def find(
    key: str, name: str, what: str, ours: tuple[str, ...], group: str, prefix: str = ""
) -> type:
    """Return the user's class that `key`=`name` means; `ours` are ROSE's own names, for errors.
    Search the entry points of `group` whose names begin with `prefix`. Raises `ConfigError`, which
    lists the known names."""
    where = f"{key}={name!r}"
    found = [p for p in entry_points(group=group) if p.name.startswith(prefix)]
    mine = [point for point in found if point.name == prefix + name]
    if len({point.value for point in mine}) > 1:
        raise ConfigError(
            f"{where}: two packages have an entry point of this name in {group}: "
            f"{', '.join(sorted(map(_origin, mine)))}; uninstall one, or write one of {what}s as "
            "package.module:Class"
        )
    value = mine[0].value if mine else name
    module, colon, path = value.partition(":")
    if not mine and not (colon and path and module.replace(".", "").isidentifier()):
        others = ", ".join(f"{p.name.removeprefix(prefix)} of {_origin(p)}" for p in found)
        raise ConfigError(
            f"{where}: no such {what}; there are {', '.join(ours)}; installed packages' "
            f"(entry points {group}{f', {prefix}NAME' if prefix else ''}): {others or 'none'}; "
            "another one is written package.module:Class"
        )
    by = f" (entry point of {_origin(mine[0])})" if mine else ""
    return _class_at(imported(module, f"{where}{by}"), path, where)


def parameters(cls: type) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a user's class by name; None if Python can't find them out, as for
    classes of C extensions."""
    try:
        return dict(inspect.signature(cls).parameters)
    except (TypeError, ValueError):
        return None


def lacking(made: Any, protocol: type) -> list[str]:
    """List the methods and attributes of a Protocol that an object doesn't have."""
    wanted = [*protocol.__annotations__, *(n for n in vars(protocol) if not n.startswith("_"))]
    return [name for name in dict.fromkeys(wanted) if not hasattr(made, name)]


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'an unknown package'} ({point.value})"


def exited(error: SystemExit) -> str:
    """Return the end of an error message about a user's file that exits when it is imported."""
    return (
        f"ended the process (SystemExit {error.code!r}); put what runs as a program below "
        "`if __name__ == '__main__'`"
    )


def imported(module: str, where: str) -> Any:
    """Import a user's module, which `where` (KEY=VALUE) names. Raises `ConfigError`."""
    try:
        return importlib.import_module(module)
    except SystemExit as error:
        raise ConfigError(f"{where}: importing {module} {exited(error)}") from error
    except Exception as error:  # any type, from a user's module
        message = f"{where}: importing {module} failed: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and module.startswith(error.name or "."):
            folders = ", ".join(folder or "the current folder" for folder in sys.path)
            message += (
                f"; install its package into {sys.executable}, or put its folder into PYTHONPATH; "
                f"looked in {folders}"
            )
        raise ConfigError(message) from error


def _class_at(module: Any, path: str, where: str) -> type:
    """Return the class at the dotted `path` in a user's module. Raises `ConfigError`."""
    found = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        classes = [n for n, v in vars(module).items() if isinstance(v, type)]
        raise ConfigError(
            f"{where}: {getattr(module, '__file__', module.__name__)} has no class {path}; it has "
            f"{', '.join(classes) or 'none'}"
        )
    return found
