"""Read and write the figures of prove_promise.py's runs: one JSON file per seed. Not a command.

A seed's file has the settings, and the figures of each side that is done. It is written after each
side, so that an interrupted proof goes on from it, on another machine too. Times are in seconds
since the training job was submitted, of online requests since the traffic began.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rose.files import write_whole

# The sides of a seed run in this order, since the targets of `borrowed` come from `alone`.
SIDES = ("alone", "borrowed", "dedicated")


class Results:
    """The files seed-N.json of one folder, all with the same settings.

    Raises `SystemExit` if the folder has runs of other settings, or a file that is damaged.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._seeds = dict(self._read())
        kept = [seed["settings"] for seed in self._seeds.values()]
        self.settings = dict(settings if settings is not None else kept[0] if kept else {})
        for number, found in zip(self._seeds, kept, strict=True):
            self._check(number, found)

    def _read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for path in sorted(self.folder.glob("seed-*.json")):
            number = re.fullmatch(r"seed-(\d+)\.json", path.name)
            if number is None:
                continue
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                if not found["settings"] or set(found["sides"]) - set(SIDES):
                    raise ValueError(f"its sides must be of {', '.join(SIDES)}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SystemExit(
                    f"prove_promise: {path} is no file of a seed ({error!r}); remove it, and its "
                    "sides run again"
                ) from None
            yield int(number[1]), found

    def _check(self, seed: int, found: Mapping[str, Any]) -> None:
        keys = sorted({*found, *self.settings})
        other = [key for key in keys if found.get(key) != self.settings.get(key)]
        if other:
            words = "; ".join(
                f"{key} {found.get(key)!r}, not {self.settings.get(key)!r}" for key in other
            )
            raise SystemExit(
                f"prove_promise: {self._path(seed)} is of other settings ({words}); give them, or "
                "another --results"
            )

    def _path(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}.json"

    def get(self, side: str, seed: int) -> dict[str, Any] | None:
        """Return the figures of a run, null if it isn't done."""
        return self._seeds[seed]["sides"].get(side) if seed in self._seeds else None

    def put(self, run: dict[str, Any]) -> None:
        """Keep the figures of a run, which has `side` and `seed`."""
        seed = self._seeds.setdefault(run["seed"], {"settings": self.settings, "sides": {}})
        seed["sides"][run["side"]] = run
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(run["seed"]), _written(seed).encode())

    @property
    def forecast(self) -> dict[str, dict[str, float]]:
        """Return the simulator's prediction of each side; empty if none has these settings."""
        path = self.folder / "forecast.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found["sides"] if found.get("settings") == self.settings else {}

    def foresee(self, sides: dict[str, dict[str, float]]) -> None:
        """Keep the simulator's prediction, which must be made before the runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_rounded({"settings": self.settings, "sides": sides}), indent=1)
        write_whole(self.folder / "forecast.json", f"{text}\n".encode())

    def whole(self) -> list[dict[str, Any]]:
        """Return the runs of all seeds that have every side, in order."""
        done = [seed["sides"] for _, seed in sorted(self._seeds.items())]
        return [sides[side] for sides in done if len(sides) == len(SIDES) for side in SIDES]


def _written(seed: dict[str, Any]) -> str:
    """Return a seed's file, with one line per side, so that a commit shows which side came."""

    def dumped(value: Any) -> str:
        return json.dumps(_rounded(value), separators=(",", ":"))

    sides = ",\n".join(f'"{side}":{dumped(run)}' for side, run in seed["sides"].items())
    return f'{{"settings":{dumped(seed["settings"])},\n"sides":{{\n{sides}\n}}}}\n'


def _rounded(value: Any) -> Any:
    """Return the value with its floats cut to a tenth of a millisecond."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
