"""Load a function of the user's: `path/file.py:name` or `package.module:name`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rose import inputs
from rose.config import ConfigError, outside


def load(where: str, key: str) -> Callable[..., Any]:
    """Return the callable that `where`, the value of the key `key`, names.

    Raises `ConfigError` if there is no such file, module or name, its import fails, or it isn't
    callable.
    """
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"{key}={where!r}: must be FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
    module = (
        _of_file(Path(source), where, key)
        if source.endswith(".py")
        else _module(source, where, key)
    )
    try:
        found = getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{key}={where!r}: {source} defines no {name}") from None
    if not callable(found):
        raise ConfigError(f"{key}={where!r}: {name} is a {type(found).__name__}, not a function")
    return found


def check_kind(found: Callable[..., Any], where: str) -> None:
    """Raise `ConfigError` for a class, and for a generator function, whose call computes nothing.
    `where` is the setting, KEY=VALUE, that names `found`."""
    if isinstance(found, type):
        raise ConfigError(
            f"{where}: {found.__name__} is a class; name a function, or an object of the class"
        )
    generators = inspect.isgeneratorfunction, inspect.isasyncgenfunction
    called = getattr(found, "__call__", None)  # noqa: B004  (the method itself is checked)
    if any(test(each) for test in generators for each in (found, called)):
        raise ConfigError(
            f"{where}: it is a generator function (it has `yield`), whose call gives no value; "
            "write `return`"
        )


def check_call(found: Callable[..., Any], where: str, /, *given: Any, **named: Any) -> None:
    """Raise `ConfigError` as `check_kind` does, and for a function that can't be called with these
    arguments. A function of a C extension that shows Python no parameters is accepted."""
    check_kind(found, where)
    try:
        # A decorator may pass its function further arguments, so only the wrapper's count.
        parameters = inspect.signature(found, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        parameters.bind(*given, **named)
    except TypeError as error:
        arguments = ", ".join((*map(str, given), *(f"{key}={named[key]!r}" for key in named)))
        raise ConfigError(
            f"{where}: it takes {parameters!s:.200}, and is called with ({arguments}): {error}"
        ) from None


def result(value: Any) -> Any:
    """Return the result of a user's function that returned `value`: await it if it is awaitable.
    Only this shows whether the function is async, which a decorator or an object may hide. Must be
    called outside of an event loop."""
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _module(name: str, where: str, key: str):
    inputs.verify(where)
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise ConfigError(f"{key}={where!r}: importing {name} {outside.exited(error)}") from error
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{key}={where!r}: importing {name} failed: {error!r}") from error


def _of_file(path: Path, where: str, key: str):
    """Import a file as a module. Its folder is added to sys.path, for its own imports."""
    if not path.is_file():
        raise ConfigError(f"{key}={where!r}: there is no file {path.absolute()}")
    inputs.verify(path)
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"rose_user_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle need it there
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise ConfigError(f"{key}={where!r}: running {path} {outside.exited(error)}") from error
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{key}={where!r}: running {path} failed: {error!r}") from error
    return module
