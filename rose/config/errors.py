"""Rewrite msgspec's errors about a configuration for its user: as key, value and what would be
right. This works on any tree of msgspec structs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import Any, get_args, get_origin

import msgspec

from rose import extensions

Struct = type[msgspec.Struct]


class ConfigError(ValueError):
    """A wrong configuration. The launcher prints it and exits with code 2."""


def keys(root: Struct, prefix: str = "") -> list[str]:
    """List every dotted key of a tree, sections included."""
    found = []
    for field in msgspec.structs.fields(root):
        found.append(prefix + field.name)
        if (nested := _section(field.type)) is not None:
            found += keys(nested, f"{prefix}{field.name}.")
    return found


def check_known(given: dict[str, Any], known: Collection[str], where: str, whose: str) -> None:
    """Raise `ConfigError` for the first of the `given` arguments that is not `known`. `where`: the
    section's dotted key. `whose`: name of the policy, recipe or other object that takes them."""
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{where}.{key}={value!r}: {whose} has no such argument; it has "
                f"{', '.join(known) or 'none'}"
            )


def similar(word: str, known: list[str]) -> list[str]:
    """Return up to three `known` keys that the user may have meant by `word`. Keys with the same
    last part are preferred, such as trainer.optimizer.lr for trainer.lr. If there are none or more
    than three, return keys of similar spelling."""
    alike = [key for key in known if key.rpartition(".")[2] == word.rpartition(".")[2]]
    if 0 < len(alike) <= 3:
        return alike
    return difflib.get_close_matches(word, known, n=3, cutoff=0.75)


def value_at(tree: Any, dotted: str) -> Any:
    """Return the value of a dotted key, such as `trainer.optimizer.betas.0`; None if missing."""
    for part in re.findall(r"[^.\[\]]+", dotted):
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def explain(message: str, tree: dict[str, Any], root: Struct) -> str:
    """Rewrite msgspec's message about converting `tree` to `root` as key, value and what would be
    right. An example of `message`: 'Expected `int`, got `str` - at `$.trainer.steps`'."""
    in_dictionary = message.endswith("[...]`")
    message = _entry_named(message, tree, root)
    found = re.search(r" - at `(?:key` in `)?\$\.?([^`]*)`$", message)
    text = message[: found.start()] if found else message
    key = found.group(1) if found else ""
    if " - at `key` in " in message:
        return f"{key}={value_at(tree, key)!r}: its names must be text; put them in quotes"
    unknown = re.search(r"unknown field `([^`]*)`", text)
    missing = re.search(r"required field `([^`]*)`", text)
    if unknown:
        full = ".".join(filter(None, [key, unknown.group(1)]))
        if full in extensions.merged("commands", "KEYS"):
            return f"{full}={value_at(tree, full)!r}: {extensions.of_a_command(full)}"
        near = similar(full, keys(root))
        meant = f"did you mean {' or '.join(near)}?" if near else "see conf/ for the ones there are"
        return f"{full}={value_at(tree, full)!r}: no such key; {meant}"
    if missing:
        return (
            f"{'.'.join(filter(None, [key, missing.group(1)]))}: missing; it has no default in "
            "conf/"
        )
    if text.startswith("Invalid enum value"):
        choices = ", ".join(map(str, get_args(_type(key, root))))
        return f"{key}={value_at(tree, key)!r}: no such choice; one of {choices}"
    if in_dictionary and text.startswith("Expected `str`"):  # such as cluster.env
        return (
            f"{key}={value_at(tree, key)!r}: must be text; put it in quotes: "
            f"'+{key}=\"{value_at(tree, key)}\"'"
        )
    if text.startswith("Expected `str") and isinstance(value_at(tree, key), int | float):
        return (
            f"{key}={value_at(tree, key)!r}: must be text; put it in quotes, without "
            "which YAML reads 0123 as 83, 1e3 as 1000 and no as false"
        )
    null = ", or null" if " >" in text and type(None) in get_args(_type(key, root)) else ""
    return f"{key}={value_at(tree, key)!r}: {text[0].lower()}{text[1:]}{null}"


def _entry_named(message: str, tree: dict[str, Any], root: Struct) -> str:
    """Put the name of the first wrong entry into a message about a dictionary, for which msgspec
    writes dots, as in `$.sim.pool[...].gpu`."""
    found = re.search(r" - at `\$\.?([^`]*?)\[\.\.\.\]", message)
    for name, value in value_at(tree, found[1]).items() if found else ():
        try:
            msgspec.convert(value, get_args(_type(found[1], root))[1])
        except msgspec.ValidationError as error:
            text, _, inside = str(error).partition(" - at `$")
            return _entry_named(
                f"{text} - at `$.{found[1]}.{name}{inside.rstrip('`')}`", tree, root
            )
    return message


def _section(kind: Any) -> Struct | None:
    """Return the section's class in a field's type, such as `Slurm | None`; None without one."""
    classes = (each for each in (kind, *get_args(kind)) if isinstance(each, type))
    return next((each for each in classes if issubclass(each, msgspec.Struct)), None)


def _type(dotted: str, root: Struct) -> Any:
    """Return the type of the field `dotted`. For an entry of a list, return the list's type."""
    found: Any = root
    for part in re.sub(r"\[\d+\]", "", dotted).split("."):
        if get_origin(found) is dict:
            found = get_args(found)[1]
        else:
            fields = msgspec.structs.fields(_section(found))
            found = next(field.type for field in fields if field.name == part)
    return found
