"""A hub's cache made by hand: what `hf download` leaves of a model, without a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add(
    cache: Path, repository: str, model: Path, commit: str = COMMIT, ref: str = "main", **changes
) -> Path:
    """Put the files of folder `model` into `cache` (HF_HUB_CACHE) as `commit` of `repository`, to
    which branch `ref` points; `changes` are made to its config.json. Returns the snapshot's
    folder."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    for number, file in enumerate(sorted(p for p in model.iterdir() if p.is_file())):
        blob = home / "blobs" / f"{commit[:8]}{number:032x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    if changes:
        path = snapshot / "config.json"
        raw = json.loads(path.read_text()) | changes
        path.unlink()
        path.write_text(json.dumps(raw))
    return snapshot
