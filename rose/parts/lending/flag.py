"""The stop flag of a shared device. With it the online engine S stops a running step of the rollout
engine R between two layers.

The flag is two bytes in a page of /dev/shm that both engines map. S writes one byte: it raises the
flag while it computes. R writes the other byte: it ignores the flag while S is silent, or while R
must end its step. No byte has two writers, so no write needs a lock. R may go on if S has lowered
the flag or R ignores it. Then the word of both bytes has a bit of `MAY_GO`, for which a GPU's
stream can wait by itself.

The page is a separate file, because boards are never mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

NAME = "flag"  # file in the folder of the device's boards
MAY_GO = 0x0101  # lowest bit of each byte; a new page has neither, so its flag is up
_LOWERED, _IGNORED = 0, 1  # bytes of the word


class Flag:
    """The flag in `folder`. It works while its page is mapped, even if the file is removed. Raises
    `OSError` if there is no room for the page."""

    def __init__(self, folder: Path) -> None:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Without this, the first write would kill the process if /dev/shm is full.
            os.posix_fallocate(file, 0, mmap.PAGESIZE)
            self._page = mmap.mmap(file, mmap.PAGESIZE)
        finally:
            os.close(file)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))

    @property
    def up(self) -> bool:
        """True while the online engine wants the device for itself. Only this engine sets it."""
        return not self._page[_LOWERED]

    @up.setter
    def up(self, up: bool) -> None:
        self._page[_LOWERED] = not up

    @property
    def ignored(self) -> bool:
        """True while steps of the rollout engine don't stop. Only the rollout engine sets it."""
        return bool(self._page[_IGNORED])

    @ignored.setter
    def ignored(self, ignored: bool) -> None:
        self._page[_IGNORED] = ignored

    @property
    def may_go(self) -> bool:
        """True if a step of the rollout engine may go on."""
        return self.ignored or not self.up
