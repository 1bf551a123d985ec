"""Check a model's weights by the headers of its safetensors files, before anything loads them.

All files and tensors must be there, with types that can be trained and the shapes of config.json.
This reads some kB of each file and imports no torch. A weight that the index names and no file has
is found in every architecture. Other missing tensors are found only in the architectures in
`ALIKE`, in which all layers have the same tensors. For others the trainer reports them when it
loads the weights (rose/trainer/model.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from rose.config.errors import ConfigError
from rose.files import LFS_ADVICE, is_lfs_pointer

MOST_HEADER = 10**8  # bytes of a safetensors header, the library's own limit
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Architectures in which all layers have the same tensors, with the names below.
ALIKE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+\.(?:weight|bias))")
Index = Annotated[dict[str, str], msgspec.Meta(min_length=1)]  # tensor -> its file
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = ("F64", "F32", "BF16", "F16")  # types of weights, as safetensors names them


class Tensor(NamedTuple):
    dtype: str  # safetensors' name, as BF16
    shape: tuple[int, ...]


class Wrong(ValueError):
    """A fault of a model's weights, and what to do about it."""


def check_files(folder: Path, named: str, again: str) -> dict[str, Tensor]:
    """Return all tensors by name; none for a folder with weights only in PyTorch's own format.
    Raises `ConfigError` when a file of the weights is absent, or not as long as its header says.
    `named` is the key and value that gave the folder, `again` the error's advice."""
    try:
        return _tensors(folder, again)
    except Wrong as error:
        raise ConfigError(f"{named}: {folder}: {error}") from None


def check_trainable(folder: Path, named: str, again: str) -> None:
    """Raise `ConfigError` as `check_files` does, and for tensors that can't be trained, are missing
    or don't fit config.json."""
    tensors = check_files(folder, named, again)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = _layers(tensors)
    try:
        _check_types(tensors)
        # Weights with other names, which libraries can also read, are not compared.
        if layers and (raw.get("architectures") or [""])[0] in ALIKE:
            _check_layers(layers, raw)
            _check_embeddings(tensors, raw)
    except Wrong as error:
        raise ConfigError(f"{named}: {folder}: {error}") from None


def _tensors(folder: Path, again: str) -> dict[str, Tensor]:
    """Return all tensors by name; none for a folder with weights only in PyTorch's own format."""
    index: dict[str, str] = {}
    shards = [WHOLE]
    if (folder / INDEX).is_file():
        try:
            raw = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            index = msgspec.convert(raw, Index)
        except (ValueError, KeyError, TypeError) as error:
            raise Wrong(f"{INDEX} is unreadable ({error!r}); {again}") from None
        shards = sorted(set(index.values()))
    elif not (folder / WHOLE).is_file() and any(folder.glob("pytorch_model*.bin")):
        return {}
    if missing := [name for name in shards if not (folder / name).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Wrong(
            f"has no {missing[0]}{more}; if the download was cut short: {again}; if the model has "
            "no safetensors weights, convert them with save_pretrained"
        )
    found: dict[str, Tensor] = {}
    for shard in shards:
        found |= _header(folder / shard, again)
    for name, shard in index.items():
        # If the model ties its head to the embeddings, the index may name a head that no file has.
        if name.endswith(".weight") and name not in found and name != HEAD:
            raise Wrong(f"{INDEX} says that {name} is in {shard}, and no file has it; {again}")
    return found


def _header(path: Path, again: str) -> dict[str, Tensor]:
    """Return the tensors in a file's header. Raises `Wrong` if the header gives another length."""
    if is_lfs_pointer(path):
        raise Wrong(f"{path.name}: {LFS_ADVICE}")
    size, whole, tensors = path.stat().st_size, 0, {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 0 < length < MOST_HEADER:
            try:
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                tensors = {k: Tensor(t["dtype"], tuple(t["shape"])) for k, t in header.items()}
                ends = [t["data_offsets"][1] for t in header.values()]
                whole = 8 + length + max(ends, default=0)
            except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                whole = 0
    if not whole or size != whole:
        raise Wrong(
            f"{path.name} has {size} bytes, and its header says {whole or 'nothing'}; if the "
            f"download was cut short: {again}"
        )
    return tensors


def _check_types(tensors: Mapping[str, Tensor]) -> None:
    """Raise `Wrong` for a weight whose type can't be trained."""
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype not in FLOATS:
            raise Wrong(
                f"{name} has the type {tensor.dtype}, and weights are trained in "
                f"{', '.join(FLOATS[1:])}; give the model before it was quantised"
            )


def _layers(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return layer -> name within the layer -> weight. Leaves out buffers such as
    rotary_emb.inv_freq, which old libraries wrote and nothing reads."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if found := LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), {})[found[2]] = tensor
    return layers


def _check_layers(layers: dict[int, dict[str, Tensor]], raw: Mapping[str, Any]) -> None:
    """Raise `Wrong` if layers differ in their tensors, or their number is not config.json's."""
    count = raw.get("num_hidden_layers")
    if isinstance(count, int) and sorted(layers) != list(range(count)):
        raise Wrong(
            f"config.json has num_hidden_layers={count}, and the weights have "
            f"{len(layers)} layers ({min(layers)} to {max(layers)}); save both with "
            "save_pretrained"
        )
    every: dict[str, Tensor] = {}
    for number in sorted(layers):
        every = layers[number] | every  # the shape in the first layer that has the tensor
    for number, layer in sorted(layers.items()):
        for part, tensor in every.items():
            if part not in layer:
                raise Wrong(
                    f"model.layers.{number}.{part} is missing, which other layers have; copy the "
                    "weights again, or save them with save_pretrained"
                )
            if layer[part].shape != tensor.shape:
                raise Wrong(
                    f"model.layers.{number}.{part} has the shape {list(layer[part].shape)}, in "
                    f"other layers {list(tensor.shape)}"
                )


def _check_embeddings(tensors: Mapping[str, Tensor], raw: Mapping[str, Any]) -> None:
    """Raise `Wrong` if embeddings or output matrix are missing, or not of config.json's sizes."""
    needed = [EMBEDDINGS] + [HEAD] * (raw.get("tie_word_embeddings") is False)
    for name in needed:
        if name not in tensors:
            raise Wrong(f"{name} is missing; copy the weights again")
    for name in (EMBEDDINGS, HEAD):
        if name not in tensors or len(tensors[name].shape) != 2:
            continue
        pairs = zip(("vocab_size", "hidden_size"), tensors[name].shape, strict=True)
        for key, size in pairs:
            if isinstance(raw.get(key), int) and raw[key] != size:
                raise Wrong(
                    f"config.json has {key}={raw[key]}, and {name} has the shape "
                    f"{list(tensors[name].shape)}; save both with save_pretrained"
                )
