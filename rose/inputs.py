"""RUN/inputs.json: digests of the files that a configuration names, and versions of the installed
packages, as they were when an attempt of the run began.

A run compares answers with each other, so all of its processes must read the same reward function,
data and tasks. Each process that reads such a file calls `verify`, which refuses a file that was
edited since the attempt began. rose/launch/resume.py compares the inputs when a run continues.
No digests are kept of modules that a named file imports, folders that environments write to, root
file systems of tasks, secrets' files, and files that editors and git leave beside others.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rose.config import Config, ConfigError, stored
from rose.files import write_whole

NAME = "inputs.json"
VARIABLE = "ROSE_INPUTS"  # the path of inputs.json, for processes that a rank starts
SECTIONS = ("env.", "eval.sets.", "reward.args.", "algorithm.", "scheduler.", "model.path")
SECRETS = ("token_file", "api_key_file")
# Keys whose folders the run only reads. An environment may write to its log_path.
FOLDERS = re.compile(r"(data|held_out|tasks|\.path)$")
GROUPS = ("rose.environments", "rose.algorithms", "rose.policies")  # entry points of packages
MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# A task's root file system is large, and read-only to the run.
SKIPPED = {"rootfs", "__pycache__", ".git", ".cache", ".ipynb_checkpoints"}
# Files that NFS, vim, Emacs and macOS leave beside others: deleted files, swap files, backups.
BESIDE = re.compile(r"\.nfs.*|\..*\.sw[a-z]|4913|.*~|\.#.*|#.*#|\.DS_Store")
# Options that name a file which the command writes, such as --log=FILE.
WRITTEN = re.compile(r"--?[\w-]*(out|log|save|dump|write|trace|report|result|cache|tmp)", re.I)
# First bytes of a compiled program. Programs get no digest: the system's updates change them.
PROGRAM = b"\x7fELF"
# Bytes up to which a file is read whole: a GB takes a second. Of a larger file, `STRETCHES` evenly
# spaced stretches of `STRETCH` bytes are read.
WHOLE = 2**28
STRETCH, STRETCHES = 2**20, 64
# The digest of a file that is younger than this is not cached. A second edit within one tick of the
# file system's clock (seconds on NFS and FAT) would not change the file's times.
FRESH_S = 4.0
_noted: dict[str, dict[str, str]] = {}  # name of data that `note` got -> key and digest
READERS = 16  # threads; on a network file system each small file costs a round trip


def record(c: Config, run_dir: Path) -> None:
    """Record the inputs of the attempt that begins now."""
    files = {path: {"key": key, "digest": digest(Path(path))} for path, key in named(c).items()}
    contained = c.cluster.slurm is not None and c.cluster.slurm.container is not None
    found = {"files": files, "packages": {} if contained else packages(_environments(c))}
    # After a requeue, the process that begins an attempt loads no environments and notes nothing.
    found["noted"] = recorded(run_dir)["noted"] | _noted
    write_whole(Path(run_dir) / NAME, json.dumps(found, indent=1).encode(), sync=True)


def recorded(run_dir: Path) -> dict[str, Any]:
    """Return what `record` wrote; empty sections before the run's first attempt."""
    path = Path(run_dir) / NAME
    empty: dict[str, Any] = {"files": {}, "packages": {}, "noted": {}}
    advice = "remove it to go on with the files as they are now"
    return empty | (stored(path, advice) if path.exists() else {})


def changed(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text about the change) for each file and noted data that has changed."""
    for path, was in recorded(run_dir)["files"].items():
        if (now := digest(Path(path))) != was["digest"]:
            yield was["key"], f"{path} {'has changed' if now else 'is gone'}"
    for name, was in recorded(run_dir)["noted"].items():
        if _noted.get(name, was)["digest"] != was["digest"]:
            yield was["key"], f"{name} have changed"


def changed_packages(run_dir: Path) -> list[str]:
    """List the packages whose version has changed since it was recorded: "torch 2.12 -> 2.13"."""
    before = recorded(run_dir)["packages"]
    now = packages({os.path.dirname(name) for name in before} - {""}) if before else {}
    return [
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def expect(run_dir: Path) -> None:
    """Make `verify` compare with this run's record, in this process and in those that it starts."""
    os.environ[VARIABLE] = str(Path(run_dir).resolve() / NAME)


