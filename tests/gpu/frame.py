"""Run the checks of gpu_check.py, each in a process with a deadline; their reports; the table.

Imports neither torch nor vLLM. A check is a function of a `Report`. It reports figures with their
expected values, raises `Impossible` where this machine can't run it, and any other exception when
it fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rose.files import write_whole
from rose.parts.simulator.hardware import GPUS

REPOSITORY = Path(__file__).resolve().parents[2]
OK, FAILED, IMPOSSIBLE = "ok", "FAILED", "not possible here"
POLL_S = 0.1
LEAVE_S = 15.0  # seconds for a check's processes to end after the check or after SIGTERM
LOG_LINES = 25  # last lines of a failed check's output that are shown


class Impossible(Exception):
    """Raised by a check that this machine cannot run. The text gives the reason."""


class Setup(msgspec.Struct):
    """The settings of all checks. Written by the parent, read by each check's process."""

    device: str  # cuda or cpu
    gpus: int  # number of visible GPUs; 0 on a CPU
    gpu: str  # name of the first GPU; "cpu" on a CPU
    memory_gib: float | None  # GiB of the first GPU
    folder: str  # scratch folder, shared by the checks of one call
    model: str | None  # folder or hub id; if null, a model of Qwen3-0.6B's shape is created
    sizes: dict[str, dict[str, Any]]  # check -> its parameters

    @property
    def rates(self) -> tuple[float, float] | None:
        """The rates that the maker publishes: (dense bfloat16 FLOP/s, bytes/s of memory). None for
        a device that is not in rose/parts/simulator/hardware.py."""
        words = self.gpu.replace("-", " ").split()
        found = [GPUS[word] for word in words if word in GPUS]
        return (found[0].flops, found[0].hbm_bytes_s) if found else None


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
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


class Report:
    """The events of a check, written by its process. Each is a line of JSON in a file, so that no
    library's output can be taken for one."""

    def __init__(self, setup: Setup, sizes: Any, path: Path) -> None:
        self.setup, self.sizes, self._file = (
            setup,
            sizes,
            path.open("a", buffering=1, encoding="utf-8"),
        )

    @property
    def folder(self) -> Path:
        return Path(self.setup.folder)

    @property
    def gpus(self) -> bool:
        return self.setup.device == "cuda"

    def say(self, words: str) -> None:
        self._file.write(json.dumps({"say": words}) + "\n")

    def figure(self, name: str, value: float | bool | str, unit: str = "", **expected: Any) -> bool:
        """Report a value. True if it is as expected; the check continues in either case."""
        figure = Figure(name, value, unit, **expected)
        self._file.write(json.dumps({"figure": msgspec.to_builtins(figure)}) + "\n")
        return figure.ok

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

    def end(self, state: str, words: str = "") -> None:
        self._file.write(json.dumps({"end": state, "words": words}) + "\n")


class Check(msgspec.Struct, frozen=True):
    """A check: `work(report)` runs it. `sizes`: device -> its parameters."""

    name: str
    what: str
    work: Callable[[Report], None]
    sizes: dict[str, Any]
    deadline_s: float
    remedy: str
    least_gpus: int = 1  # least number of visible GPUs with --device cuda
    on_cpu: bool = True
    needs_model: bool = True


class Outcome(msgspec.Struct):
    name: str
    state: str
    words: str = ""
    seconds: float = 0.0
    remedy: str = ""
    log: str = ""
    figures: list[Figure] = []


def child(check: Check, setup_file: Path, events: Path) -> int:
    """Run the check itself, in its own process. Return its exit code."""
    setup = msgspec.json.decode(setup_file.read_bytes(), type=Setup)
    sizes = check.sizes[setup.device]
    given = {k: getattr(sizes, k) for k in sizes.__struct_fields__} | setup.sizes.get(
        check.name, {}
    )
    report = Report(setup, msgspec.convert(given, type(sizes)), events)
    try:
        check.work(report)
    except Impossible as error:
        report.end(IMPOSSIBLE, str(error))
    except BaseException as error:  # any exception is the result of the check
        traceback.print_exc()
        report.end(FAILED, f"{type(error).__name__}: {error}")
        return 1
    else:
        report.end(OK)
    return 0


