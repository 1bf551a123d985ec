"""GPU memory that is really returned to the system: a page pool over CUDA's virtual memory.

Addresses are reserved once, so that tensors, kernels and captured CUDA graphs keep theirs. The
memory behind each page (2 MiB on today's GPUs) is created and mapped, unmapped and released on
demand (CUDA driver API, section "Virtual Memory Management").

No existing pool fits. kvcached 0.1.6 does this for vLLM up to 0.24, but it replaces vLLM's block
pool and decides itself what to map, while ROSE's scheduler decides block by block. vLLM's
CuMemAllocator and torch-memory-saver release whole allocations, and torch's expandable segments
release only what no tensor uses. We call the driver through libcuda's stable C interface, which
needs no further package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rose.parts.lending.vllm.blocks import Ranges

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# Bytes of a GPU that KV caches leave free, for kernels that are loaded late and growing allocators.
SPARE = 2**28
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: waits for no other stream
# CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: locked for all contexts, and visible to the device
_LOCKED = 3
_ANY_BIT = 2  # CU_STREAM_WAIT_VALUE_AND: waits until the word has a bit of the value


class CudaError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Driver(Protocol):
    """The calls of CUDA's driver that the pool needs, on one device. Each raises `CudaError`.

    CUDA's rules:
    1. Sizes and addresses are multiples of `granularity`.
    2. A page of addresses is mapped at most once, and is accessible only after `allow`.
    3. One handle may be mapped at several pages, which then show the same bytes.
    4. An unmap undoes exactly one map, and no kernel may be using the page.
    5. Memory is free once it is unmapped everywhere and its handle is released.
    6. Addresses are freed only when nothing is mapped in them.
    """

    granularity: int  # bytes

    def reserve(self, nbytes: int) -> int: ...

    def free(self, address: int, nbytes: int) -> None: ...

    def create(self) -> int:
        """Allocate `granularity` bytes of physical memory; return their handle."""

    def release(self, handle: int) -> None: ...

    def map(self, address: int, handle: int) -> None: ...

    def allow(self, address: int, nbytes: int) -> None: ...

    def unmap(self, address: int) -> None: ...

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros, and return when that is done. Waits for no other work of the device."""

    def available(self) -> int:
        """Free bytes of the device."""

    def synchronize(self) -> None:
        """Wait until the device has done all work submitted to it, on all streams."""


