"""A small disk of its own: ext4 in a file, mounted through a loop device, which can be full, broken
and mended."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

SIZE = 24 * 2**20  # bytes: the small job leaves 6 MB


class Disk:
    """Needs root, as mounting does."""

    def __init__(self, folder: Path) -> None:
        self.image, self.path = folder / "disk.img", folder / "disk"
        self.path.mkdir()
        with self.image.open("wb") as file:
            file.truncate(SIZE)
        _do("mke2fs", "-q", "-t", "ext4", "-m", "0", "-F", str(self.image))
        self.mount()

    def mount(self) -> None:
        _do("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.path))

    def unmount(self, *options: str) -> None:
        _do("umount", *options, str(self.path))

    def fill(self, leave: int = 0) -> None:
        """Another user's file takes the room but for `leave` bytes.

        Until its data is written out, ext4 guesses how many blocks that takes, and reserves some
        more. So the file is full when nothing can be added after a sync."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            while leave and self.free() > leave:
                file.write(bytes(65_536))
                os.fsync(file.fileno())
            before = -1
            while not leave and file.tell() > before:
                before = file.tell()
                with suppress(OSError):
                    while True:
                        file.write(bytes(4096))
                os.fsync(file.fileno())

    def empty(self) -> None:
        (self.path / "filler").unlink()

    def free(self) -> int:
        room = os.statvfs(self.path)
        return room.f_bavail * room.f_frsize

    def fail(self) -> None:
        """As when the device reports an error: read-only from now on, for files that are open
        too."""
        found = subprocess.run(
            ["findmnt", "-no", "SOURCE", str(self.path)], capture_output=True, text=True, check=True
        )
        Path("/sys/fs/ext4", Path(found.stdout.strip()).name, "trigger_fs_error").write_text("1")

    def mend(self) -> None:
        self.unmount()
        # code 1: errors were corrected
        subprocess.run(["e2fsck", "-fy", str(self.image)], capture_output=True)
        self.mount()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (
        f"{' '.join(command)}: {done.stderr.strip()} (root, e2fsprogs and loop devices are needed)"
    )
