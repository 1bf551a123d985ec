"""Move a trainer rank's memory from its device to the host for an engine, and back.

DeepSpeed's own `offload_states` knows each state by name, and with ZeRO-3 it requires DeepSpeed's
FusedAdam. This file knows no states. It finds every storage of at least `SMALLEST` bytes that a
tensor of this process has on the device. It copies the storage to host memory and resizes it to 0,
as FSDP does. Tensors and views stay the same objects, and have their values again once the storages
are resized and filled. Nothing may run on the device between `give_back` and `take`.

For a GPU the copies are in page-locked host memory, in chunks that are kept for the next time. For
a CPU, where host memory itself must be released, they are in files without a name.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rose import heap, memory
from rose.memory import GIB, DeviceMemory

# Bytes of the smallest storage that is moved on a GPU. torch's allocator keeps smaller ones in
# pages of their own, which it would not release.
SMALLEST = 2**20
SMALLEST_CPU = 2**12  # bytes of a page: the smallest storage that is moved on a CPU
CHUNK = 2**30  # bytes of host memory that are allocated at once, on a GPU
CHUNK_CPU = 2**26  # bytes of a file on a CPU


class Offload:
    """Moves the trainer's memory of `device` to the host and back.

    `folder` is for the files, on a CPU. `own` returns tensors that only the trainer uses, even if
    torch did not allocate their memory (a file of a model or checkpoint, mapped into memory).
    `quiet` waits until no other thread reads tensors in host memory, as the writer of a checkpoint
    does. It is called on a CPU only, where a checkpoint's copies look like the trainer's states."""

    def __init__(
        self,
        device: torch.device,
        folder: Path | str,
        own: Callable[[], Iterable[Tensor]] = tuple,
        quiet: Callable[[], object] = lambda: None,
    ):
        self._device = device
        self._quiet = quiet
        self._folder = Path(folder)
        self._own = own
        on_gpu = device.type == "cuda"
        self._chunk_bytes = CHUNK if on_gpu else CHUNK_CPU
        self._smallest = SMALLEST if on_gpu else SMALLEST_CPU
        self._chunks: list[Tensor] = []
        self._gone: list[tuple[torch.UntypedStorage, int]] = []  # (storage, its bytes)
        self.away = False  # True while the memory is on the host

    def give_back(self) -> DeviceMemory:
        """Move everything to the host. Returns the device's memory afterwards. Raises
        `RuntimeError` when there is too little host memory, and what `quiet` raises."""
        if not self.away:
            if self._device.type == "cpu":
                self._quiet()
            self._gone = [(storage, storage.nbytes()) for storage in self._storages()]
            for host, on_device in self._pieces():
                host.copy_(on_device, non_blocking=True)
            self._synchronize()
            for storage, nbytes in self._gone:
                if storage.resizable():
                    storage.resize_(0)
                else:  # memory that torch did not allocate, on a CPU only
                    memory.release_pages([(storage.data_ptr(), nbytes)])
            self.away = True
        if self._device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        else:
            heap.release_free()
        return memory.device_memory(self._device)

    def take(self) -> DeviceMemory:
        """Move everything back to the device. Returns its memory afterwards.

        Raises `RuntimeError`, which says what is free and needed, if the device has too little."""
        if self.away:
            try:
                for storage, nbytes in self._gone:
                    if storage.nbytes() != nbytes:
                        storage.resize_(nbytes)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                found = memory.device_memory(self._device)
                raise RuntimeError(
                    f"the trainer's states need {self.nbytes / GIB:.1f} GiB of {self._device}, "
                    f"which has {found.free:.1f} of {found.total:.1f} GiB free after the engine's "
                    f"turn: {error}"
                ) from error
            for host, on_device in self._pieces():
                on_device.copy_(host, non_blocking=True)
            self._synchronize()
            self._gone, self.away = [], False
        return memory.device_memory(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the device that are on the host now."""
        return sum(nbytes for _, nbytes in self._gone)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield the tensors' storages on the device, once each. A storage that can't be resized may
        be shared (NumPy's views), so it is left out, unless it belongs to a tensor of `own`."""
        own = {tensor.untyped_storage().data_ptr() for tensor in self._own()}
        seen = {chunk.data_ptr() for chunk in self._chunks}
        for tensor in self._tensors():
            if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in seen or storage.nbytes() < self._smallest:
                continue
            seen.add(address)
            if storage.resizable() or address in own:
                yield storage

    @staticmethod
    def _tensors() -> Iterator[Tensor]:
        """Yield the tensors that Python's garbage collector knows, and their gradients."""
        gc.collect()
        for found in gc.get_objects():
            kind = type(found)  # isinstance would make lazily loaded modules load
            if issubclass(kind, Tensor) and not issubclass(kind, torch._subclasses.FakeTensor):
                yield found
                if found.is_leaf and found.grad is not None:
                    yield found.grad

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (piece of host memory, piece of a storage), both uint8, for all moved storages."""
        chunk, at = 0, 0
        for storage, nbytes in self._gone:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            while done < nbytes:
                if at == self._chunk_bytes:
                    chunk, at = chunk + 1, 0
                if chunk == len(self._chunks):
                    self._chunks.append(self._chunk())
                size = min(nbytes - done, self._chunk_bytes - at)
                yield self._chunks[chunk][at : at + size], whole[done : done + size]
                done, at = done + size, at + size

    def _chunk(self) -> Tensor:
        """Allocate a chunk of host memory, (bytes,) uint8."""
        if self._device.type == "cpu":
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="offload-") as file:
                return torch.from_file(
                    file.name, shared=True, size=self._chunk_bytes, dtype=torch.uint8
                )
        chunk = torch.empty(self._chunk_bytes, dtype=torch.uint8)
        # torch rounds its own page-locked memory up to powers of two.
        code = torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), self._chunk_bytes, 0)
        if int(code) != 0:
            print(
                f"page-locking {self._chunk_bytes / GIB:g} GiB failed (CUDA error {int(code)}; see "
                "ulimit -l): moving memory takes longer",
                flush=True,
            )
            with suppress(RuntimeError):  # the same error, which CUDA repeats at the next kernel
                torch.zeros(1, device=self._device)
        return chunk
