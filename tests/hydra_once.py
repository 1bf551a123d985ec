"""Hydra composes the same options from the same files once per process: tests ask for thousands of
compositions, of which each takes a quarter of a second. What it made is copied for every caller
(as a pickle, in less time than by copy.deepcopy), since Hydra alters it: it sets single keys
(`a.b=1`) afterwards, each time anew."""

import functools
import os
import pickle
from pathlib import Path

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import base


def _parse_files() -> None:
    """The 30 files of a configuration are parsed once, until they change, and Hydra's own."""
    Plugins.instance()  # it registers the classes for files and packages
    parsed: dict[tuple, bytes] = {}

    def once(source) -> None:
        load = source.load_config

        def load_config(self, config_path: str):
            path = Path(self.path, self._normalize_file_name(config_path))
            if self.scheme() == "file" and not path.exists():
                return load(self, config_path)
            version = os.stat(path) if self.scheme() == "file" else None
            times = (version.st_mtime_ns, version.st_size) if version else ()
            key = (self.provider, self.path, config_path, times)
            if key not in parsed:
                parsed[key] = pickle.dumps(load(self, config_path))
            return pickle.loads(parsed[key])

        source.load_config = load_config

    for scheme in ("file", "pkg"):
        once(SourcesRegistry.instance().resolve(scheme))


def _version(repository) -> tuple:
    """Of everything that a composition may read: its sources, and for folders the files' times.
    Looked up once per composition, each of which has a repository of its own."""
    if (known := vars(repository).get("version")) is not None:
        return known
    found: list[tuple] = []
    for source in repository.get_sources():
        found.append((source.provider, source.scheme(), source.path))
        if source.scheme() == "file":
            for folder, _, names in os.walk(source.path):
                for name in names:
                    status = os.stat(os.path.join(folder, name))
                    found.append((folder, name, status.st_mtime_ns, status.st_size))
    repository.version = tuple(found)
    return repository.version


def _list_defaults() -> None:
    """Which files make a configuration follows from the chosen options alone."""
    create = defaults_list.create_defaults_list
    made: dict[tuple, bytes] = {}

    def once(repo, config_name, overrides_list, prepend_hydra, skip_missing):
        options = tuple(o.input_line for o in overrides_list if repo.group_exists(o.key_or_group))
        key = (_version(repo), config_name, options, prepend_hydra, skip_missing)
        if key not in made:
            found = create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
            made[key] = pickle.dumps((found.defaults, found.overrides.known_choices))
            return found
        defaults, choices = pickle.loads(made[key])
        overrides = defaults_list.Overrides(repo=repo, overrides_list=overrides_list)
        overrides.known_choices = choices
        return defaults_list.DefaultsList(defaults, None, overrides.config_overrides, overrides)

    config_loader_impl.create_defaults_list = once


def _map_choices() -> None:
    """All choices so far, which interpolations in a list of defaults refer to: made for lists that
    have some, not for each of the 35."""
    create = defaults_list._create_interpolation_map

    def where_needed(overrides, defaults, self_added):
        if any(default.is_interpolation() for default in defaults):
            return create(overrides, defaults, self_added)
        return None

    defaults_list._create_interpolation_map = where_needed


def _merge_files() -> None:
    """The same files in the same places are merged once, and a file is put into its place once."""
    for name in ("_compose_config_from_defaults_list", "_load_single_config"):
        setattr(ConfigLoaderImpl, name, _once(getattr(ConfigLoaderImpl, name)))


def _once(make):
    made: dict[tuple, bytes] = {}

    def once(self, repo, **chosen):  # default=one, or defaults=several
        (which,) = chosen.values()
        listed = which if isinstance(which, list) else [which]
        key = (_version(repo), tuple(tuple(vars(each).items()) for each in listed))
        if key not in made:
            made[key] = pickle.dumps(make(self, repo=repo, **chosen))
        return pickle.loads(made[key])

    return once


def install() -> None:
    base.parse = functools.cache(base.parse)  # of OmegaConf's interpolations
    _parse_files()
    _list_defaults()
    _map_choices()
    _merge_files()
