"""Turn Hydra's and OmegaConf's exceptions into ROSE's form: key, value, remedy, and what the user
probably meant.

Left out: errors in a composed configuration, which rose/config/ reports.
"""

from __future__ import annotations

import argparse
import difflib
import re
from bisect import bisect_left
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rose import config as configuration
from rose import extensions

COMPLAINTS = (HydraException, OmegaConfBaseException)
SWEEP = ("-m", "--multirun")


def explain(error: Exception, conf: Path, arguments: list[str]) -> str:
    """Return one message for what Hydra or OmegaConf raised about `arguments` (the command line
    without its program)."""
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        return f"{error.override}: no value; write {error.override}=VALUE (null for none)"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: can't be read as key=value ({_first_line(error)}); put quotes "
            "around a value with "
            "special characters, for example 'key=\"a b\"'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error, conf)
    if isinstance(error, ConfigCompositionException):
        overrides = _parsed(arguments)
        swept = [override for override in overrides if override.is_sweep_override()]
        if swept and not set(SWEEP) & set(arguments):
            return _several_values(swept[0].input_line)
        if (found := _first_refused(overrides, conf, searched(arguments))) is not None:
            return _bad_override(*found, conf)
    key = getattr(error, "full_key", None)
    return f"{key}: {_first_line(error)}" if key else _first_line(error)


def searched(arguments: list[str]) -> list[str]:
    """Return the places besides conf/ where Hydra looks for options, as it writes them: what
    --config-dir DIR and hydra.searchpath=[...] name. Raises `ConfigError` for a folder that is
    missing, of which Hydra only warns."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    given = parser.parse_known_args(arguments)[0].config_dir
    found = [] if given is None else [f"file://{Path(given).resolve()}"]
    for override in _parsed([a for a in arguments if a.startswith("hydra.searchpath=")]):
        value = override.value()
        for place in value if isinstance(value, list) else [value]:
            folder = str(place).removeprefix("file://")
            if not str(place).startswith("pkg://") and not Path(folder).is_dir():
                raise configuration.ConfigError(
                    f"{override.input_line}: {folder} is no folder; write file:// and its path "
                    "from the root, or pkg:// and a package"
                )
            found.append(str(place))
    return found


def options_first(arguments: list[str]) -> list[str]:
    """Return `arguments` with Hydra's options before the overrides, wherever the user wrote them:
    Hydra takes overrides in one place only. Exits, as Hydra does, for an unknown option."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    options = list(arguments)
    for override in overrides:
        options.remove(override)
    return options + overrides


def _parsed(arguments: list[str]) -> list[Override]:
    """Return the overrides among `arguments`, without flags."""
    return OverridesParser.create().parse_overrides(
        [a for a in arguments if ("=" in a or a.startswith("~")) and not a.startswith("-")]
    )


def _first_refused(
    overrides: list[Override], conf: Path, places: list[str]
) -> tuple[str, Override, DictConfig] | None:
    """Return the first override with which `conf` no longer composes, as text and parsed, and the
    configuration without it. A sweep's text is its first point. Hydra's exceptions don't name the
    override, so it is searched for in Hydra's order: first the options of groups, then keys."""
    texts = {}
    base = [f"hydra.searchpath=[{','.join(places)}]"] if places else []
    overrides = [o for o in overrides if o.key_or_group != "hydra.searchpath"]
    for override in sorted(overrides, key=lambda o: not (conf / o.key_or_group).is_dir()):
        if (text := _text(override)) is not None:
            texts[text] = override
    typed = list(texts)
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        good = bisect_left(
            range(1, len(typed) + 1), True, key=lambda n: not _composes(base + typed[:n])
        )
        if good == len(typed):
            return None  # No override is refused: an interpolation may be wrong, for example.
        return typed[good], texts[typed[good]], compose("config", base + typed[:good])


def _composes(overrides: list[str]) -> bool:
    try:
        compose("config", overrides)
    except COMPLAINTS:
        return False
    return True


def _text(override: Override) -> str | None:
    """Return the override as typed, or a sweep's first point; None if the sweep has no point."""
    if not override.is_sweep_override():
        return override.input_line
    first = next(iter(override.sweep_string_iterator()), None)
    return None if first is None else f"{override.input_line.partition('=')[0]}={first}"


def _several_values(override: str) -> str:
    key, _, values = override.partition("=")
    return (
        f"{override}: several values; add -m for a sweep over them, or write '{key}=\"{values}\"' "
        f"for one text and {key}=[{values}] for a list"
    )


def value_of(key: str, arguments: list[str]) -> str:
    """Return what the command line gives for `key`, as typed; '' if nothing."""
    values = [
        a.split("=", 1)[1] for a in arguments if "=" in a and a.split("=", 1)[0].lstrip("+~") == key
    ]
    return values[-1] if values else ""


