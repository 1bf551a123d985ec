"""The scheduler's journal: its state at the start, then every event and what it answered, a JSON
line each.

`replay` feeds the events to a fresh scheduler; anything but the same actions is a bug in its
purity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rose.scheduler import Scheduler
from rose.scheduler.events import Action, AnyAction, AnyEvent, Event


class Entry(msgspec.Struct, frozen=True):
    event: AnyEvent
    actions: list[AnyAction]


class Journal:
    """Appends entries to a file, flushed with the metrics of each step and at the end.

    A run goes on without its journal, which is for replays: where the disk refuses an entry, the
    journal ends, so that finished steps are still saved.
    """

    def __init__(self, path: Path, snapshot: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._over = False
        self._encoder = msgspec.json.Encoder()
        self._file.write(self._encoder.encode(snapshot) + b"\n")

    def write(self, event: Event, actions: list[Action]) -> None:
        line = self._encoder.encode(Entry(event, actions)) + b"\n"
        self._try(lambda: self._file.write(line))

    def flush(self) -> None:
        self._try(self._file.flush)

    def close(self) -> None:
        """Raises OSError for what the disk refuses."""
        self._file.close()

    def _try(self, write: Callable[[], Any]) -> None:
        if self._over:
            return
        try:
            write()
        except OSError as error:
            self._over = True
            print(f"the journal ends here: {self._file.name}: {error.strerror}", flush=True)


def read(path: Path) -> Iterator[Any]:
    """The snapshot, then the entries in order; a last line that a crash tore ends it."""
    decoder = msgspec.json.Decoder(Entry)
    with Path(path).open("rb") as file:
        yield msgspec.json.decode(file.readline())
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield decoder.decode(line)


def replay(path: Path, scheduler: Scheduler) -> int:
    """Drive `scheduler` by the journal; how many events. Raises `ValueError` at the first
    difference."""
    entries = read(path)
    scheduler.restore(next(entries))
    count = 0
    for count, entry in enumerate(entries, start=1):
        actions = scheduler.handle(entry.event)
        if actions != entry.actions:
            raise ValueError(
                f"{path}, line {count + 1}: on {entry.event} the live run did {entry.actions}, "
                f"the replay does {actions}"
            )
    return count
