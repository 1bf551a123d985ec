"""Measure the few figures that decide how co-serving and weight transfer are built, in 60 s on one GPU.

    python scripts/gpu_kit/micro.py > micro.csv        # lines: part,figure,value,unit

Two parts, each reported as "ran,0" when it fails:

pages   microseconds to map and to release one page of the pool that lends KV memory.
online  step time of an online engine S beside a rollout engine R in another process. S is a CUDA
        graph of 28 layers of the decode products of a 7B model. R does nothing; or runs steps of
        512 tokens; or runs them with a stop between layers, where its stream waits on the device
        while S's flag is up; or maps and releases 256 MiB of pages.

vLLM is left out on purpose: what is measured is the device.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.stops import HIDDEN, INTERMEDIATE, LAYERS, PAUSE_S, graph

FLAG = "/dev/shm/rose-flag"
PHASE_S = 4.0  # seconds of S's steps beside each neighbour
UP, DOWN = b"\1\0\0\0", bytes(4)  # S's flag: R stops while it is up


def report(part: str, figure: str, value: float, unit: str = "") -> None:
    print(f"{part},{figure},{value:.5g},{unit}", flush=True)


def shared_flag(torch) -> tuple[mmap.mmap, int]:
    """Return the flag's page and its address, page-locked so that a CUDA stream can wait on it."""
    file = os.open(FLAG, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, mmap.PAGESIZE)
    page = mmap.mmap(file, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    portable_and_mapped = 3
    code = torch.cuda.cudart().cudaHostRegister(address, mmap.PAGESIZE, portable_and_mapped)
    if int(code):
        raise RuntimeError(f"cudaHostRegister of {FLAG} failed with {int(code)}")
    return page, address


def rollout_steps(torch, stops: bool):
    """Return a function that runs one step of R: 512 tokens through all layers."""
    _, address = shared_flag(torch)
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    wait.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint32, ctypes.c_uint]
    shape = (HIDDEN, 3 * INTERMEDIATE)
    matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    x = torch.randn(512, HIDDEN, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.current_stream()
    down, equal = 0, 1  # the stream waits until the word is equal to 0

    def step() -> None:
        for matrix in matrices:
            if stops and wait(stream.cuda_stream, address, down, equal):
                raise RuntimeError("cuStreamWaitValue32 failed")
            x @ matrix
        stream.synchronize()

    return step


def page_moves():
    """Return a function that maps and releases 256 MiB."""
    from rose.parts.lending.vllm.vmm import CudaDriver, PagePool

    pool = PagePool(CudaDriver(0), 2**28)

    def move() -> None:
        pool.map([(0, pool.nbytes)])
        pool.release([(0, pool.nbytes)])

    return move


def neighbour(kind: str, ready, stop) -> None:
    """Act as R until `stop` is set, and report the rate of its steps."""
    import torch

    torch.cuda.init()
    work = page_moves() if kind == "pages" else rollout_steps(torch, stops=kind == "stops")
    work()
    ready.set()
    done, began = 0, time.monotonic()
    while not stop.is_set():
        work()
        done += 1
    report(f"R ({kind})", "steps or moves a second", done / (time.monotonic() - began))


def step_times(step: Callable[[], None], page: mmap.mmap) -> list[float]:
    """Return the sorted milliseconds of S's steps during PHASE_S, with pauses between them."""
    took, end = [], time.monotonic() + PHASE_S
    while time.monotonic() < end:
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        page[:4] = UP
        step()
        page[:4] = DOWN
        took.append(1e3 * (time.perf_counter() - began))
    return sorted(took)


def online(torch) -> None:
    page, _ = shared_flag(torch)
    page[:4] = DOWN
    step, spawn = graph(torch), multiprocessing.get_context("spawn")
    for kind in ("nobody", "steps", "stops", "pages"):
        ready, stop, child = spawn.Event(), spawn.Event(), None
        if kind != "nobody":
            child = spawn.Process(target=neighbour, args=(kind, ready, stop), daemon=True)
            child.start()
            if not ready.wait(40):
                report(f"S beside {kind}", "ran", 0)
                child.kill()
                continue
        took = step_times(step, page)
        for percent in (50, 99):
            value = took[percent * (len(took) - 1) // 100]
            report(f"S beside {kind}", f"step P{percent}", value, "ms")
        if child:
            stop.set()
            child.join(10)
            child.kill()
    os.unlink(FLAG)


def pages(torch) -> None:
    from rose.parts.lending.vllm.vmm import CudaDriver, PagePool

    pool = PagePool(CudaDriver(0), 2**30)
    for _ in range(2):
        for name, work in (("map", pool.map), ("release", pool.release)):
            began = time.perf_counter()
            work([(0, pool.nbytes)])
            took = time.perf_counter() - began
            microseconds = 1e6 * took / (pool.nbytes // pool.page)
            report("pages", f"{name} a page of 2 MiB", microseconds, "us")


def main() -> None:
    import torch

    for part in (pages, online):
        try:
            part(torch)
        except Exception:
            traceback.print_exc()
            report(part.__name__, "ran", 0)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
