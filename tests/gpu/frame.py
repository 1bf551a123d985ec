"""The frame of a check on a GPU: its figures, its report and its settings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rose.parts.simulator.hardware import GPUS

GIB = 2**30


class Setup(msgspec.Struct):
    """The settings of all checks. Written by the parent, read by each check's process."""

    device: str  # cuda or cpu
    gpus: int  # number of visible GPUs; 0 on a CPU
    gpu: str  # name of the first GPU; "cpu" on a CPU
    memory_gib: float | None  # GiB of the first GPU
    folder: str  # scratch folder, shared by the checks of one call
    model: str | None  # folder or hub id; if null, a model of Qwen3-0.6B's shape is created
    sizes: dict[str, dict[str, Any]]  # check -> its parameters
    driver: str = ""  # the driver's version; "" on a CPU, and where nvidia-smi is missing

    @property
    def rates(self) -> tuple[float, float] | tuple[None, None]:
        """The rates that the maker publishes: (dense bfloat16 FLOP/s, bytes/s of memory). Nulls for
        a device that is not in rose/parts/simulator/hardware.py."""
        words = self.gpu.replace("-", " ").split()
        found = [GPUS[word] for word in words if word in GPUS]
        return (found[0].flops, found[0].hbm_bytes_s) if found else (None, None)


class Figure(msgspec.Struct):
    """A measured value and the expected one. Without an expectation it is only reported."""

    name: str
    value: float | bool | str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    equal: bool | int | str | None = None
    bound: float | None = None  # largest value that arithmetic allows, from `source`
    source: str = ""
    remedy: str = ""

    @property
    def ok(self) -> bool:
        if self.equal is not None and self.value != self.equal:
            return False
        if isinstance(self.value, str | bool):
            return True
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    @property
    def measured(self) -> str:
        share = f" ({100 * self.value / self.bound:.0f} % of the bound)" if self.bound else ""
        return f"{_number(self.value)} {self.unit}".strip() + share

    @property
    def expected(self) -> str:
        if self.equal is not None:
            return _number(self.equal)
        words = []
        if self.least is not None:
            words.append(f">= {_number(self.least)}")
        if self.most is not None:
            words.append(f"<= {_number(self.most)}")
        if self.bound:
            words.append(f"bound {_number(self.bound)}")
        return ", ".join(words) + (f" ({self.source})" if self.source else "")


def _number(value: float | bool | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "nan"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


class Report:
    """The events of a check, each a dictionary that `tell` sends to scripts/gpu_check.py."""

    def __init__(self, setup: Setup, sizes: Any, tell: Callable[[dict], None]) -> None:
        self.setup, self.sizes, self._tell = setup, sizes, tell

    @property
    def folder(self) -> Path:
        return Path(self.setup.folder)

    @property
    def gpus(self) -> bool:
        return self.setup.device == "cuda"

    def say(self, words: str) -> None:
        self._tell({"say": words})

    def figure(self, name: str, value: float | bool | str, unit: str = "", **expected: Any) -> bool:
        """Report a value. True if it is as expected; the check continues in either case."""
        figure = Figure(name, value, unit, **expected)
        self._tell({"figure": msgspec.to_builtins(figure)})
        return figure.ok

    @contextmanager
    def took(self, name: str) -> Iterator[None]:
        """Report the seconds that the work within takes."""
        began = time.monotonic()
        yield
        self.figure(name, time.monotonic() - began, "s")

    def share(
        self,
        name: str,
        value: float,
        unit: str,
        bound: float | None,
        floor: float,
        source: str,
        remedy: str = "",
    ) -> bool:
        """Report a rate that should reach the share `floor` of `bound`, the limit of arithmetic.
        Without a bound, because the device's rates are unknown, it is only reported."""
        if bound is None:
            return self.figure(name, value, unit)
        return self.figure(
            name, value, unit, least=floor * bound, bound=bound, source=source, remedy=remedy
        )


class Check(msgspec.Struct, frozen=True):
    """A check: `work(report)`, which may be a coroutine, runs it. `sizes`: device -> parameters."""

    name: str
    what: str
    work: Callable[[Report], Any]
    sizes: dict[str, Any]
    deadline_s: float
    remedy: str
    least_gpus: int = 1  # least number of visible GPUs with --device cuda
    on_cpu: bool = True
    needs_model: bool = True

    def report(self, setup: Setup, tell: Callable[[dict], None]) -> Report:
        """Return the check's report, with the sizes that the command line asks for."""
        sizes = self.sizes[setup.device]
        given = msgspec.structs.asdict(sizes) | setup.sizes.get(self.name, {})
        return Report(setup, msgspec.convert(given, type(sizes)), tell)


def check(what: str, remedy: str, sizes: dict[str, Any], deadline_s: float = 240.0, **more: Any):
    """Return a decorator that makes a check of a function, which gives it its name."""

    def made(work: Callable[[Report], Any]) -> Check:
        return Check(work.__name__, what, work, sizes, deadline_s, remedy, **more)

    return made


def settle(device) -> None:
    """Wait until a device has done its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device, repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` calls, after one that is not counted."""
    work()
    best = float("inf")
    for _ in range(repeats):
        settle(device)
        began = time.perf_counter()
        work()
        settle(device)
        best = min(best, time.perf_counter() - began)
    return best
