"""The stop flag of a shared device: by it the online engine S stops a running step of the rollout
engine R between two layers.

The flag is a word in a page of /dev/shm that both engines map. Each engine writes one byte of it,
so no write needs a lock. S raises the flag while it computes. R ignores the flag while nobody would
lower it, or while R must end its step. R may go on if S has lowered the flag or R ignores it, that
is, if the word has any bit of `MAY_GO`. A GPU's stream can wait for such a word by itself.

The page is a file of its own, because a board is never mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

NAME = "flag"  # file in the folder of the device's boards
MAY_GO = 0x0101  # bits of the little-endian word; a device without engines has none of them
_LOWERED, _IGNORED = 0, 1  # bytes of the word


class Flag:
    """The flag in `folder`. It lives as long as its page is mapped, even if the file is removed.
    Raises `OSError` if there is no room for the page."""

    def __init__(self, folder: Path) -> None:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # A page that a full /dev/shm can't give would end the process at its first write.
            os.posix_fallocate(file, 0, mmap.PAGESIZE)
            self._page = mmap.mmap(file, mmap.PAGESIZE)
        finally:
            os.close(file)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))

    @property
    def up(self) -> bool:
        """True while the online engine wants the device for itself. Only that engine sets it."""
        return not self._page[_LOWERED]

    @up.setter
    def up(self, up: bool) -> None:
        self._page[_LOWERED] = not up

    @property
    def ignored(self) -> bool:
        """True while steps of the rollout engine don't stop. Only that engine sets it."""
        return bool(self._page[_IGNORED])

    @ignored.setter
    def ignored(self, ignored: bool) -> None:
        self._page[_IGNORED] = ignored

    @property
    def may_go(self) -> bool:
        """True if a step of the rollout engine may go on."""
        return self.ignored or not self.up
