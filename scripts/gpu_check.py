"""Check which of ROSE's GPU paths work on this machine: the first thing to run before a long job.

    python scripts/gpu_check.py                       # all checks that this machine can run; one GPU is enough
    python scripts/gpu_check.py engine trainer        # only these
    python scripts/gpu_check.py --list                # the names of all checks
    python scripts/gpu_check.py --json figures.json --minutes 8
    python scripts/gpu_check.py --device cpu          # the same code on the CPU, with the tiny model

Each check runs in a process of its own with a deadline: a check that hangs or crashes does not end
the others. At the end a table shows for each check ok / FAILED / not possible here, measured and
expected values, and the remedy for a failure. Speeds are compared with the limit that arithmetic
sets on this GPU (published HBM bandwidth and dense bfloat16 rate, in rose/parts/simulator/hardware.py); a check
passes from a low share of that limit. Exit code 1 if any check failed, 2 for a wrong command line.

The model is a random one of the shape of Qwen3-0.6B, created in a scratch folder (nothing is
downloaded), or --model FOLDER or hub id. Left out: several nodes (python -m rose.doctor
cluster=slurm), and whether training learns.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.processes import adopt_orphans
from tests.gpu import coserving as gpu_check_coserving
from tests.gpu import digests as gpu_check_digests
from tests.gpu import drafts as gpu_check_drafts
from tests.gpu import engine as gpu_check_engine
from tests.gpu import experts as gpu_check_experts
from tests.gpu import fused as gpu_check_fused
from tests.gpu import jobs as gpu_check_jobs
from tests.gpu import lora as gpu_check_lora
from tests.gpu import machine as gpu_check_machine
from tests.gpu import model as gpu_check_model
from tests.gpu import trainer as gpu_check_trainer
from tests.gpu.frame import (
    FAILED,
    IMPOSSIBLE,
    Check,
    Outcome,
    Setup,
    child,
    run,
    table,
    tail,
    write_json,
)

CHECKS = {
    check.name: check
    for check in (
        *gpu_check_machine.FIRST,
        gpu_check_model.MODEL,
        *gpu_check_trainer.CHECKS,
        *gpu_check_experts.CHECKS,
        *gpu_check_fused.CHECKS,
        *gpu_check_digests.CHECKS,
        *gpu_check_engine.CHECKS,
        *gpu_check_lora.CHECKS,
        *gpu_check_drafts.CHECKS,
        *gpu_check_coserving.CHECKS,
        *gpu_check_jobs.CHECKS,
        *gpu_check_machine.LAST,
    )
}
SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SMI_S = 60.0
TORCH = (
    "import torch; [print(torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)[1] >> 20, "
    "sep=',') for i in range(torch.cuda.device_count())]"
)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--child"]:
        name, setup, events = argv[1:]
        return child(CHECKS[name], Path(setup), Path(events))
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
    gpu, memory, count = "cpu", None, 0
    if arguments.device == "cuda":
        listed = lines(SMI)
        count = gpu_check_machine.visible(len(listed))
        if not listed:
            listed = lines((sys.executable, "-c", TORCH))  # visible GPUs only
            count = len(listed)
        gpu, memory = (listed[0][0], float(listed[0][1]) / 1024) if listed else ("none", None)
    return Setup(
        arguments.device, count, gpu, memory, str(scratch), arguments.model, arguments.sizes
    )


def lines(command: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return (name, MiB) of each GPU, as `command` prints them; nothing if it fails."""
    try:
        words = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        tuple(part.strip() for part in line.split(","))
        for line in words.splitlines()
        if line.count(",") == 1
    ]


def chosen(names: list[str]) -> list[Check]:
    checks = [CHECKS[name] for name in names] if names else list(CHECKS.values())
    if any(check.needs_model for check in checks) and gpu_check_model.MODEL not in checks:
        checks.insert(0, gpu_check_model.MODEL)
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
            min(left, check.deadline_s),
            lambda words: print(f"  {time.monotonic() - began:5.0f} s  {words}", flush=True),
        )
        outcomes.append(outcome)
        why = f": {outcome.words}" if outcome.words else ""
        print(f"{check.name}: {outcome.state}{why} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.state == FAILED:
            print(tail(outcome.log) + f"\n  -> {outcome.remedy}", flush=True)
            if check.name in gpu_check_machine.ALL_NEED or check is gpu_check_model.MODEL:
                stop = f"{check.name} failed"
        if arguments.json:
            write_json(arguments.json, setup, outcomes)
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
