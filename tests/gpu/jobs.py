"""The checks of whole runs for gpu_check.py: `launch.py` as a user calls it. Trainer and engine use
one GPU in turn, or two GPUs, with and without a second engine on the trainer's GPU or a second
trainer on the engine's; a mixture of experts; rows that two GPUs compute together.

The model is the tiny one of the default run, so that the weights that are trained, published and
loaded change from step to step.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from scripts.harness import REPOSITORY
from tests.gpu.engine import kv_cache
from tests.gpu.frame import Check, Report
from tests.gpu.model import TOKENIZER_STEPS

TAIL = 30  # last lines of a failed run's logs that are shown


class Run(msgspec.Struct):
    overrides: list[str]
    steps: int
    mismatch: float  # largest mean |log-probability difference| of engine and trainer
    kv_gib: float | None = None  # rollout.kv_cache_gib, where other work shares the card


SMALL = (
    "rollout.workers=1 trainer.ranks=1 rollout.environment_hosts=1 trainer.batch_size=32 "
    "rollout.group_size=8 eval.episodes=16 trainer.checkpoint_every=1 observe.terminal=false "
    "fresh=true"
)
ON_GPU = (
    f"+model.recipe.steps={TOKENIZER_STEPS} cluster=gpus trainer=zero3_gpu rollout=gpu "
    "model.dtype=bfloat16 trainer.optimizer.lr=1e-4 rollout.gpu_memory_utilization=0.5"
)
# The command of a user with one GPU, with another model.
IN_TURN = "+experiment=qwen3_0_6b model=tiny env=frozen_lake env.max_new_tokens=64"
# Covers vLLM's fused experts, their names in a version, and routing replayed by the trainer.
EXPERTS = "+model.recipe.experts=8 trainer.router_replay=true"
# Two trainer ranks compute each row together. Two engines use the same GPUs in turn.
LONG = (
    "colocate=true trainer.ranks=2 trainer.sequence_parallel=2 trainer.offload_activations=true "
    "rollout.workers=2"
)
HYBRID = (
    "rollout.hybrid=1 scheduler/provisioning=all_idle scheduler.provisioning.args.hybrid_wait_s=0"
)
ON_CPU = (
    "rollout.kv_cache_gib=0.05 rollout.threads=1 trainer.threads=1 trainer.batch_size=8 "
    "rollout.group_size=4 eval.episodes=0 model.dtype=float32"
)


def job(report: Report) -> None:
    from rose.observe.metrics import read_metrics, rows_of

    sizes, runs = report.sizes, report.folder / "runs"
    given = [f"output_dir={runs}", "name=gpu-check", f"trainer.steps={sizes.steps}"]
    given += [*sizes.overrides, *kv_cache(sizes.kv_gib)]
    report.say(" ".join(["python launch.py", *given]))
    began, log = time.monotonic(), report.folder / "launch.log"
    with log.open("wb") as words:
        command = [sys.executable, str(REPOSITORY / "launch.py"), *given]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
    if code := ran.returncode:
        print(_tail(log))
        for path in sorted((runs / "gpu-check" / "logs" / "latest").glob("*.log")):
            print(f"--- {path.name}\n{_tail(path)}")
        raise RuntimeError(f"launch.py ended with code {code}; its last words are in the log")
    report.figure("the whole command", time.monotonic() - began, "s")
    rows = read_metrics(runs / "gpu-check")
    steps = rows_of(rows, "step")
    report.figure("steps", len(steps), equal=sizes.steps)
    faults, remedy = len(rows_of(rows, "fault")), "an engine or a rank died and was replaced"
    report.figure("faults", faults, equal=0, remedy=remedy)
    last, name = steps[-1], "mean |difference| of log-probabilities"
    remedy = "the engine's weights are not the trainer's: check engine and trainer first"
    report.figure(name, last["mismatch_abs"], "nats", most=sizes.mismatch, remedy=remedy)
    report.figure("gradient norm is a number", math.isfinite(last["grad_norm"]), equal=True)
    report.figure("values published", last["publish_bytes"], "bytes", least=1)
    for name in sorted(k for k in last if k.startswith("time_")):
        report.figure(f"last step, {name.removeprefix('time_')}", last[name], "s")
    # Reported only when the device is shared in turn.
    for name in sorted(last.keys() & {"seconds_sleep", "seconds_wake"}):
        report.figure(f"last step, {name.removeprefix('seconds_')}", last[name], "s")
    for name in sorted(k for k in last if k.startswith("hybrid_")):
        report.figure(f"last step, {name}", last[name], "share")
    for name in sorted(k for k in last if k.endswith("_gib")):
        report.figure(f"last step, {name.removesuffix('_gib')}", last[name], "GiB")
    report.figure("last step", last["tokens_per_s"], "token/s")


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace", encoding="utf-8").splitlines()
    return "\n".join(lines[-TAIL:])


def _check(
    name: str, what: str, remedy: str, gpus: int, more: str = "", in_turn: bool = True
) -> Check:
    """Return the check of a run on so many GPUs with `more` overrides."""
    cuda = f"{SMALL} {ON_GPU} {more} cluster.gpus={gpus}"
    cpu = f"{SMALL} {ON_CPU} {more}"
    if in_turn:
        cuda, cpu = f"{IN_TURN} {cuda}", f"{IN_TURN} {cpu} cluster=local cluster.gpus=0"
    mismatch = 0.02 if in_turn else 1e-3
    sizes = {"cuda": Run(cuda.split(), 2, 0.05), "cpu": Run(cpu.split(), 1, mismatch)}
    return Check(name, what, job, sizes, 240.0, remedy, least_gpus=gpus, needs_model=False)


CHECKS = (
    _check(
        "job",
        "launch.py on two GPUs: one trains, one rolls out",
        "the log has each rank's last words",
        gpus=2,
        in_turn=False,
    ),
    _check(
        "colocated",
        "launch.py on one GPU: trainer and engine hold it in turn",
        "the log has each rank's last words; out of memory: rollout.gpu_memory_utilization lower",
        gpus=1,
    ),
    _check(
        "hybrid",
        "launch.py on two GPUs: one rolls out, one trains and rolls out in turn",
        "`colocated` tells whether it is the turns; the log has each rank's last words",
        gpus=2,
        more=HYBRID,
        in_turn=False,
    ),
    _check(
        "mixture",
        "launch.py on one GPU with a mixture of experts: the trainer routes as the engine did",
        "trainer.router_replay=false tells whether it is the replay; the log has each rank's words",
        gpus=1,
        more=EXPERTS,
    ),
    _check(
        "long",
        "launch.py on two GPUs that compute each row together and hold engines in turn",
        "NCCL between the two: rose doctor cluster=gpus; trainer.sequence_parallel=1 "
        "tells whether it is the sharing of rows",
        gpus=2,
        more=LONG,
    ),
)
