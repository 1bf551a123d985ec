"""A GPU's memory on the host whose pages kill the process that touches one which is not there.

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
_POINTER, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
_libc.mmap.restype = _POINTER
_libc.mmap.argtypes = _POINTER, _SIZE, _INT, _INT, _INT, _LONG
_libc.munmap.argtypes = _POINTER, _SIZE
_libc.mprotect.argtypes = _POINTER, _SIZE, _INT
_libc.fallocate.argtypes = _INT, _INT, _LONG, _LONG
_PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_NONE, _FIXED = 0, 0x10


class Device:
    """Physical memory, of one GPU, which pools of several engines (in this process) share: `pages`
    of `page` bytes. `kernels`: what runs on it, as functions that touch memory; they run when
    somebody waits for them, which is as late as they can."""

    def __init__(self, pages: int, page: int = PAGE) -> None:
        self.pages, self.page = pages, page
        self._file = os.memfd_create("pages")
        os.ftruncate(self._file, pages * page)
        self._free = list(range(pages))[::-1]
        self.kernels = []

    @property
    def used(self) -> int:
        return self.pages - len(self._free)

    def take(self) -> int:
        if not self._free:
            raise CudaError("cuMemCreate", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
        piece = self._free.pop()
        os.pwrite(self._file, bytes([RUBBISH]) * self.page, piece * self.page)
        return piece

    def give_back(self, piece: int) -> None:
        assert piece not in self._free
        _libc.fallocate(self._file, _PUNCH, piece * self.page, self.page)
        self._free.append(piece)

    def show(self, address: int, piece: int | None) -> None:
        """Without rights: those come with `allow`."""
        flags, file, at = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        if piece is not None:
            flags, file, at = mmap.MAP_SHARED, self._file, piece * self.page
        found = _libc.mmap(address, self.page, _NONE, flags | _FIXED, file, at)
        assert found == address, os.strerror(ctypes.get_errno())

    def run(self) -> None:
        for kernel in self.kernels:
            kernel()
        self.kernels.clear()


class FatalDriver:
    """`vmm.Driver` on a `Device`."""

    def __init__(self, device: Device) -> None:
        self.device, self.granularity = device, device.page
        self.shown: dict[int, int] = {}

    def reserve(self, nbytes):
        assert nbytes % self.granularity == 0
        around = _libc.mmap(
            None, nbytes + self.granularity, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        assert around not in (None, ctypes.c_void_p(-1).value)
        # what lies around it stays reserved, as no test lives for long
        return -(-around // self.granularity) * self.granularity

    def free(self, address, nbytes):
        assert not any(address <= page < address + nbytes for page in self.shown)
        assert _libc.munmap(address, nbytes) == 0

    def create(self):
        return self.device.take()

    def release(self, handle):
        assert handle not in self.shown.values()
        self.device.give_back(handle)

    def map(self, address, handle):
        assert address % self.granularity == 0 and address not in self.shown
        self.device.show(address, handle)
        self.shown[address] = handle

    def allow(self, address, nbytes):
        pages = range(address, address + nbytes, self.granularity)
        assert all(page in self.shown for page in pages)
        assert _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, address):
        del self.shown[address]
        self.device.show(address, None)

    def zero(self, address, nbytes):
        ctypes.memset(address, 0, nbytes)

    def available(self):
        return len(self.device._free) * self.granularity

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
