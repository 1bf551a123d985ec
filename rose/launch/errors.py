"""Hydra's and OmegaConf's complaints in ROSE's form: key, value, remedy, and what was probably
meant.

Left out: what is wrong with a composed configuration; rose/config/ says that.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rose import config as configuration

COMPLAINTS = (HydraException, OmegaConfBaseException)


def explain(error: Exception, conf: Path, arguments: list[str]) -> str:
    """One message for what Hydra or OmegaConf raised about `arguments` (the command line without
    its program)."""
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        return f"{error.override}: no value; write {error.override}=VALUE (null for none)"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: can't be read as key=value ({_first_line(error)}); put quotes around a value with "
            "special characters, for example 'key=\"a b\"'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error, conf)
    text = str(error)
    if several := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^']*)'", text):
        return _several_values(several.group(1))
    found = re.search(r"Could not (?:override|append|delete)[^']*'([^']*)'", text)
    if found:
        return _bad_key(found.group(1).split("@")[0].split("=")[0], text, conf, arguments)
    key = getattr(error, "full_key", None)
    return f"{key}: {_first_line(error)}" if key else text.strip().splitlines()[0]


def _several_values(override: str) -> str:
    key, _, values = override.partition("=")
    return (
        f"{override}: several values; add -m for a sweep over them, or write '{key}=\"{values}\"' for one text and "
        f"{key}=[{values}] for a list"
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
    overrides = OverridesParser.create().parse_overrides(
        [a for a in arguments if "=" in a and not a.startswith("-")]
    )
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


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


def _bad_key(key: str, text: str, conf: Path, arguments: list[str]) -> str:
    value = value_of(key, arguments)
    if (conf / key).is_dir() and "No match in the defaults list" in text:
        return (
            f"{key}={value}: {key} is not in the default configuration; add it with +{key}={value}"
        )
    typed = f"{key}={value}" if value else key
    if value.startswith("{"):  # Hydra merges dictionaries, and the key that isn't there is inside
        return f"{typed}: a dictionary with a key that is not in {conf}; new ones are added with '+{key}={value}'"
    beside = _keys_beside(key, conf, arguments)
    if beside is None:
        return f"{typed}: no such key{_meant(key, configuration.keys() + _groups(conf))}"
    section = key.rpartition(".")[0]
    there = f"{section} has {', '.join(beside)}" if beside else f"{section} is empty"
    new = f"; a new one is added with +{key}={value}" if value else ""
    return (
        f"{typed}: no such key{_meant(key, [f'{section}.{name}' for name in beside])}; {there}{new}"
    )


def _keys_beside(key: str, conf: Path, arguments: list[str]) -> list[str] | None:
    """The keys that a section of free keys (env.args, cluster.env) has with the chosen options;
    None when `key` is in no such section."""
    section = key.rpartition(".")[0]
    if not section or any(known.startswith(f"{section}.") for known in configuration.keys()):
        return None
    chosen = [
        a
        for a in arguments
        if (conf / re.split("[@=]", a.lstrip("+"))[0]).is_dir() and not set(",(") & set(a)
    ]
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        found = OmegaConf.select(compose("config", chosen), section)
    return [str(name) for name in found] if isinstance(found, DictConfig) else None


def _groups(conf: Path) -> list[str]:
    return sorted({str(p.parent.relative_to(conf)) for p in conf.glob("*/**/*.yaml")})


def _meant(word: str, known: list[str]) -> str:
    # itself: no key of conf/
    near = difflib.get_close_matches(word, sorted({*known} - {word}), n=3, cutoff=0.75)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def to_tree(composed) -> dict:
    """The composed configuration as plain containers, interpolations resolved."""
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
