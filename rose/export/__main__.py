"""Write a run's policy as a Hugging Face folder, which transformers and vLLM load, and from which
another run may start. For a LoRA run this is the adapter, for PEFT and vLLM, or the merged model.

    python -m rose.export outputs/NAME --out DIR              the newest step that is available
    python -m rose.export outputs/NAME --step 40 --out DIR
    python -m rose.export outputs/NAME --merge --out DIR      LoRA run: the model with the adapter
    python -m rose.export outputs/NAME --best --out DIR       best held-out reward (eval.keep_best)

Works during the run or after it, on a machine without GPUs, with memory for one shard. The weights
come from the run's weight store, which has the last versions, or from a checkpoint; the command
prints which. Each block of values is compared with its hash in the engines. DIR appears once it is
complete.

    0 written   1 not available, or damaged   2 bad arguments
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rose.config import ConfigError
from rose.files import advice, at_home
from rose.observe import held_out
from rose.observe.metrics import read_metrics

SHARD_GIB = 4.0  # default of --shard-gib
MOST_GIB = 1e6  # largest --shard-gib


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rose.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=at_home, help="the run's folder, as outputs/NAME")
    add("--out", metavar="DIR", type=at_home, required=True, help="a new or an empty folder")
    add("--step", metavar="N", type=int, help="default: the newest that is available")
    add("--best", action="store_true", help="the step with the highest held-out mean reward")
    add(
        "--shard-gib",
        metavar="GIB",
        type=float,
        default=SHARD_GIB,
        help=f"size of a file of weights, and memory needed; default {SHARD_GIB:g}",
    )
    add("--store", metavar="DIR", type=at_home, help="a weight store to read rather than the run's")
    add(
        "--base",
        metavar="DIR",
        type=at_home,
        help="the base model's folder, if the run's own can't be seen from here",
    )
    add(
        "--merge",
        action="store_true",
        help="of a LoRA run: the whole model with the adapter in it, rather than the adapter",
    )
    args = parser.parse_intermixed_args(arguments)
    if not 0 < args.shard_gib <= MOST_GIB:
        most = f"at most {MOST_GIB:g}"
        parser.error(f"--shard-gib {args.shard_gib:g}: must be greater than 0, and {most}")
    if args.step is not None and args.step < 0:
        parser.error(f"--step {args.step}: must not be negative")
    try:
        if args.best:
            if args.step is not None:
                parser.error(f"--best and --step {args.step}: give only one of them")
            args.step = _best(args.run)
        return _export(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _best(run: Path) -> int:
    """Return the step with the highest held-out mean reward. Raises `ConfigError` for a folder that
    is no run's, and for a run without an evaluation after a training step."""
    if not (run / "config.json").is_file():
        raise ConfigError(f"{run}: no run there (no config.json); give its folder, as outputs/NAME")
    rows = read_metrics(run)
    best = held_out.best(rows)
    if best is None:
        raise ConfigError(
            f"--best: {run} has no held-out evaluation after a training step; give --step, or "
            "train with eval.every above 0"
        )
    step = best["step"]
    print(
        f"step {step} is the best of {len(held_out.evaluated(rows))} evaluations: mean reward "
        f"{held_out.score(best):.3f}"
        + (f", of weights up to {later} versions newer" if (later := held_out.later(best)) else "")
    )
    return step


def _export(args: argparse.Namespace) -> int:
    """Export, print the result, and return the exit code."""
    # DeepSpeed's classes are unpickled, also without a GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from rose.export.folder import export  # imports torch
    from rose.transfer.errors import TransferError

    began = time.monotonic()
    try:
        size = int(args.shard_gib * 2**30)
        done = export(args.run, args.step, args.out, size, args.store, args.base, args.merge)
    except (TransferError, OSError) as error:
        print(*filter(None, (error, advice(None, str(error)))), sep="\n", file=sys.stderr)
        return 1
    print(
        f"{done.out}: step {done.step} from {done.where}; {done.nbytes / 2**30:.3g} GiB in "
        f"{done.shards} file{'s' * (done.shards > 1)}; all {done.blocks} blocks have the hashes of "
        f"what the engines had; {time.monotonic() - began:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
