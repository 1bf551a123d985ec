"""Find the model's folder: a folder of the user, a hub's snapshot (rose/hub.py), or the output of a
recipe of scripts/ in the user's cache.

Recipes run as processes of their own, so this module imports nothing of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rose import files, hub, places, processes
from rose.config import ConfigError, Model

BUILD_DEADLINE_S = 900.0  # SmolLM2: about 60 s on two slow cores after its 93 MB download

# Recipes compute on CPUs. Otherwise DeepSpeed, which transformers imports, warns of a missing GPU.
QUIET = {"DS_ACCELERATOR": "cpu"}

# Files on which a recipe's output depends. If one of them changes, the cache folder's name changes.
RECIPES = {
    "tiny": (
        "scripts/make_tiny_model.py",
        "rose/agent/envs/frozen_lake.py",
        "rose/agent/envs/_ladder.py",
    ),
    "smollm2": ("scripts/make_smollm2.py",),
}


def resolve(model: Model) -> Path:
    """Return the HF folder to load.

    The model of a recipe is made if it is not in the cache. A hub's model is downloaded, unless the
    launcher has set `model.snapshot`.

    Raises `ConfigError` when a folder is missing or incomplete, a recipe fails, or the hub doesn't
    provide the model.
    """
    if model.source == "hub":
        return _snapshot(model)
    if model.source == "folder" or model.path:
        return check_folder(Path(model.path).expanduser())
    folder = recipe_folder(model.source, model.recipe)
    if not folder.exists():
        build(model.source, model.recipe, folder)
    return check_folder(folder)


def _snapshot(model: Model) -> Path:
    if model.snapshot is None:
        return hub.snapshot(hub_id(model), model.revision)
    folder = Path(model.snapshot)
    if not folder.is_dir():
        raise ConfigError(
            f"model.snapshot={model.snapshot!r}: no such folder on {socket.gethostname()}; the "
            f"launcher resolved model.path={model.path!r} to it, so HF_HOME must be on a file "
            "system that every node sees"
        )
    return check_folder(folder)


def hub_id(model: Model) -> str:
    """Return the hub's name of the model, `model.path`. Raises `ConfigError` when it is null."""
    if not model.path:
        raise ConfigError(
            "model.path=None: the hub id is needed (model.source=hub), as Qwen/Qwen2.5-7B-Instruct"
        )
    return model.path


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a config and a tokenizer; raise `ConfigError` otherwise."""
    if not folder.is_dir():
        raise ConfigError(
            f"model.path={str(folder)!r}: no such folder; give that of a Hugging Face model, "
            "or model.source=hub with its id"
        )
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path={str(folder)!r}: is an adapter; give the model with the adapter in it: "
            "python -m rose.export RUN --merge"
        )
    for name, what in (("config.json", "model"), ("tokenizer_config.json", "tokenizer")):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.path={str(folder)!r}: no {name} there; save the {what} into it "
                "with save_pretrained"
            )
    for path in filter(Path.is_file, folder.glob("*.json")):
        if files.is_lfs_pointer(path):
            raise ConfigError(f"model.path={str(folder)!r}: {path.name}: {files.LFS_ADVICE}")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        _check_json(folder / name)
    return folder


class _Rope(msgspec.Struct):
    factor: float | None = None
    rope_type: str | None = None
    type: str | None = None


class _Values(msgspec.Struct):
    """The values that ROSE reads from a model's JSON files, with their types. `read_shape` checks
    the values of the model's shape."""

    architectures: list[str] | None = None
    model_type: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    eos_token: str | dict[str, Any] | None = None
    added_tokens_decoder: dict[str, dict[str, Any]] | None = None


def _check_json(path: Path) -> None:
    """Raise `ConfigError` if the file is no JSON object, or if a value's type is not that of
    `_Values`. A missing file passes."""
    where = f"model.path={str(path.parent)!r}: {path.name}"
    try:
        found = _json(path)
        error = "" if isinstance(found, dict) else "not an object"
    except (OSError, ValueError) as damage:
        error = str(damage)
    if error:
        raise ConfigError(
            f"{where} is no JSON object ({error}); copy the file again, or write it with "
            "save_pretrained"
        )
    try:
        msgspec.convert(found, _Values)
    except msgspec.ValidationError as wrong:
        key = re.sub(r".*`\$\.(\w+).*`", r"\1", str(wrong))
        raise ConfigError(f"{where} has {key}={found.get(key)!r}: {wrong}") from None