class PagePool:
    """A `blocks.Pool` of at least `nbytes` of GPU memory, with nothing mapped at first. It leaves
    `spare` bytes of the device free.

    A page may only be unmapped when every kernel that uses its address has ended. `release` waits
    for the kernels submitted so far. So the caller must already have submitted all kernels that use
    the page. This holds for calls from vLLM's scheduler, although it may free blocks of an ended
    request that the running step still writes to. The scheduler sends each step to the workers
    before it plans the next one, and the workers carry out calls in order.
    """

    def __init__(self, driver: Driver, nbytes: int, spare: int = 0) -> None:
        self._driver, self.page, self._spare = driver, driver.granularity, spare
        self.nbytes = -(-nbytes // self.page) * self.page
        self.address = driver.reserve(self.nbytes)
        self._handles: dict[int, int] = {}  # offset of a mapped page -> handle of its memory

    @property
    def mapped_bytes(self) -> int:
        return len(self._handles) * self.page

    def map(self, ranges: Ranges) -> None:
        """Map these pages; new ones read as zeros, mapped ones stay as they are. Raises
        `MemoryError` when less than `spare` bytes would stay free, and `CudaError`. In both cases
        the pages that this call mapped are released again."""
        parts = [
            [offset for offset in range(low, high, self.page) if offset not in self._handles]
            for low, high in self._checked(ranges)
        ]
        self._check_spare(self.page * sum(map(len, parts)))
        fresh: list[int] = []
        try:
            for new in parts:
                for offset in new:
                    self._map_page(offset)
                    fresh.append(offset)
                for first, end in _runs(new, self.page):
                    self._driver.allow(self.address + first, end - first)
                    self._driver.zero(self.address + first, end - first)
        except (CudaError, MemoryError):
            self._unmap(fresh)
            raise

    def release(self, ranges: Ranges) -> None:
        """Wait for the device, then release the mapped ones of these pages. Raises `CudaError`."""
        gone = [
            offset
            for low, high in self._checked(ranges)
            for offset in range(low, high, self.page)
            if offset in self._handles
        ]
        if gone:
            self._unmap(gone)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Allow kernels to touch every page within this context. All unmapped pages share one page
        of memory, whose content is lost afterwards. Raises `MemoryError`, `CudaError`."""
        bare = [
            offset for offset in range(0, self.nbytes, self.page) if offset not in self._handles
        ]
        shared, shown = self._create(), []
        try:
            for offset in bare:
                self._driver.map(self.address + offset, shared)
                shown.append(offset)
            for first, end in _runs(shown, self.page):
                self._driver.allow(self.address + first, end - first)
            if shown:
                # Another process may have left NaN in this memory.
                self._driver.zero(self.address + shown[0], self.page)
            yield
        finally:
            self._driver.synchronize()
            for offset in shown:
                self._driver.unmap(self.address + offset)
            self._driver.release(shared)

    def tensor(self):
        """Return the pool's memory as int8, (nbytes,), on the current CUDA device. The pool must
        outlive the tensor, and only mapped pages may be touched. This maps the first page, because
        CUDA can't determine the device of an unmapped address."""
        import torch

        self.map([(0, self.page)])
        return torch.as_tensor(self, device=torch.device("cuda", torch.cuda.current_device()))

    @property
    def __cuda_array_interface__(self) -> dict:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|i1",
            "data": (self.address, False),
            "strides": None,
        }

    def close(self) -> None:
        """Release all memory, and free the addresses."""
        self._unmap(list(self._handles))
        self._driver.free(self.address, self.nbytes)

    def _check_spare(self, nbytes: int) -> None:
        """Raise `MemoryError` if `nbytes` more would leave less than `spare` bytes free."""
        if not nbytes or not self._spare:
            return
        available = self._driver.available()
        if available - nbytes < self._spare:
            raise MemoryError(
                f"{nbytes} bytes more of KV cache would leave less than {self._spare} bytes of the "
                f"GPU's memory to all else; {available} are free, {self.mapped_bytes} of "
                f"{self.nbytes} mapped"
            )

    def _map_page(self, offset: int) -> None:
        """Map new memory at the page `offset`."""
        handle = self._create()
        try:
            self._driver.map(self.address + offset, handle)
        except CudaError:
            self._driver.release(handle)
            raise
        self._handles[offset] = handle

    def _create(self) -> int:
        """Allocate the memory of one page. Raises `MemoryError` if the device has none."""
        try:
            return self._driver.create()
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise MemoryError(
                f"no GPU memory for another page of {self.page} bytes of KV cache "
                f"({self.mapped_bytes} of {self.nbytes} are mapped): {error}"
            ) from error

    def _unmap(self, offsets: list[int]) -> None:
        """Wait for the device, then unmap these pages and release their memory."""
        if not offsets:
            return
        self._driver.synchronize()
        for offset in offsets:
            self._driver.unmap(self.address + offset)
            self._driver.release(self._handles.pop(offset))

    def _checked(self, ranges: Ranges) -> Ranges:
        """Return `ranges`; raise `ValueError` unless they are whole pages of this pool."""
        for low, high in ranges:
            if not 0 <= low <= high <= self.nbytes or low % self.page or high % self.page:
                raise ValueError(
                    f"[{low}, {high}) is not a range of whole pages of {self.page} bytes in a pool "
                    f"of {self.nbytes}"
                )
        return ranges