def verify(*places: str | Path) -> None:
    """Raise `ConfigError` if one of these files has changed since the attempt recorded it. `places`
    are paths or the words of a command; files that were not recorded pass."""
    if VARIABLE not in os.environ:
        return
    known = _expected(os.environ[VARIABLE])["files"]
    for path in map(os.path.abspath, _meant([str(place) for place in places])):
        was = known.get(path)
        if was is not None and digest(Path(path)) != was["digest"]:
            raise ConfigError(
                f"{was['key']}: {path} has changed since this attempt of the run began, so its "
                "processes would read two different files; restore it, or give the next run a "
                "file of another name"
            )


def note(key: str, name: str, found: str) -> None:
    """Note `found`, the digest of data that is in no file of the run, such as a library's tasks. In
    the launcher `record` writes it to the record. In a process of the run, raise `ConfigError` if
    it differs from the record. `key` gave the data, `name` is for errors."""
    if VARIABLE not in os.environ:
        _noted[name] = {"key": key, "digest": found}
        return
    was = _expected(os.environ[VARIABLE])["noted"].get(name)
    if was is not None and was["digest"] != found:
        raise ConfigError(
            f"{was['key']}: {name} have changed since this attempt of the run began, so its "
            "processes would play different ones; restore them, or let the library's tasks be the "
            "same each time that they are loaded"
        )


@functools.cache  # a process belongs to one attempt, so the record doesn't change
def _expected(path: str) -> dict[str, Any]:
    return recorded(Path(path).parent)


def named(c: Config) -> dict[str, str]:
    """Map each file and folder that the run reads (absolute path) to the key that names it."""
    found: dict[str, str] = {}
    for key, words in _values(c):
        for place in _meant(words):
            path_like = "." in place or "/" in place  # unlike keywords such as math and random
            file = path_like and os.path.isfile(place) and not _is_program(place)
            if file or ("/" in place and os.path.isdir(place) and FOLDERS.search(key)):
                found.setdefault(os.path.abspath(place), key)
    return found


def _values(c: Config) -> Iterator[tuple[str, list[str]]]:
    """Yield (key, words) for each key whose value may name files. The words are a text, the texts
    of a list, or the words of a command."""
    added = _entry_points()
    for key, words in _texts(msgspec.to_builtins(c)):
        if not key.startswith(SECTIONS) or key.endswith(SECRETS):
            continue
        if key == "model.path" and c.model.source != "folder":
            continue  # a recipe's folder is a cache, and a hub's snapshot a commit
        if key.endswith(".command") and len(words) == 1:
            with suppress(ValueError):  # an unclosed quotation mark
                words = [*words, *shlex.split(words[0])]
        elif key.endswith(".name"):
            words = [*words, *(value for name, value in added if name == words[0])]
        yield key, words


def _meant(words: Sequence[str]) -> Iterator[str]:
    """Yield each path that a word may contain: FILE, FILE:FUNCTION, FOLDER#SPLIT, --option=FILE,
    and the files of MODULE:FUNCTION and -m MODULE. Skips options for output, as --log=FILE."""
    for before, word in pairwise(("", *words)):
        if WRITTEN.match(word) or (WRITTEN.match(before) and "=" not in before):
            continue
        for part in filter(None, dict.fromkeys((word, word.partition("=")[2]))):
            places = dict.fromkeys((part, part.partition("#")[0], part.rpartition(":")[0]))
            yield from filter(None, places)
        modules = [word.partition(":")[0]] if MODULE.fullmatch(word) else []
        modules += [word, f"{word}.__main__"] if before == "-m" else []
        yield from filter(None, map(_origin, modules))


