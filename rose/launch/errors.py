"""Turn Hydra's and OmegaConf's exceptions into ROSE's form: key, value, remedy, and what the user
probably meant.

Left out: errors in a composed configuration, which rose/config/ reports.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString, Sweep
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rose import config as configuration
from rose import extensions
from rose.config import outside
from rose.config.errors import similar

COMPLAINTS = (HydraException, OmegaConfBaseException)  # exceptions for `explain`
SWEEP = ("-m", "--multirun")  # Hydra's options for a sweep
HOME = re.compile(r"^([\w.+]+=)~(?=/|$)")  # KEY=~ and KEY=~/PATH


def explain(error: Exception, conf: Path, arguments: list[str]) -> str:
    """Return one message for an error that Hydra or OmegaConf raised about `arguments` (the command
    line without its program)."""
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        return f"{error.override}: no value; write {error.override}=VALUE (null for none)"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: can't be read as key=value ({_first_line(error)}); put quotes "
            "around a value with "
            "special characters, for example 'key=\"a b\"' or 'key=[\"a=b\"]'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error, conf)
    if isinstance(error, ConfigCompositionException):
        swept = [override for override in _parsed(arguments) if override.is_sweep_override()]
        if swept and not set(SWEEP) & set(arguments):
            return _sweep_without_option(swept[0].input_line)
        text = str(error)
        if found := re.match("Multiple values for (.+?)\\.", text):
            key = found[1]
            value = value_of(key, arguments)
            return f"+{key}={value}: the configuration has {key} already; write {key}={value}"
        if found := re.match("Could not append to config.*?at '(.+?)'", text):
            key = found[1]
            typed = f"{key}={value_of(key, arguments)}"
            return f"+{typed}: the configuration has {key} already; write {typed}"
        if found := re.match("Could not delete from config\\. '(.+?)' does not exist", text):
            return f"~{found[1]}: no such key{_suggestion(found[1], configuration.keys())}"
        if found := re.match("Could not override '(.+?)'", text):
            return _unknown_key(found[1], text, conf, arguments)
        return " ".join(text.split())
    if "does not support sweep type" in str(error):
        several = [str(o.input_line) for o in _parsed(arguments) if o.is_sweep_override()]
        return f"{' '.join(several)}: a sweep takes values, as a,b,c, or range(1,4) or glob(*)"
    key = getattr(error, "full_key", None)
    return f"{key}: {_first_line(error)}" if key else _first_line(error)


def _unknown_key(key: str, text: str, conf: Path, arguments: list[str]) -> str:
    """Return the error for an override of `key`, which Hydra doesn't know. `text`: its message."""
    typed = f"{key}={value_of(key, arguments)}"
    section = re.split("[./@]", key)[0]
    modes = [f"mode={m}" for m, part in extensions.modes().items() if section == part.SECTION]
    if modes and f"mode={value_of('mode', arguments)}" not in modes:
        return f"{typed}: only runs with {' or '.join(modes)} have the section {section}"
    if absent := extensions.of_a_command(key):
        return f"{typed}: {absent}"
    if (conf / key).is_dir() and value_of(key, arguments).startswith("{"):
        return f"{typed}: it has a key that {key} has not; give each as {key}.KEY=VALUE"
    if (conf / key.partition("@")[0]).is_dir():
        return f"{typed}: {key} is not in the default configuration; add it with +{typed}"
    known = configuration.keys()
    section = key.rpartition(".")[0]
    group = section.replace(".", "/")
    if key in known and "." in section and (conf / group).is_dir():
        options = " or ".join(f"+{group}={p.stem}" for p in sorted((conf / group).glob("*.yaml")))
        return f"{typed}: {section} is null; choose its values first: {options}"
    inside = re.search("full_key: (.+)", text)
    key = inside[1] if inside else key
    section = key.rpartition(".")[0]
    free = section in known and not any(each.startswith(f"{section}.") for each in known)
    if free or modes or section.startswith("env.members"):
        return f"{typed}: no such key; a new one is added with '+{typed}'"
    return f"{typed}: no such key{_suggestion(key, known + _groups(conf))}"


def check_options(arguments: list[str], folders: list[Path]) -> None:
    """Raise `ConfigError` for arguments that Hydra accepts, or refuses without naming them:
    1. another folder in the place of conf/;
    2. a value without a key, or a key that is written as an option;
    3. a number or the like, as in rollout=2, for a group of one of the `folders`."""
    for argument in arguments:
        name, equals, given = argument.partition("=")
        if name in ("--config-path", "-cp"):
            raise configuration.ConfigError(
                f"{argument}: ROSE's own conf/ can't be left out; --config-dir adds a folder"
            )
        if not name:
            raise configuration.ConfigError(f"{argument}: has no key; write KEY=VALUE")
        if equals and name.startswith("-") and "." in name.lstrip("-"):
            raise configuration.ConfigError(f"{argument}: write {name.lstrip('-')}={given}")
    for override in _parsed(arguments):
        group = override.key_or_group
        if override.is_delete() or not any((folder / group).is_dir() for folder in folders):
            continue
        wrong = [o for o in _options(override) if not isinstance(o, str | QuotedString | Glob)]
        if wrong:
            files = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
            what = "a range" if isinstance(wrong[0], Sweep) else repr(wrong[0])
            raise configuration.ConfigError(
                f"{override.input_line}: {group} takes the name of a file, not {what}; "
                f"there are {', '.join(sorted(files))}"
            )


