"""The description of a shared device for its engines: configuration, profile and boards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rose.engine import plugin
from rose.files import write_whole
from rose.parts.lending.config import Serving

CONFIG = "config.json"  # file in the folder that `plugin.FOLDER` names


class Device(NamedTuple):
    """A shared device. `folder` has its boards and this description."""

    folder: Path
    serving: Serving
    profile: dict[str, Any] | None

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV caches of both engines share."""
        return int((self.serving.lending.kv_gib or self.serving.online.kv_cache_gib) * 2**30)


def describe(folder: Path, serving: Serving, profile: dict[str, Any] | None) -> dict[str, str]:
    """Write the description into `folder`; return the environment variables that name it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps({"serving": msgspec.to_builtins(serving), "profile": profile})
    write_whole(folder / CONFIG, text.encode())
    return {plugin.FOLDER: str(folder)}


def here() -> Device | None:
    """Return the shared device that the environment names, or None if there is none. Raises
    `ValueError`, naming the file, when the description is absent or damaged."""
    if not (folder := os.environ.get(plugin.FOLDER)):
        return None
    path = Path(folder) / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Device(Path(folder), msgspec.convert(found["serving"], Serving), found["profile"])
    except (OSError, KeyError, ValueError) as error:  # msgspec and json raise ValueErrors
        raise ValueError(
            f"{plugin.FOLDER}={folder}: {path}: {error}; rose.parts.lending.vllm.device writes it"
        ) from None
