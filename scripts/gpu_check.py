"""Check which of ROSE's GPU paths work on this machine: the first thing to run before a long job.

    python scripts/gpu_check.py                       # all checks that this machine can run; one GPU is enough
    python scripts/gpu_check.py engine trainer        # only these
    python scripts/gpu_check.py --list                # the names of all checks
    python scripts/gpu_check.py --json figures.json
    python scripts/gpu_check.py --device cpu          # the same code on the CPU, with the tiny model

Each check (tests/gpu/) is run by pytest in a process of its own with a deadline, so that one that
hangs or crashes does not end the others. docs/gpu.md has the options and what is compared. Exit
code 1 if any check failed, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.files import write_whole
from rose.processes import adopt_orphans
from scripts.harness import REPOSITORY, Child, Failed
from tests import processes
from tests.gpu.frame import Check, Figure, Setup
from tests.gpu.machine import ALL_NEED, versions, visible
from tests.gpu.model import MODEL
from tests.gpu.test_gpu import CHECKS

OK, FAILED, IMPOSSIBLE = "ok", "FAILED", "not possible here"
# pytest's outcomes, as the table shows them.
STATES = {"passed": OK, "failed": FAILED, "skipped": IMPOSSIBLE}
LEAVE_S = 15.0  # seconds for a check's processes to end after the check or after SIGTERM
# A check takes longer on a CPU, where other work shares the cores.
CPU_TIMES = 4
LOG_LINES = 25  # last lines of a failed check's output that are shown
QUERY = "--query-gpu=name,memory.total,driver_version"
SMI = ("nvidia-smi", QUERY, "--format=csv,noheader,nounits")
SMI_S = 60.0
TORCH = (
    "import torch; [print(torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)[1] >> 20, "
    "'', sep=',') for i in range(torch.cuda.device_count())]"
)


class Outcome(msgspec.Struct):
    name: str
    state: str
    words: str = ""
    seconds: float = 0.0
    remedy: str = ""
    log: str = ""
    figures: list[Figure] = []


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.list:
        for check in CHECKS.values():
            print(f"{check.name:10} {check.what}; at most {check.deadline_s:.0f} s")
        return 0
    adopt_orphans()
    scratch = Path(tempfile.mkdtemp(prefix="rose-gpu-check-", dir=arguments.folder))
    failed = True
    try:
        setup = look(arguments, scratch)
        outcomes = run_all(chosen(arguments.checks), setup, arguments.json)
        print(f"\n{table(outcomes)}")
        names = ", ".join(one.name for one in outcomes if one.state == FAILED)
        failed = bool(names)
        said = f"FAILED: {names}" if failed else "all ok"
        print(f"\n{setup.gpus or 'no'} GPUs ({setup.gpu}): {said}")
    finally:
        # The model and the stores take gigabytes. Logs are kept until all checks have passed, also
        # when this is interrupted.
        folders = [path for path in scratch.iterdir() if path.is_dir()] if failed else [scratch]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="of --list; none: all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", help="folder or hub id; else one is made")
    parser.add_argument("--json", type=Path, help="file of all figures, written after every check")
    parser.add_argument("--folder", type=Path, help="for the scratch folder (5 GB), not TMPDIR")
    parser.add_argument("--set", action="append", default=[], metavar="CHECK.SIZE=VALUE")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.checks) - set(CHECKS):
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    arguments.sizes = {}
    sizes = {name: c.sizes[arguments.device].__struct_fields__ for name, c in CHECKS.items()}
    for word in arguments.set:
        key, _, value = word.partition("=")
        name, _, size = key.partition(".")
        if size not in sizes.get(name, ()):
            known = ", ".join(f"{name}.{size}" for name, own in sizes.items() for size in own)
            parser.error(f"--set {word}: no such size; there are {known}")
        arguments.sizes.setdefault(name, {})[size] = yaml.safe_load(value)
    return arguments


def look(arguments: argparse.Namespace, scratch: Path) -> Setup:
    """Return the device's name, memory and count, and the command line's choices. Without
    nvidia-smi, torch is asked, in a process of its own."""
    gpu, memory, count, driver = "cpu", None, 0, ""
    if arguments.device == "cuda":
        listed = lines(SMI)
        count = visible(len(listed))
        if not listed:
            listed = lines((sys.executable, "-c", TORCH))  # visible GPUs only
            count = len(listed)
        gpu, mib, driver = listed[0] if listed else ("none", "", "")
        memory = float(mib) / 1024 if mib else None
    folder, sizes = str(scratch), arguments.sizes
    return Setup(arguments.device, count, gpu, memory, folder, arguments.model, sizes, driver)


def lines(command: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return (name, MiB, driver's version) of each GPU, as `command` prints them; nothing if it
    fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return [tuple(map(str.strip, row)) for row in rows if len(row) == 3]


def chosen(names: list[str]) -> list[Check]:
    checks = [CHECKS[name] for name in names] if names else list(CHECKS.values())
    if any(check.needs_model for check in checks) and MODEL not in checks:
        checks.insert(0, MODEL)
    return checks


def run_all(checks: list[Check], setup: Setup, file: Path | None) -> list[Outcome]:
    """Run the checks, and write their figures to `file`."""
    began, outcomes, stop = time.monotonic(), list[Outcome](), ""

    def tell(words: str) -> None:
        print(f"  {time.monotonic() - began:5.0f} s  {words}", flush=True)

    for check in checks:
        if stop:
            outcomes.append(Outcome(check.name, IMPOSSIBLE, stop))
            continue
        print(f"{check.name}: {check.what}", flush=True)
        times = CPU_TIMES if setup.device == "cpu" else 1
        outcome = run(check, setup, times * check.deadline_s, tell)
        outcomes.append(outcome)
        why = f": {outcome.words}" if outcome.words else ""
        print(f"{check.name}: {outcome.state}{why} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.state == FAILED:
            print(tail(outcome.log) + f"\n  -> {outcome.remedy}", flush=True)
            if check.name in ALL_NEED or check is MODEL:
                stop = f"{check.name} failed"
        if file:
            write_json(file, setup, outcomes)
    return outcomes


def run(
    check: Check,
    setup: Setup,
    deadline_s: float,
    tell: Callable[[str], None],
    file: str = "test_gpu.py",
) -> Outcome:
    """Run one check by pytest in a process (and session) of its own, and end it after `deadline_s`.
    The callback gets each line of progress. `file` of tests/gpu has the check.

    The caller must have called `rose.processes.adopt_orphans`: so processes that the check leaves
    behind are found and ended, and the check fails.
    """
    given, log = (Path(setup.folder) / f"{check.name}.{end}" for end in ("setup.json", "log"))
    given.write_bytes(msgspec.json.encode(setup))
    folder = f"{REPOSITORY}/tests/gpu"
    options = ["-s", "-p", "no:cacheprovider", "-o", "timeout=0", f"--confcutdir={folder}"]
    test = f"{folder}/{file}::test_gpu[{check.name}]"
    command = [sys.executable, "-u", "-m", "pytest", *options, test]
    outcome = Outcome(check.name, FAILED, remedy=check.remedy, log=str(log))
    began = time.monotonic()
    child = Child(check.name, command, log, {"ROSE_GPU_SETUP": str(given)}, start_new_session=True)
    try:
        while "end" not in (told := child.answer(began + deadline_s - time.monotonic())):
            if "say" in told:
                tell(told["say"])
                continue
            figure = msgspec.convert(told["figure"], Figure)
            outcome.figures.append(figure)
            wrong = "" if figure.ok else f", NOT {figure.expected}"
            tell(f"{figure.name}: {figure.measured}{wrong}")
        outcome.state, outcome.words = STATES[told["end"]], told["words"]
        child.popen.wait(max(1.0, began + deadline_s - time.monotonic()))
    except (Failed, subprocess.TimeoutExpired):
        ended = child.popen.poll()
        outcome.state, outcome.words = FAILED, f"no end within {deadline_s:.0f} s"
        if ended is not None:
            outcome.words = f"its process ended with code {ended} without a word"
        child.popen.terminate()
    finally:
        left = processes.left(lambda: processes.children(recursive=True), LEAVE_S)
        names = "; ".join(" ".join(processes.words(one))[:80] for one in left)
        processes.kill_family(os.getpid(), itself=False)
        child.end()
    if left and outcome.state == OK:
        outcome.state, outcome.words = FAILED, f"left processes behind: {names}"
    if outcome.state == OK and (names := ", ".join(f.name for f in outcome.figures if not f.ok)):
        outcome.state, outcome.words = FAILED, f"not as expected: {names}"
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a table of checks: state, values and expectations, reasons and remedies."""
    rows = [("check", "state", "measured", "expected")]
    for one in outcomes:
        took = f" {one.seconds:.0f} s" if one.seconds else ""
        rows.append((one.name, one.state + took, one.words, ""))
        for figure in one.figures:
            mark = "" if figure.ok else "FAILED"
            rows.append(("", mark, f"{figure.name}: {figure.measured}", figure.expected))
            if not figure.ok and figure.remedy:
                rows.append(("", "", f"  -> {figure.remedy}", ""))
        if one.state == FAILED:
            more = one.remedy, f"all of its output: {one.log}"
            rows += [("", "", f"  -> {words}", "") for words in more]
    widths = [max(len(row[at]) for row in rows if len(row[at]) <= 60) for at in range(3)]
    padded = ([cell.ljust(n) for cell, n in zip(row, [*widths, 0], strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def tail(log: str) -> str:
    lines = Path(log).read_text(errors="replace", encoding="utf-8").splitlines()[-LOG_LINES:]
    return "\n".join(f"    | {line}" for line in lines)


def write_json(path: Path, setup: Setup, outcomes: list[Outcome]) -> None:
    """Write all figures so far, after each check, so that an interrupted run keeps them."""

    def shown(figure: Figure) -> dict[str, Any]:
        share = figure.value / figure.bound if figure.bound else None
        return msgspec.to_builtins(figure) | {"ok": figure.ok, "share": share}

    content = {key: getattr(setup, key) for key in ("device", "gpus", "gpu", "memory_gib")}
    content |= {"versions": versions(setup), "ok": all(one.state != FAILED for one in outcomes)}
    content["checks"] = [
        msgspec.to_builtins(one) | {"figures": [shown(figure) for figure in one.figures]}
        for one in outcomes
    ]
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