def end_tokens(folder: Path | str, more: Sequence[str] = ()) -> list[int]:
    """Return the sorted ids of the tokens that end a turn. generation_config.json, config.json and
    the tokenizer name them, and so does `more`, texts of tokens (model.end_of_turn). Engines and
    environment hosts must agree on them, so both call this. Raises `ConfigError` if a text of
    `more` is no token, or if no token ends a turn."""
    folder = Path(folder)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = _json(folder / name).get("eos_token_id")
        found |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    eos = _json(folder / "tokenizer_config.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    ids = _token_ids(folder, {*more, eos} - {None})
    found |= {ids[eos]} if eos in ids else set()
    for text in more:
        if text not in ids:
            raise ConfigError(
                f"model.end_of_turn={list(more)!r}: {text!r} is no token of the tokenizer in "
                f"{folder}"
            )
        found.add(ids[text])
    if not found:
        raise ConfigError(
            f"model.path={str(folder)!r}: neither its generation_config.json nor its tokenizer "
            "names an eos token, so no turn would end; model.end_of_turn names one"
        )
    return sorted(found)


def _token_ids(folder: Path, texts: set[str]) -> dict[str, int]:
    """Map each text that is a token to its id. The whole vocabulary is read only if a text is not
    among the tokenizer's added tokens."""
    added = _json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    ids = {t["content"]: int(n) for n, t in added.items() if n.isdecimal() and "content" in t}
    if not texts <= ids.keys():
        whole = _json(folder / "tokenizer.json")
        ids |= {token["content"]: token["id"] for token in whole.get("added_tokens") or ()}
        vocabulary = (whole.get("model") or {}).get("vocab")
        ids = (vocabulary if isinstance(vocabulary, dict) else {}) | ids
    return {text: ids[text] for text in texts if text in ids}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def cache_dir() -> Path:
    if os.environ.get("ROSE_CACHE"):
        return Path(os.environ["ROSE_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rose"


def recipe_folder(source: str, recipe: dict[str, Any]) -> Path:
    """Return the cache folder of a recipe's output. Its name is a digest of the recipe's arguments
    and of the files in `RECIPES`."""
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for name in RECIPES[source]:
        digest.update(_file(name).read_bytes())
    return cache_dir() / "models" / f"{source}-{digest.hexdigest()[:16]}"


def _file(name: str) -> Path:
    return (places.FILES if name.startswith("scripts/") else places.REPOSITORY) / name


def build(source: str, recipe: dict[str, Any], folder: Path) -> None:
    """Run the recipe's script, unless `folder` exists. Its progress goes to stderr. The script
    renames the finished folder to `folder`. It gets no Ctrl-C, but ends with this process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if folder.exists():  # made by another process in the meantime
            return
        print(
            f"model {source} is not in the cache yet; making it in {folder}",
            file=sys.stderr,
            flush=True,
        )
        options = [
            part
            for key, value in recipe.items()
            for part in (f"--{key.replace('_', '-')}", str(value))
        ]
        command = [sys.executable, str(_file(RECIPES[source][0])), *options, "--out", str(folder)]
        launcher = os.getpid()
        try:
            done = subprocess.run(
                command,
                env=os.environ | QUIET | _bars() | {"PYTHONPATH": places.python_path()},
                stdout=sys.stderr,
                timeout=BUILD_DEADLINE_S,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(launcher),
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"model.source={source}: {' '.join(command)} took more than {BUILD_DEADLINE_S:.0f} "
                "s; run it by hand once"
            ) from None
        if done.returncode:
            raise ConfigError(
                f"model.source={source}, model.recipe={recipe}: {' '.join(command)} "
                f"ended with code {done.returncode}; its output is above"
            )


def _bars() -> dict[str, str]:
    """Return variables that turn progress bars off if stderr is no terminal. In a job's log each
    bar would be printed hundreds of times."""
    return {} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a recipe's folder, so that only one process makes it. Raises `ConfigError`
    if another process holds it for too long."""
    try:
        with files.held(path, BUILD_DEADLINE_S):
            yield
    except TimeoutError as error:
        raise ConfigError(f"{error}; end the other launch, or wait and start again") from None
