"""Check which of ROSE's GPU paths work on this machine: the first thing to run before a long job.

    python scripts/gpu_check.py                       # all checks that this machine can run; one GPU is enough
    python scripts/gpu_check.py engine trainer        # only these
    python scripts/gpu_check.py --list                # the names of all checks
    python scripts/gpu_check.py --json figures.json --minutes 8
    python scripts/gpu_check.py --device cpu          # the same code on the CPU, with the tiny model

Each check (tests/gpu/) is run by pytest in a process of its own with a deadline: a check that hangs or crashes does not end
the others. At the end a table shows for each check ok / FAILED / not possible here, measured and
expected values, and the remedy for a failure. Speeds are compared with the limit that arithmetic
sets on this GPU (published HBM bandwidth and dense bfloat16 rate, in rose/parts/simulator/hardware.py); a check
passes from a low share of that limit. Exit code 1 if any check failed, 2 for a wrong command line.

The model is a random one of the shape of Qwen3-0.6B, created in a scratch folder (nothing is
downloaded), or --model FOLDER or hub id. Left out: several nodes (rose doctor
cluster=slurm), and whether training learns.
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
SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)
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
        print(
            "\n".join(
                f"{c.name:10} {c.what}; at most {c.deadline_s:.0f} s" for c in CHECKS.values()
            )
        )
        return 0
    adopt_orphans()
    scratch = Path(tempfile.mkdtemp(prefix="rose-gpu-check-", dir=arguments.folder))
    # Logs are kept until all checks have passed, also when this is interrupted.
    failed = True
    try:
        setup = look(arguments, scratch)
        outcomes = run_all(chosen(arguments.checks), setup, arguments)
        print(f"\n{table(outcomes)}")
        names = [one.name for one in outcomes if one.state == FAILED]
        failed = bool(names)
        print(
            f"\n{setup.gpus or 'no'} GPUs ({setup.gpu}): "
            + (f"FAILED: {', '.join(names)}" if failed else "all ok")
        )
    finally:
        clear(scratch, logs=not failed)
    return int(failed)


def clear(scratch: Path, logs: bool) -> None:
    """Remove the model and the stores, which take gigabytes; with `logs`, the whole folder."""
    for path in scratch.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    if logs:
        shutil.rmtree(scratch, ignore_errors=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="of --list; none: all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", help="folder or hub id; else one is made")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="all figures, written after every check"
    )
    parser.add_argument(
        "--minutes", type=float, help="no check begins, and none goes on, after so long"
    )
    parser.add_argument(
        "--folder", type=Path, help="for the scratch folder (5 GB); default: TMPDIR"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="CHECK.SIZE=VALUE", help="as engine.turns=16"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.checks) - set(CHECKS):
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    arguments.sizes = {}
    for word in arguments.set:
        key, _, value = word.partition("=")
        name, _, size = key.partition(".")
        if name not in CHECKS or size not in CHECKS[name].sizes[arguments.device].__struct_fields__:
            known = [
                f"{c.name}.{s}"
                for c in CHECKS.values()
                for s in c.sizes[arguments.device].__struct_fields__
            ]
            parser.error(f"--set {word}: no such size; there are {', '.join(known)}")
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
        words = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        tuple(part.strip() for part in line.split(","))
        for line in words.splitlines()
        if line.count(",") == 2
    ]


def chosen(names: list[str]) -> list[Check]:
    checks = [CHECKS[name] for name in names] if names else list(CHECKS.values())
    if any(check.needs_model for check in checks) and MODEL not in checks:
        checks.insert(0, MODEL)
    return checks


def run_all(checks: list[Check], setup: Setup, arguments: argparse.Namespace) -> list[Outcome]:
    began, outcomes, stop = time.monotonic(), [], ""
    for check in checks:
        left = (
            float("inf")
            if arguments.minutes is None
            else began + 60 * arguments.minutes - time.monotonic()
        )
        if left < 1 or stop:
            outcomes.append(
                Outcome(
                    check.name, IMPOSSIBLE, stop or f"--minutes {arguments.minutes:g} were over"
                )
            )
            continue
        print(f"{check.name}: {check.what}", flush=True)
        outcome = run(
            check,
            setup,
            min(left, check.deadline_s * (CPU_TIMES if setup.device == "cpu" else 1)),
            lambda words: print(f"  {time.monotonic() - began:5.0f} s  {words}", flush=True),
        )
        outcomes.append(outcome)
        why = f": {outcome.words}" if outcome.words else ""
        print(f"{check.name}: {outcome.state}{why} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.state == FAILED:
            print(tail(outcome.log) + f"\n  -> {outcome.remedy}", flush=True)
            if check.name in ALL_NEED or check is MODEL:
                stop = f"{check.name} failed"
        if arguments.json:
            write_json(arguments.json, setup, outcomes)
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
    test = f"{REPOSITORY}/tests/gpu/{file}::test_gpu[{check.name}]"
    options = [
        "-s",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=0",
        f"--confcutdir={REPOSITORY}/tests/gpu",
    ]
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
        outcome.state = FAILED
        outcome.words = (
            f"no end within {deadline_s:.0f} s"
            if ended is None
            else f"its process ended with code {ended} without a word"
        )
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
        "versions": versions(setup),
        "ok": all(one.state != FAILED for one in outcomes),
        "checks": found,
    }
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