def _options(override: Override) -> Iterator[Any]:
    """Yield the options that an override chooses for its group. Its value is one option, a list, or
    a sweep over options and lists. A dictionary chooses none, because it sets keys."""
    value = override.value()
    for each in value.list if isinstance(value, ChoiceSweep) else [value]:
        if not isinstance(each, dict):
            yield from each if isinstance(each, list) else [each]


def searched(arguments: list[str]) -> list[str]:
    """Return where Hydra searches for options besides conf/, in Hydra's notation: the places in
    --config-dir DIR and hydra.searchpath=[...]. Raises `ConfigError` for a missing folder, about
    which Hydra only warns."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    given = parser.parse_known_args(arguments)[0].config_dir
    found = [] if given is None else [f"file://{Path(given).resolve()}"]
    for override in _parsed([a for a in arguments if a.startswith("hydra.searchpath=")]):
        value = override.value()
        for place in value if isinstance(value, list) else [value]:
            folder = str(place).removeprefix("file://")
            if str(place).startswith("pkg://"):
                # Hydra imports the package too, and would end if this import exits the process.
                package = str(place).removeprefix("pkg://").replace("/", ".").strip(".")
                outside.imported(package, f"hydra.searchpath=[{place}]")
            elif not Path(folder).is_dir():
                raise configuration.ConfigError(
                    f"{override.input_line}: {folder} is no folder; write file:// and its path "
                    "from the root, or pkg:// and a package"
                )
            found.append(str(place))
    return found


def options_first(arguments: list[str]) -> list[str]:
    """Return `arguments` with Hydra's options before the overrides, because Hydra rejects overrides
    in more than one place. Exits, as Hydra does, for an unknown option."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    options = list(arguments)
    for override in overrides:
        options.remove(override)
    return options + overrides


def _parsed(arguments: list[str]) -> list[Override]:
    """Return the overrides among `arguments`, without flags."""
    return OverridesParser.create().parse_overrides(
        [
            a
            for a in with_home(arguments)
            if ("=" in a or a.startswith("~")) and not a.startswith("-")
        ]
    )


def with_home(arguments: list[str]) -> list[str]:
    """Return `arguments` with the home folder in place of the ~ of KEY=~/PATH. Hydra can't parse
    the ~, and not every shell replaces it."""
    return [HOME.sub(lambda found: found[1] + os.path.expanduser("~"), a) for a in arguments]


def _sweep_without_option(override: str) -> str:
    """Return the error for an override with several values and no -m."""
    key, _, values = override.partition("=")
    return (
        f"{override}: several values; add -m for a sweep over them, or write '{key}=\"{values}\"' "
        f"for one text and {key}=[{values}] for a list"
    )


def value_of(key: str, arguments: list[str]) -> str:
    """Return the value that the command line gives `key`, as typed; "" if it gives none."""
    values = [
        a.split("=", 1)[1] for a in arguments if "=" in a and a.split("=", 1)[0].lstrip("+~") == key
    ]
    return values[-1] if values else ""


def swept_keys(arguments: list[str]) -> list[str]:
    """Return the keys with several values on the command line (`a=1,2`, `range(...)`), which
    distinguish the points of a sweep."""
    swept = [o for o in _parsed(arguments) if o.is_sweep_override()]
    return [f"{o.key_or_group}@{o.package}" if o.package else o.key_or_group for o in swept]


def _missing_option(error: MissingConfigException, conf: Path) -> str:
    """Return the error for an option that has no file in its group's folder."""
    group, _, option = error.missing_cfg_file.rpartition("/")
    # Hydra lists no options if the missing one was chosen in a list of several.
    options = sorted(
        error.options or [path.stem for path in (conf / group).glob("*.yaml") if group]
    )
    if not options:
        groups = sorted(str(p.relative_to(conf)) for p in conf.rglob("*") if p.is_dir())
        meant = _suggestion(group or option, groups)
        return f"{error.missing_cfg_file}: no such file in {conf}{meant}"
    meant = _suggestion(option, options)
    return f"{group}={option}: no such option{meant}; there are {', '.join(options)}"


def _groups(conf: Path) -> list[str]:
    return sorted({str(p.parent.relative_to(conf)) for p in conf.glob("*/**/*.yaml")})


def _suggestion(word: str, known: list[str]) -> str:
    """Return "; did you mean ...?" with the most similar of `known`, or "" if none is similar."""
    # `word` itself may be a key of the typed configuration that conf/ lacks. Don't suggest it.
    near = similar(word, sorted({*known} - {word}))
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _first_line(error: BaseException) -> str:
    """Return the first line of the error's message. Some of Hydra's have none: return its cause's
    first line then."""
    lines = str(error).strip().splitlines()
    if not lines:
        return _first_line(error.__cause__) if error.__cause__ else type(error).__name__
    return lines[0].rstrip(".")


def to_tree(composed) -> dict:
    """Return the composed configuration as plain containers, interpolations resolved."""
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
