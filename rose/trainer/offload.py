"""A trainer rank's share of its device, given back whole and taken again.

DeepSpeed's own `offload_states` knows each state by name, and in ZeRO-3 wants DeepSpeed's
FusedAdam. Here no state is known: every storage of some size that any tensor of this process has on
the device goes to host memory and is shrunk to nothing, as FSDP does with parameters. Tensors,
views and flat buffers stay the same objects and see their values again once the storages have grown
and been filled. Nothing may run on the device between the two calls.

Host memory: on a GPU page-locked, in chunks that are kept; on a CPU, where host memory is what is
given back, a file without a name.
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

SMALLEST = 2**20  # bytes: smaller ones lie in pages of their own, which CUDA's allocator keeps
SMALLEST_CPU = 2**12  # a page
CHUNK = 2**30  # bytes of host memory taken at once
CHUNK_CPU = 2**26


class Offload:
    """Moves the trainer's memory of `device` to the host and back. `folder`: for the file, on a
    CPU. `own`: tensors that nobody but the trainer uses, even if their memory is not torch's (a
    model's file mapped into memory, a checkpoint's). `quiet` returns when no other thread reads
    tensors of the host, as one that writes a checkpoint's copies does; called on a CPU, where these
    can't be told from the trainer's states."""

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
        self._gone: list[tuple[torch.UntypedStorage, int]] = []  # with their bytes, in order
        self.away = False

    def give_back(self) -> DeviceMemory:
        """Everything to the host; the device's memory afterwards. Raises `RuntimeError` when there
        is too little host memory, and what `quiet` raises."""
        if not self.away:
            if self._device.type == "cpu":
                self._quiet()
            self._gone = [(storage, storage.nbytes()) for storage in self._storages()]
            for host, on_device in self._pieces():
                host.copy_(on_device, non_blocking=True)
            self._settle()
            for storage, nbytes in self._gone:
                if storage.resizable():
                    storage.resize_(0)
                else:  # on a CPU only
                    memory.release_pages([(storage.data_ptr(), nbytes)])
            self.away = True
        if self._device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        else:
            heap.release_free()
        return memory.device_memory(self._device)

    def take(self) -> DeviceMemory:
        """Everything back to the device; its memory afterwards.

        Raises `RuntimeError`, naming how much is free and wanted, when the device has too
        little."""
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
            self._settle()
            self._gone, self.away = [], False
        return memory.device_memory(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes that are on the host now."""
        return sum(nbytes for _, nbytes in self._gone)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """The tensors' storages on the device, once each. What can't shrink others may share
        (NumPy's views): it stays, unless it is the trainer's own."""
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
        """The process's tensors that Python knows, and their gradients."""
        gc.collect()
        for found in gc.get_objects():
            kind = type(found)  # not isinstance: it asks lazily loaded modules, which would load
            if issubclass(kind, Tensor) and not issubclass(kind, torch._subclasses.FakeTensor):
                yield found
                if found.is_leaf and found.grad is not None:
                    yield found.grad

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(of the host, of the device) bytes that belong together, over all that is gone."""
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
        """(bytes,) uint8 of host memory."""
        if self._device.type == "cpu":
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="offload-") as file:
                return torch.from_file(
                    file.name, shared=True, size=self._chunk_bytes, dtype=torch.uint8
                )
        chunk = torch.empty(self._chunk_bytes, dtype=torch.uint8)
        # torch's own page-locked memory comes in powers of two
        code = torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), self._chunk_bytes, 0)
        if int(code) != 0:
            print(
                f"page-locking {self._chunk_bytes / GIB:g} GiB failed (CUDA error {int(code)}; see "
                "ulimit -l): the turns take longer",
                flush=True,
            )
            with suppress(RuntimeError):  # CUDA would tell of it once more, at the next kernel
                torch.zeros(1, device=self._device)
        return chunk
