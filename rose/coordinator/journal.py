"""The scheduler's journal: a JSON line with its state at the start, then one for every event with
the actions that the scheduler returned.

`replay` feeds the events to a new scheduler. Different actions mean that the scheduler is not pure,
which is a bug.
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
    """Appends entries to a file, which is flushed with the metrics of each step and at the end.

    The journal is only for replays. If the disk refuses an entry, the journal ends and the run
    continues, so that finished steps are still saved.
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
        """Close the file; raises OSError if the disk refuses buffered entries."""
        self._file.close()

    def _try(self, write: Callable[[], Any]) -> None:
        """Call `write`; after its first error, end the journal."""
        if self._over:
            return
        try:
            write()
        except OSError as error:
            self._over = True
            print(f"the journal ends here: {self._file.name}: {error.strerror}", flush=True)


def read(path: Path) -> Iterator[Any]:
    """Yield the snapshot, then the entries in order, up to a last line that a crash cut short.
    An attempt that was killed before its first flush leaves an empty file, which yields nothing."""
    decoder = msgspec.json.Decoder(Entry)
    with Path(path).open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            yield decoder.decode(line) if number else msgspec.json.decode(line)


def replay(path: Path, scheduler: Scheduler) -> int:
    """Drive `scheduler` by the journal; return the number of events. Raises `ValueError` at the
    first event with different actions."""
    entries = read(path)
    if (snapshot := next(entries, None)) is None:
        return 0
    scheduler.restore(snapshot)
    count = 0
    for count, entry in enumerate(entries, start=1):
        actions = scheduler.handle(entry.event)
        if actions != entry.actions:
            raise ValueError(
                f"{path}, line {count + 1}: on {entry.event} the live run did {entry.actions}, "
                f"the replay does {actions}"
            )
    return count