def swept_keys(arguments: list[str]) -> list[str]:
    """Return the keys with several values on the command line (`a=1,2`, `range(...)`), which
    distinguish the points of a sweep."""
    return [o.key_or_group for o in _parsed(arguments) if o.is_sweep_override()]


def _missing_option(error: MissingConfigException, conf: Path) -> str:
    group, _, option = error.missing_cfg_file.rpartition("/")
    options = sorted(error.options or [])
    # Hydra lists no options if the missing one was chosen in a list of several.
    if group and not options and (conf / group).is_dir():
        options = sorted(path.stem for path in (conf / group).glob("*.yaml"))
    if not group or not options:
        groups = sorted(str(p.relative_to(conf)) for p in conf.rglob("*") if p.is_dir())
        return f"{error.missing_cfg_file}: no such file in {conf}{_meant(group or option, groups)}"
    return (
        f"{group}={option}: no such option{_meant(option, options)}; there are {', '.join(options)}"
    )


def _bad_override(typed: str, override: Override, composed: DictConfig, conf: Path) -> str:
    """Return what is wrong with `override`, which `composed` does not accept."""
    key, value = override.key_or_group, typed.partition("=")[2]
    bare = typed.lstrip("+~")
    if absent := _of_other_modes(key, composed) or extensions.of_a_command(key):
        return f"{bare}: {absent}"
    if (conf / key).is_dir() and not override.is_delete():
        if override.is_add():
            return f"{typed}: the configuration has {key} already; write {bare}"
        target = bare.partition("=")[0]
        return f"{bare}: {target} is not in the default configuration; add it with +{bare}"
    if OmegaConf.select(composed, key) is not None:
        if override.is_delete():
            return f"{typed}: {key} has another value; write ~{key}"
        if override.is_add():
            return f"{typed}: the configuration has {key} already; write {bare}"
    # Hydra merges a dictionary, so the unknown key is inside it.
    if value and isinstance(override.value(), dict):
        return (
            f"{bare}: a dictionary with a key that is not in {conf}; new ones are added with "
            f"'+{bare}'"
        )
    section = key.rpartition(".")[0]
    group = section.replace(".", "/")
    if section and OmegaConf.select(composed, section) is None and (conf / group).is_dir():
        files = sorted((conf / group).glob("*.yaml"))
        options = " or ".join(f"+{group}={path.stem}" for path in files)
        return f"{bare}: {section} is null; choose its values first: {options}"
    beside = _keys_beside(key, composed)
    if beside is None:
        return f"{bare}: no such key{_meant(key, configuration.keys() + _groups(conf))}"
    there = f"{section} has {', '.join(beside)}" if beside else f"{section} is empty"
    new = f"; a new one is added with +{bare}" if value else ""
    return (
        f"{bare}: no such key{_meant(key, [f'{section}.{name}' for name in beside])}; {there}{new}"
    )


def _of_other_modes(key: str, composed: DictConfig) -> str:
    """Return which modes have the section of `key`, if this configuration's mode has it not; "" for
    the keys of a training run."""
    section = re.split("[./@]", key)[0]
    modes = [f"mode={m}" for m, part in extensions.modes().items() if section == part.SECTION]
    if not modes or section in composed:
        return ""
    return f"only runs with {' or '.join(modes)} have the section {section}"


def _keys_beside(key: str, composed: DictConfig) -> list[str] | None:
    """Return the keys that a section of free keys (env.args, cluster.env) has with the chosen
    options; None if `key` is in no such section."""
    section = key.rpartition(".")[0]
    known_keys = configuration.keys()
    if not section or any(known.startswith(f"{section}.") for known in known_keys):
        return None
    found = OmegaConf.select(composed, section)
    return [str(name) for name in found] if isinstance(found, DictConfig) else None


def _groups(conf: Path) -> list[str]:
    return sorted({str(p.parent.relative_to(conf)) for p in conf.glob("*/**/*.yaml")})


def _meant(word: str, known: list[str]) -> str:
    # A key may be known to the typed configuration and still be no key of conf/: don't suggest it.
    near = difflib.get_close_matches(word, sorted({*known} - {word}), n=3, cutoff=0.75)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _first_line(error: BaseException) -> str:
    """Return the first line of the message, or of the cause's: some of Hydra's exceptions are
    empty."""
    lines = str(error).strip().splitlines()
    if not lines:
        return _first_line(error.__cause__) if error.__cause__ else type(error).__name__
    return lines[0].rstrip(".")


def to_tree(composed) -> dict:
    """Return the composed configuration as plain containers, interpolations resolved."""
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