def run(
    check: Check,
    setup: Setup,
    deadline_s: float,
    tell: Callable[[str], None],
    script: Path = REPOSITORY / "scripts" / "gpu_check.py",
) -> Outcome:
    """Run one check in a process (and session) of its own, and end it after `deadline_s`. The
    callback gets each line of progress. `script --child NAME SETUP EVENTS` calls `child`.

    The caller must have called `rose.processes.adopt_orphans`: so processes that the check leaves
    behind are found and ended, and the check fails.
    """
    if setup.device == "cpu" and not check.on_cpu:
        return Outcome(check.name, IMPOSSIBLE, "needs a GPU")
    if setup.device == "cuda" and setup.gpus < check.least_gpus:
        return Outcome(
            check.name, IMPOSSIBLE, f"needs {check.least_gpus} GPUs, {setup.gpus} visible"
        )
    folder = Path(setup.folder)
    setup_file, events, log = (
        folder / f"{check.name}.{end}" for end in ("setup.json", "events", "log")
    )
    setup_file.write_bytes(msgspec.json.encode(setup))
    events.touch()
    began = time.monotonic()
    with log.open("wb") as words:
        process = subprocess.Popen(
            [
                sys.executable,
                "-u",
                str(script),
                "--child",
                check.name,
                str(setup_file),
                str(events),
            ],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
        )
    outcome = Outcome(check.name, FAILED, remedy=check.remedy, log=str(log))
    try:
        _follow(process, events, outcome, began + deadline_s, tell)
        if process.poll() is None:
            outcome.state, outcome.words = FAILED, f"no end within {deadline_s:.0f} s"
        elif not outcome.words and outcome.state == FAILED:
            outcome.words = f"its process ended with code {process.returncode} without a word"
    finally:
        left = _end_all(process)
    if left and outcome.state == OK:
        outcome.state, outcome.words = FAILED, f"left processes behind: {'; '.join(left)}"
    if outcome.state == OK and (wrong := [f.name for f in outcome.figures if not f.ok]):
        outcome.state, outcome.words = FAILED, "not as expected: " + ", ".join(wrong)
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _follow(
    process: subprocess.Popen,
    events: Path,
    outcome: Outcome,
    end: float,
    tell: Callable[[str], None],
) -> None:
    """Follow the check's events until it ends or its deadline passes, and fill `outcome`."""
    with events.open() as file:
        rest, alive = "", True
        while alive and time.monotonic() < end:
            # Checked before the read, so that the last events are read, too.
            alive = process.poll() is None
            rest += file.read()
            *lines, rest = rest.split("\n")
            for line in map(json.loads, lines):
                if "say" in line:
                    tell(line["say"])
                elif "figure" in line:
                    figure = msgspec.convert(line["figure"], Figure)
                    outcome.figures.append(figure)
                    tell(
                        f"{figure.name}: {figure.measured}"
                        + ("" if figure.ok else f", NOT {figure.expected}")
                    )
                else:
                    outcome.state, outcome.words = line["end"], line["words"]
            if alive:
                time.sleep(POLL_S)


def _end_all(process: subprocess.Popen) -> list[str]:
    """End all processes of a check. Return those that outlived the check itself, as text."""
    late = process.poll() is None
    if late:
        process.terminate()
    gone = time.monotonic() + LEAVE_S
    while (left := _descendants()) and time.monotonic() < gone:
        time.sleep(POLL_S)
        process.poll()
    words = [] if late else [f"{one.pid} {_command(one)}" for one in left]
    while left := _descendants():  # repeated for children of killed processes, which are adopted
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, POLL_S)
        process.poll()
    return words


def _descendants() -> list[psutil.Process]:
    """Return the living descendants of this process, and reap the dead ones."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
            elif one.ppid() == os.getpid():
                with suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
    return found


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:80]
    return "?"


# --------------------------------------------------------------------------- what the user reads


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a table of checks: state, values and expectations, reasons and remedies."""
    rows: list[tuple[str, str, str, str]] = [("check", "state", "measured", "expected")]
    for one in outcomes:
        why = f": {one.words}" if one.words else ""
        rows.append(
            (
                one.name,
                one.state + (f" {one.seconds:.0f} s" if one.seconds else ""),
                why.lstrip(": "),
                "",
            )
        )
        for figure in one.figures:
            mark = "" if figure.ok else "FAILED"
            rows.append(("", mark, f"{figure.name}: {figure.measured}", figure.expected))
            if not figure.ok and figure.remedy:
                rows.append(("", "", f"  -> {figure.remedy}", ""))
        if one.state == FAILED:
            rows += [
                ("", "", f"  -> {one.remedy}", ""),
                ("", "", f"  -> all of its output: {one.log}", ""),
            ]
    widths = [max(len(row[at]) for row in rows if len(row[at]) <= 60) for at in range(3)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=False)
        ).rstrip()
        for row in rows
    )


def tail(log: str) -> str:
    lines = Path(log).read_text(errors="replace", encoding="utf-8").splitlines()[-LOG_LINES:]
    return "\n".join(f"    | {line}" for line in lines)


def write_json(path: Path, setup: Setup, outcomes: list[Outcome]) -> None:
    """Write all figures so far, after each check, so that an interrupted run keeps them."""
    found = [
        msgspec.to_builtins(one)
        | {
            "figures": [
                msgspec.to_builtins(figure)
                | {"ok": figure.ok, "share": figure.value / figure.bound if figure.bound else None}
                for figure in one.figures
            ]
        }
        for one in outcomes
    ]
    content = {
        "device": setup.device,
        "gpus": setup.gpus,
        "gpu": setup.gpu,
        "memory_gib": setup.memory_gib,
        "ok": all(one.state != FAILED for one in outcomes),
        "checks": found,
    }
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
