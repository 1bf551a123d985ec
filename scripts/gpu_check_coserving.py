"""gpu_check.py, co-serving: the page pool that lends KV memory on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from gpu_check_frame import Check, Report


class Pages(msgspec.Struct):
    nbytes: int


def pool(report: Report) -> None:
    import torch

    from rose.coserving.vmm import CudaDriver, PagePool

    torch.cuda.init()
    made = PagePool(CudaDriver(torch.cuda.current_device()), report.sizes.nbytes)
    report.figure("page", made.page / 2**20, "MiB")
    report.say(page_pool(made, lambda: torch.cuda.mem_get_info()[0]))


def page_pool(pool, free: Callable[[], int]) -> str:
    """Map, write, release, map again, close. `free`, the device's free bytes, must follow each of them, within a
    sixteenth of the pool for what the driver takes for itself."""
    half, told = pool.nbytes // 2 // pool.page * pool.page, []
    quarter = half // 2 // pool.page * pool.page

    def step(name: str, work: Callable, takes: int) -> None:
        before, began = free(), time.perf_counter()
        work()
        told.append(f"{name} {1e3 * (time.perf_counter() - began):.1f} ms")
        if abs((taken := before - free()) - takes) > pool.nbytes // 16:
            raise RuntimeError(f"page pool, {name}: took {taken} bytes of the device instead of {takes}")

    values = pool.tensor()
    step(f"map {half >> 20} MiB", lambda: pool.map([(0, half)]), half - pool.page)  # its first page was there
    if values[:half].any():
        raise RuntimeError("page pool: fresh pages are not zeros")
    values[:half] = 7
    step("release half of it", lambda: pool.release([(0, quarter)]), -quarter)
    if not (values[quarter:half] == 7).all():
        raise RuntimeError("page pool: pages that were kept lost their bytes")
    step("map it again", lambda: pool.map([(0, half)]), quarter)
    if values[:quarter].any():
        raise RuntimeError("page pool: pages mapped again are not zeros")
    values[:half] = 9
    if not (values[:half] == 9).all():
        raise RuntimeError("page pool: what was written is not what is read")
    del values
    step("close", pool.close, -half)
    return ", ".join(told)


CHECKS = (
    Check("pool", "the page pool that lends KV memory: mapped, released, and seen by the device", pool,
          {"cuda": Pages(2**30), "cpu": Pages(0)}, 90.0,
          "cuMemCreate and cuMemMap must work: drivers before 11.2 and some containers (gVisor) lack them",
          on_cpu=False, needs_model=False),
)
