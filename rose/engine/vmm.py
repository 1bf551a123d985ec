"""GPU memory that really goes back to the system: a pool of pages over CUDA's virtual memory
management.

Addresses are reserved once, so that tensors, kernels and captured CUDA graphs keep theirs; the
memory behind each page (2 MiB on today's GPUs) is created and mapped, unmapped and released on
demand (CUDA driver API, section "Virtual Memory Management").

Why an own pool: kvcached 0.1.6 does this for vLLM, but replaces vLLM's block pool and decides by
itself what to map, for vLLM up to 0.24, where here the scheduler decides block by block; vLLM's
CuMemAllocator and torch-memory-saver give back whole allocations, and torch's expandable segments
only what no tensor uses. The driver is called through libcuda's stable C interface: the same
library that CUDA itself comes with, and no package more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rose.memory import Ranges

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
SPARE = 2**28  # bytes of a GPU that no KV cache takes: kernels are loaded late, allocators grow
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: waits for no other stream


class CudaError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Driver(Protocol):
    """The calls of CUDA's driver that the pool needs, on one device. Each raises `CudaError`.

    CUDA's rules: sizes and addresses are multiples of `granularity`; a page of addresses is mapped
    at most once, and is accessible only after `allow`; one handle may be mapped at several pages,
    which then show the same bytes; an unmap takes back exactly what one map mapped, with no kernel
    using it; memory is free once it is unmapped everywhere and its handle released; addresses are
    freed with nothing mapped in them.
    """

    granularity: int  # bytes

    def reserve(self, nbytes: int) -> int: ...

    def free(self, address: int, nbytes: int) -> None: ...

    def create(self) -> int:
        """A handle of `granularity` bytes of physical memory."""

    def release(self, handle: int) -> None: ...

    def map(self, address: int, handle: int) -> None: ...

    def allow(self, address: int, nbytes: int) -> None: ...

    def unmap(self, address: int) -> None: ...

    def zero(self, address: int, nbytes: int) -> None:
        """Done when it returns; doesn't wait for what else the device does."""

    def available(self) -> int:
        """Bytes of the device that nobody has."""

    def synchronize(self) -> None:
        """Waits until the device has done all that was submitted to it, on all streams."""


class PagePool:
    """A `blocks.Pool` of at least `nbytes` of GPU memory, none of it there at first. `spare`: bytes
    of the device that it leaves to others.

    When a page may be unmapped: after every kernel that was given its address, which `release`
    waits for by itself. So whoever calls it must have submitted those kernels. vLLM's scheduler
    plans a step while the last one runs, and frees the blocks of a request that has ended though
    that step still writes to them; but it hands each step to the workers before it plans the next,
    and they carry orders out in that order. A release out of `schedule` is therefore behind
    all steps planned so far.
    """

    def __init__(self, driver: Driver, nbytes: int, spare: int = 0) -> None:
        self._driver, self.page, self._spare = driver, driver.granularity, spare
        self.nbytes = -(-nbytes // self.page) * self.page
        self.address = driver.reserve(self.nbytes)
        self._handles: dict[int, int] = {}  # offset of a mapped page -> its memory

    @property
    def mapped_bytes(self) -> int:
        return len(self._handles) * self.page

    def map(self, ranges: Ranges) -> None:
        """Pages that are mapped already stay as they are; fresh ones are zeros.

        Raises `MemoryError` when the device has no more than is to be spared, `CudaError`; what
        this call mapped is taken back then.
        """
        parts = [
            [offset for offset in range(low, high, self.page) if offset not in self._handles]
            for low, high in self._within(ranges)
        ]
        self._check_spare(self.page * sum(map(len, parts)))
        fresh: list[int] = []
        try:
            for new in parts:
                for offset in new:
                    self._back(offset)
                    fresh.append(offset)
                for first, end in _runs(new, self.page):
                    self._driver.allow(self.address + first, end - first)
                    self._driver.zero(self.address + first, end - first)
        except (CudaError, MemoryError):
            self._drop(fresh)
            raise

    def release(self, ranges: Ranges) -> None:
        """Waits for the device, then gives these pages back, if mapped. Raises `CudaError`."""
        gone = [
            offset
            for low, high in self._within(ranges)
            for offset in range(low, high, self.page)
            if offset in self._handles
        ]
        if gone:
            self._drop(gone)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Every page may be touched meanwhile: those without memory share one page of it, and what
        is written there is lost. Raises `MemoryError`, `CudaError`."""
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
                # not what another process left: it may be NaN
                self._driver.zero(self.address + shown[0], self.page)
            yield
        finally:
            self._driver.synchronize()
            for offset in shown:
                self._driver.unmap(self.address + offset)
            self._driver.release(shared)

    def tensor(self):
        """int8, (nbytes,) on the current CUDA device; the pool must outlive it, as must the pages
        that it touches.

        Maps the first page: CUDA can't tell the device of an address without memory.
        """
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
        """Give back everything, addresses too."""
        self._drop(list(self._handles))
        self._driver.free(self.address, self.nbytes)

    def _check_spare(self, nbytes: int) -> None:
        if not nbytes or not self._spare:
            return
        available = self._driver.available()
        if available - nbytes < self._spare:
            raise MemoryError(
                f"{nbytes} bytes more of KV cache would leave less than {self._spare} bytes of the "
                f"GPU's memory to all else; {available} are free, {self.mapped_bytes} of "
                f"{self.nbytes} mapped"
            )

    def _back(self, offset: int) -> None:
        handle = self._create()
        try:
            self._driver.map(self.address + offset, handle)
        except CudaError:
            self._driver.release(handle)
            raise
        self._handles[offset] = handle

    def _create(self) -> int:
        try:
            return self._driver.create()
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise MemoryError(
                f"no GPU memory for another page of {self.page} bytes of KV cache "
                f"({self.mapped_bytes} of {self.nbytes} are mapped): {error}"
            ) from error

    def _drop(self, offsets: list[int]) -> None:
        if not offsets:
            return
        self._driver.synchronize()
        for offset in offsets:
            self._driver.unmap(self.address + offset)
            self._driver.release(self._handles.pop(offset))

    def _within(self, ranges: Ranges) -> Ranges:
        for low, high in ranges:
            if not 0 <= low <= high <= self.nbytes or low % self.page or high % self.page:
                raise ValueError(
                    f"[{low}, {high}) is not a range of whole pages of {self.page} bytes in a pool "
                    f"of {self.nbytes}"
                )
        return ranges


def _runs(offsets: list[int], page: int) -> Ranges:
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
}


class CudaDriver:
    """`Driver` over libcuda, in the primary context, which is torch's too: vLLM's note on cumem.py
    that bindings from Python fail "because of context mismatch" is about calls without one.
    `device` is CUDA's number among the visible.

    Raises `OSError` when there is no such library, `CudaError`.
    """

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

    def _new(self, value, call: str, *arguments) -> int:
        self._in_context(call, ctypes.byref(value), *arguments)
        return value.value

    def _in_context(self, call: str, *arguments) -> None:
        """torch keeps the primary context current where it works; another thread may have none."""
        self._call("cuCtxSetCurrent", self._context)
        self._call(call, *arguments)

    def _call(self, call: str, *arguments) -> None:
        code = getattr(self._library, call)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(call, code, (name.value or b"unknown error").decode())
