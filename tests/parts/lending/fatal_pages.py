"""A GPU's memory on the host whose pages of 2 MiB kill the process that touches one which is not
there.

What on a GPU is CUDA_ERROR_ILLEGAL_ADDRESS is SIGSEGV here: addresses are reserved without rights,
a page of memory is a piece of one file in memory, and mapping it means mapping that piece there. So
one piece can stand at several addresses, as with CUDA, and bytes that nobody cleared are rubbish,
not zeros.
"""

import ctypes
import mmap
import os

from rose.parts.lending.vllm.vmm import OUT_OF_MEMORY, CudaError, PagePool

PAGE = 2 * 2**20
RUBBISH = 0xFF  # every float of such bytes is no number

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_NONE, _FIXED = 0, 0x10


class Device:
    """Physical memory, of one GPU, which pools of several engines (in this process) share.
    `kernels`: what runs on it, as functions that touch memory; they run when somebody waits for
    them, which is as late as they can."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._file = os.memfd_create("pages")
        os.ftruncate(self._file, pages * PAGE)
        self._free = list(range(pages))[::-1]
        self.kernels = []

    @property
    def used(self) -> int:
        return self.pages - len(self._free)

    def take(self) -> int:
        if not self._free:
            raise CudaError("cuMemCreate", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
        piece = self._free.pop()
        os.pwrite(self._file, bytes([RUBBISH]) * PAGE, piece * PAGE)
        return piece

    def give_back(self, piece: int) -> None:
        assert piece not in self._free
        _libc.fallocate(self._file, _PUNCH, piece * PAGE, PAGE)
        self._free.append(piece)

    def show(self, address: int, piece: int | None) -> None:
        """Without rights: those come with `allow`."""
        flags, file = (
            (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            if piece is None
            else (mmap.MAP_SHARED, self._file)
        )
        found = _libc.mmap(
            address, PAGE, _NONE, flags | _FIXED, file, 0 if piece is None else piece * PAGE
        )
        assert found == address, os.strerror(ctypes.get_errno())

    def run(self) -> None:
        for kernel in self.kernels:
            kernel()
        self.kernels.clear()


class FatalDriver:
    """`vmm.Driver` on a `Device`."""

    granularity = PAGE

    def __init__(self, device: Device) -> None:
        self.device = device
        self.shown: dict[int, int] = {}

    def reserve(self, nbytes):
        assert nbytes % PAGE == 0
        around = _libc.mmap(
            None, nbytes + PAGE, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        assert around not in (None, ctypes.c_void_p(-1).value)
        # what lies around it stays reserved, as no test lives for long
        return -(-around // PAGE) * PAGE

    def free(self, address, nbytes):
        assert not any(address <= page < address + nbytes for page in self.shown)
        assert _libc.munmap(address, nbytes) == 0

    def create(self):
        return self.device.take()

    def release(self, handle):
        assert handle not in self.shown.values()
        self.device.give_back(handle)

    def map(self, address, handle):
        assert address % PAGE == 0 and address not in self.shown
        self.device.show(address, handle)
        self.shown[address] = handle

    def allow(self, address, nbytes):
        assert all(page in self.shown for page in range(address, address + nbytes, PAGE))
        assert _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, address):
        del self.shown[address]
        self.device.show(address, None)

    def zero(self, address, nbytes):
        ctypes.memset(address, 0, nbytes)

    def available(self):
        return len(self.device._free) * PAGE

    def synchronize(self):
        self.device.run()


class FatalPages(PagePool):
    """The GPU's pool with a tensor that a CPU can use."""

    def __init__(self, device: Device, nbytes: int, spare: int = 0) -> None:
        super().__init__(FatalDriver(device), nbytes, spare)

    def tensor(self):
        import torch

        self.map([(0, self.page)])
        return torch.frombuffer(
            (ctypes.c_char * self.nbytes).from_address(self.address), dtype=torch.int8
        )

    def touch(self, byte: int, value: int = 1) -> None:
        ctypes.memset(self.address + byte, value, 1)

    def read(self, byte: int) -> int:
        return ctypes.c_ubyte.from_address(self.address + byte).value