def _entry_points() -> list[tuple[str, str]]:
    """Return (name, package.module:Class) of each entry point by which packages extend ROSE."""
    points = (point for group in GROUPS for point in entry_points(group=group))
    return [(point.name.rpartition(".")[2], point.value) for point in points]


def _environments(c: Config) -> set[str]:
    """Return the site-packages folders of the virtual environments whose Python a key names."""
    named = {os.path.abspath(word) for _, words in _values(c) for word in words if "/" in word}
    homes = {Path(path).parent.parent for path in named}
    return {
        str(folder)
        for home in homes
        if (home / "pyvenv.cfg").is_file()
        for folder in home.glob("lib/python*/site-packages")
    }


def _is_program(path: str) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return file.read(len(PROGRAM)) == PROGRAM
    # An unreadable file counts as recorded; the process that reads it reports the error.
    return False


def _origin(module: str) -> str | None:
    """Return the file of a module, imported or not. None for modules of ROSE, and of installed
    packages, whose versions are recorded instead."""
    made = sys.modules.get(module)
    places = [getattr(made, "__file__", None)] if made else []
    stem = module.replace(".", "/")
    ends = (".py", "/__init__.py")
    # Agents' programs start in the current folder.
    places += [os.path.join(p, f"{stem}{end}") for p in (*sys.path, os.getcwd()) for end in ends]
    origin = next((os.path.abspath(p) for p in places if p and os.path.isfile(p)), None)
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    installed.add(str(Path(__file__).parent))
    ours = origin is None or any(origin.startswith(f"{folder}/") for folder in installed)
    return None if ours else origin


def _texts(tree: Any, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted key, texts) for every text and every list with texts in the tree. Dictionaries
    and lists inside a list get that list's key."""
    if isinstance(tree, dict):
        for name, branch in tree.items():
            yield from _texts(branch, f"{prefix}.{name}" if prefix else name)
    elif isinstance(tree, list):
        for branch in tree:
            yield from _texts(branch, prefix) if not isinstance(branch, str) else ()
    listed = tree if isinstance(tree, list) else [tree]
    if texts := [text for text in listed if isinstance(text, str) and text]:
        yield prefix, texts


def packages(others: Iterable[str] = ()) -> dict[str, str]:
    """Map Python and each package that is installed for it to their versions. Packages in the
    folders `others`, which belong to other Pythons, are called FOLDER/NAME."""
    found = {"python": platform.python_version()}
    for folder, place in [(each, "") for each in sys.path] + [(each, each) for each in others]:
        for path in Path(folder).glob("*-*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(os.path.join(place, name.lower()), version)
    return found


def digest(path: Path) -> str:
    """Return the digest of a file's content, or of the names and contents of a folder's files; ""
    for a missing path. A file is read again only if its size, times or inode have changed."""
    if not path.is_dir():
        return _of_file(path)
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - SKIPPED)
        found += [Path(folder, name) for name in sorted(names) if not BESIDE.fullmatch(name)]
    with ThreadPoolExecutor(READERS) as readers:
        each = zip(found, readers.map(_of_file, found), strict=True)
        lines = [f"{file.relative_to(path)}\0{of}\n" for file, of in each]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode("utf-8", "surrogateescape"))


def _of_file(path: Path) -> str:
    """Return the digest of a file, or "" for a path that is no file."""
    try:
        stat = path.stat()
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        fresh = time.time() - max(times) / 1e9 < FRESH_S
        content = _content.__wrapped__ if fresh else _content
        return content(str(path), stat.st_size, stat.st_ino, times) if path.is_file() else ""
    except OSError:
        return ""


@functools.lru_cache(2**17)
def _content(path: str, size: int, inode: int, times: tuple[int, int]) -> str:
    """Digest a file's content. `inode` and `times` are for the cache: a changed file differs."""
    made = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        if size <= WHOLE:
            while data := file.read(STRETCH):
                made.update(data)
        else:
            for number in range(STRETCHES):
                file.seek(number * (size - STRETCH) // (STRETCHES - 1))
                made.update(file.read(STRETCH))
    return made.hexdigest()
