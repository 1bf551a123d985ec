"""The stop flag of a shared device. With it the online engine S stops a running step of the rollout
engine R between two layers.

The flag is two bytes in a page of /dev/shm that both engines map. S writes one byte: it raises the
flag while it computes. R writes the other byte: it ignores the flag while S is silent, or while R
must end its step. No byte has two writers, so no write needs a lock. R may go on if S has lowered
the flag or R ignores it. Then the word of both bytes has a bit of `MAY_GO`, for which a GPU's
stream can wait by itself. On a CPU a thread of R waits by Linux's futex(2), because polls would
take time of the core that both engines share.

The page is a separate file, because boards are never mapped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from pathlib import Path

NAME = "flag"  # file in the folder of the device's boards
MAY_GO = 0x0101  # lowest bit of each byte; a new page has neither, so its flag is up
_LOWERED, _IGNORED = 0, 1  # bytes of the word
POLL_S = 0.002  # seconds between two polls where there is no futex
# The number of Linux's system call `futex`, which libc has no function for.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_ENDS = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)  # ways in which a wait ends without a wake
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


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
        self._word = ctypes.c_uint32.from_address(self.address)

    @property
    def up(self) -> bool:
        """True while the online engine wants the device for itself. Only this engine sets it."""
        return not self._page[_LOWERED]

    @up.setter
    def up(self, up: bool) -> None:
        self._page[_LOWERED] = not up
        if not up:
            self._wake()

    @property
    def ignored(self) -> bool:
        """True while steps of the rollout engine don't stop. Only the rollout engine sets it."""
        return bool(self._page[_IGNORED])

    @ignored.setter
    def ignored(self, ignored: bool) -> None:
        self._page[_IGNORED] = ignored
        if ignored:
            self._wake()

    @property
    def may_go(self) -> bool:
        """True if a step of the rollout engine may go on."""
        return self.ignored or not self.up

    def wait(self, seconds: float) -> None:
        """Block this thread until a step may go on, but at most for `seconds`."""
        end = time.monotonic() + seconds
        while not (word := self._word.value) & MAY_GO and (left := end - time.monotonic()) > 0:
            # The call returns at once if the word has changed since it was read.
            if not self._futex(_WAIT, word, _Timespec(int(left), int(left % 1 * 1e9))):
                time.sleep(min(left, POLL_S))

    def _wake(self) -> None:
        self._futex(_WAKE, _ALL)

    def _futex(self, operation: int, value: int, timeout: _Timespec | None = None) -> bool:
        """Call futex(2) on the word. Returns False if this system refuses it."""
        if _FUTEX is None:
            return False
        until = None if timeout is None else ctypes.byref(timeout)
        words = ctypes.c_void_p(self.address), operation, ctypes.c_uint32(value), until, None, 0
        return _libc.syscall(_FUTEX, *words) >= 0 or ctypes.get_errno() in _ENDS