def _runs(offsets: list[int], page: int) -> Ranges:
    """Join adjacent pages, ascending, to ranges."""
    runs: Ranges = []
    for offset in offsets:
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + page)
        else:
            runs.append((offset, offset + page))
    return runs


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):  # CUmemAllocationProp_v1
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):  # CUmemAccessDesc_v1
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_WORD, _SIZE, _POINTER = ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p
_CALLS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxSynchronize": (),
    "cuGetErrorName": (ctypes.c_int, _POINTER),
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, ctypes.c_int),
    "cuMemGetInfo_v2": (_POINTER, _POINTER),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _WORD, _WORD),
    "cuMemAddressFree": (_WORD, _SIZE),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, _WORD),
    "cuMemRelease": (_WORD,),
    "cuMemMap": (_WORD, _SIZE, _SIZE, _WORD, _WORD),
    "cuMemUnmap": (_WORD, _SIZE),
    "cuMemSetAccess": (_WORD, _SIZE, _POINTER, _SIZE),
    "cuStreamCreate": (_POINTER, ctypes.c_uint),
    "cuStreamSynchronize": (_POINTER,),
    "cuMemsetD8Async": (_WORD, ctypes.c_ubyte, _SIZE, _POINTER),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
    "cuMemHostGetDevicePointer_v2": (_POINTER, _POINTER, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (_POINTER, _WORD, ctypes.c_uint32, ctypes.c_uint),
}


class CudaDriver:
    """A `Driver` that calls libcuda in the device's primary context, which torch uses as well.
    vLLM's note in cumem.py that bindings from Python fail "because of context mismatch" is about
    calls without a context. `device` is CUDA's index among the visible devices. Raises `OSError`
    when the library can't be loaded, and `CudaError`."""

    def __init__(self, device: int, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _CALLS.items():
            getattr(self._library, name).argtypes = arguments
        self._call("cuInit", 0)
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number.value)
        self._context = context
        self._stream = ctypes.c_void_p()
        self._in_context("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        location = _Location(_DEVICE, number.value)
        self._properties = _AllocationProperties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        size = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(self._properties),
            _MINIMUM,
        )
        self.granularity = size.value

    def reserve(self, nbytes: int) -> int:
        return self._new(ctypes.c_ulonglong(), "cuMemAddressReserve", nbytes, 0, 0, 0)

    def free(self, address: int, nbytes: int) -> None:
        self._in_context("cuMemAddressFree", address, nbytes)

    def create(self) -> int:
        return self._new(
            ctypes.c_ulonglong(), "cuMemCreate", self.granularity, ctypes.byref(self._properties), 0
        )

    def release(self, handle: int) -> None:
        self._in_context("cuMemRelease", handle)

    def map(self, address: int, handle: int) -> None:
        self._in_context("cuMemMap", address, self.granularity, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        self._in_context("cuMemSetAccess", address, nbytes, ctypes.byref(self._access), 1)

    def unmap(self, address: int) -> None:
        self._in_context("cuMemUnmap", address, self.granularity)

    def zero(self, address: int, nbytes: int) -> None:
        self._in_context("cuMemsetD8Async", address, 0, nbytes, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def available(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._in_context("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def synchronize(self) -> None:
        self._in_context("cuCtxSynchronize")

    def lock(self, address: int, nbytes: int) -> int:
        """Lock pages of host memory, so that streams can wait for words in them. Return the first
        page's address on the device."""
        self._in_context("cuMemHostRegister_v2", address, nbytes, _LOCKED)
        return self._new(ctypes.c_ulonglong(), "cuMemHostGetDevicePointer_v2", address, 0)

    def wait(self, stream: int, address: int, bits: int) -> None:
        """Make `stream` wait until the 32-bit word at the device's `address` has any of `bits`. The
        device's context must be current in the calling thread."""
        self._call("cuStreamWaitValue32_v2", stream, address, bits, _ANY_BIT)

    def _new(self, value, call: str, *arguments) -> int:
        """Call the driver, which writes its result to `value`; return the result."""
        self._in_context(call, ctypes.byref(value), *arguments)
        return value.value

    def _in_context(self, call: str, *arguments) -> None:
        """Make the primary context current in this thread, then call the driver. torch makes it
        current only in threads in which torch works."""
        self._call("cuCtxSetCurrent", self._context)
        self._call(call, *arguments)

    def _call(self, call: str, *arguments) -> None:
        """Call the driver's function `call`. Raises `CudaError` if it fails."""
        code = getattr(self._library, call)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(call, code, (name.value or b"unknown error").decode())
