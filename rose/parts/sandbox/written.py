"""Find writes into processes through the files in /proc/PID: `mem`, and settings of the process.

Such a write can change a sleeping process, and changes no file's times. inotify reports it for the
process's folder. Without inotify, or when its watches are used up, the write isn't noticed.
"""

from __future__ import annotations

import contextlib
import os

from rose.parts.sandbox import kernel

Key = tuple[str, str]  # process, clock ticks after boot at its start


class Written:
    """Watches processes with an inotify queue that it shares with `watch.Layer`."""

    def __init__(self, queue: int | OSError) -> None:
        self.queue = queue
        # Process -> folder -> (watch number, open descriptor). The kernel may drop a /proc folder
        # that no process has open, and with it the watch.
        self.watched: dict[Key, dict[str, tuple[int, int]]] = {}
        self._names: dict[int, str] = {}  # number -> name of the process

    def seen(self, events: list[kernel.Event]) -> str | None:
        """Return a text about a write into a watched process; None if there was none."""
        for folder, mask, file in events:
            if mask & kernel.IN_MODIFY and folder in self._names:
                return f"{file} of process {self._names[folder]} was written"
        return None

    def others(self, events: list[kernel.Event]) -> list[kernel.Event]:
        """Return the events that are not about watched processes."""
        return [event for event in events if event[0] not in self._names]

    def watch(self, names: dict[Key, str]) -> None:
        """Watch the processes in `names` (key -> name) with their threads, and no others."""
        for key in self.watched.keys() - names.keys():
            self._unwatch(self.watched.pop(key))
        for key, name in names.items():
            own = f"/proc/{key[0]}"
            # An error means that the process has just ended, or that no watch is left.
            with contextlib.suppress(OSError):
                wanted = {own, *(f"{own}/task/{thread}" for thread in os.listdir(f"{own}/task"))}
                known = self.watched.setdefault(key, {})
                self._unwatch({folder: known.pop(folder) for folder in known.keys() - wanted})
                for folder in wanted - known.keys():
                    known[folder] = self._watch_folder(folder, name)

    def _watch_folder(self, folder: str, name: str) -> tuple[int, int]:
        if isinstance(self.queue, OSError):
            raise self.queue
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            number = kernel.watch_folder(self.queue, f"/proc/self/fd/{fd}")
        except OSError:
            os.close(fd)
            raise
        self._names[number] = name
        return number, fd

    def _unwatch(self, folders: dict[str, tuple[int, int]]) -> None:
        for number, fd in folders.values():
            self._names.pop(number, None)
            kernel.unwatch(self.queue, number)
            os.close(fd)
