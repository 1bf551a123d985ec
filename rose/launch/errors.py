"""Hydra's and OmegaConf's complaints in ROSE's form: key, value, remedy, and what was probably
meant.

Left out: what is wrong with a composed configuration; rose/config/ says that.
"""

from __future__ import annotations

import argparse
import difflib
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

COMPLAINTS = (HydraException, OmegaConfBaseException)
SWEEP = ("-m", "--multirun")


def explain(error: Exception, conf: Path, arguments: list[str]) -> str:
    """One message for what Hydra or OmegaConf raised about `arguments` (the command line without
    its program)."""
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
    """Where options are looked for besides conf/, as Hydra writes it: what --config-dir DIR and
    hydra.searchpath=[...] name. Raises `ConfigError` for a folder that isn't there, of which Hydra
    only warns."""
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
    """The overrides among `arguments`; flags are left out."""
    return OverridesParser.create().parse_overrides(
        [a for a in arguments if ("=" in a or a.startswith("~")) and not a.startswith("-")]
    )


def _first_refused(
    overrides: list[Override], conf: Path, places: list[str]
) -> tuple[str, Override, DictConfig] | None:
    """The first override with which `conf` composes no more, as text (of a sweep its first point),
    and the configuration before it. Hydra's exceptions don't name it, so it is searched for, in
    Hydra's order: first the options of groups, then keys."""
    texts = {}
    base = [f"hydra.searchpath=[{','.join(places)}]"] if places else []
    overrides = [o for o in overrides if o.key_or_group != "hydra.searchpath"]
    for override in sorted(overrides, key=lambda o: not (conf / o.key_or_group).is_dir()):
        if (text := _text(override)) is not None:
            texts[text] = override
    words = list(texts)
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        good = bisect_left(
            range(1, len(words) + 1), True, key=lambda n: not _composes(base + words[:n])
        )
        if good == len(words):
            return None  # none is refused by itself: of an interpolation, for example
        return words[good], texts[words[good]], compose("config", base + words[:good])


def _composes(overrides: list[str]) -> bool:
    try:
        compose("config", overrides)
    except COMPLAINTS:
        return False
    return True


def _text(override: Override) -> str | None:
    """As typed; of a sweep its first point, None if it has none."""
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
    """What the command line gives for `key`, as typed, or ''."""
    values = [
        a.split("=", 1)[1] for a in arguments if "=" in a and a.split("=", 1)[0].lstrip("+~") == key
    ]
    return values[-1] if values else ""


def swept_keys(arguments: list[str]) -> list[str]:
    """Keys with several values on the command line (`a=1,2`, `range(...)`): those that tell sweep
    points apart."""
    return [o.key_or_group for o in _parsed(arguments) if o.is_sweep_override()]


def _missing_option(error: MissingConfigException, conf: Path) -> str:
    group, _, option = error.missing_cfg_file.rpartition("/")
    options = sorted(error.options or [])
    # Hydra lists none where one of several was chosen
    if group and not options and (conf / group).is_dir():
        options = sorted(path.stem for path in (conf / group).glob("*.yaml"))
    if not group or not options:
        groups = sorted(str(p.relative_to(conf)) for p in conf.rglob("*") if p.is_dir())
        return f"{error.missing_cfg_file}: no such file in {conf}{_meant(group or option, groups)}"
    return (
        f"{group}={option}: no such option{_meant(option, options)}; there are {', '.join(options)}"
    )


def _bad_override(typed: str, override: Override, composed: DictConfig, conf: Path) -> str:
    """What is wrong with `override`, which `composed` does not take."""
    key, value = override.key_or_group, typed.partition("=")[2]
    bare = typed.lstrip("+~")
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
    if value and isinstance(override.value(), dict):  # merged: the key that isn't there is inside
        return (
            f"{bare}: a dictionary with a key that is not in {conf}; new ones are added with "
            f"'+{bare}'"
        )
    section = key.rpartition(".")[0]
    group = section.replace(".", "/")
    if section and OmegaConf.select(composed, section) is None and (conf / group).is_dir():
        options = " or ".join(f"+{group}={path.stem}" for path in sorted((conf / group).iterdir()))
        return f"{bare}: {section} is null; choose its values first: {options}"
    beside = _keys_beside(key, composed)
    if beside is None:
        return f"{bare}: no such key{_meant(key, configuration.keys() + _groups(conf))}"
    there = f"{section} has {', '.join(beside)}" if beside else f"{section} is empty"
    new = f"; a new one is added with +{bare}" if value else ""
    return (
        f"{bare}: no such key{_meant(key, [f'{section}.{name}' for name in beside])}; {there}{new}"
    )


def _keys_beside(key: str, composed: DictConfig) -> list[str] | None:
    """The keys that a section of free keys (env.args, cluster.env) has with the chosen options;
    None when `key` is in no such section."""
    section = key.rpartition(".")[0]
    known_keys = configuration.keys()
    if not section or any(known.startswith(f"{section}.") for known in known_keys):
        return None
    found = OmegaConf.select(composed, section)
    return [str(name) for name in found] if isinstance(found, DictConfig) else None


def _groups(conf: Path) -> list[str]:
    return sorted({str(p.parent.relative_to(conf)) for p in conf.glob("*/**/*.yaml")})


def _meant(word: str, known: list[str]) -> str:
    # itself: no key of conf/
    near = difflib.get_close_matches(word, sorted({*known} - {word}), n=3, cutoff=0.75)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _first_line(error: BaseException) -> str:
    """Hydra raises some exceptions without a word, for one that has them."""
    lines = str(error).strip().splitlines()
    if not lines:
        return _first_line(error.__cause__) if error.__cause__ else type(error).__name__
    return lines[0].rstrip(".")


def to_tree(composed) -> dict:
    """The composed configuration as plain containers, interpolations resolved."""
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
