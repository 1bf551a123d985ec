"""What of ROSE's GPU paths works on this machine: run it once where GPUs are, before a long job.

    python scripts/gpu_check.py            # needs one GPU; with two or more it also runs the main job on them

Checks, each one line `ok` or `FAILED` with its cause, exit code 1 if any failed: CUDA and the packages; the vLLM
engine against transformers in float32 and bfloat16 (scripts/bench_mismatch.py); one bfloat16 training step of the
DeepSpeed trainer over NCCL, published and read back; with two GPUs, two steps of `launch.py cluster=gpus`.
Everything uses the tiny model, so it takes minutes. Left out: tensor parallel over several GPUs, several nodes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

DEADLINE_S = 900.0


def packages() -> str:
    import deepspeed
    import torch
    import vllm

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU; is this a GPU build, and is CUDA_VISIBLE_DEVICES right?")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return (f"{torch.cuda.device_count()} x {', '.join(names)}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
            f"vllm {vllm.__version__}, deepspeed {deepspeed.__version__}")


def engine() -> str:
    """bench_mismatch.py in a process of its own; its table's last line."""
    return run([str(REPOSITORY / "scripts" / "bench_mismatch.py"), "--gpus", "--turns", "8"])


def trainer() -> str:
    """One step on a made-up batch; the published version must hold the trained weights."""
    import torch

    from rose import models, protocol
    from rose.comm.wire import decode, encode
    from rose.config import from_dict
    from rose.observe.recorder import NullRecorder
    from rose.trainer.batching import plan_batch
    from rose.trainer.trainer import Trainer
    from rose.transfer import open_version

    config = from_dict(compose("cluster=gpus", "cluster.gpus=2", "trainer.dtype=bfloat16", "rollout.workers=1",
                               "model.dtype=bfloat16", "trainer.batch_size=8", "rollout.group_size=8"))
    rows = {i: made_up(i) for i in range(8)}
    rank = Trainer(config, 0, 1, "127.0.0.1", free_port(), models.resolve(config.model), NullRecorder())
    plan, trees = plan_batch([protocol.unpack_tokens(t.tokens) for t in rows.values()], 1,
                             config.trainer.micro_batch_tokens, 1, config.model.shape)
    summary = protocol.BatchSummary([t.reward for t in rows.values()], [0] * 8, [t.response_tokens for t in rows.values()],
                                    [False] * 8)
    step = decode(encode(protocol.TrainStep(1, summary, plan[0], trees, 1)))
    began = time.monotonic()
    metrics = rank.train(step, rows)
    seconds = time.monotonic() - began
    with tempfile.TemporaryDirectory() as folder:
        with open_version(rank.publish(Path(folder), 1)) as version:
            names = len(list(version.names))
    rank.close()
    if not np.isfinite(metrics["loss"]) or not metrics["grad_norm"] > 0:
        raise RuntimeError(f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}")
    peak = torch.cuda.max_memory_allocated() / 2**30
    return f"gradient norm {metrics['grad_norm']:.3g}, {seconds:.2f} s, {names} tensors published, peak {peak:.2f} GiB"


def job() -> str:
    """The whole program on two GPUs: one trains, one rolls out."""
    with tempfile.TemporaryDirectory() as folder:
        return run([str(REPOSITORY / "launch.py"), "cluster=gpus", "cluster.gpus=2", "rollout=gpu", "rollout.workers=1",
                    "rollout.environment_hosts=1", "rollout.gpu_memory_utilization=0.3", "trainer.steps=2",
                    "eval.episodes=32", "name=gpu-check", f"output_dir={folder}", "observe.terminal=false"])


def compose(*overrides: str) -> dict:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return OmegaConf.to_container(hydra_compose("config", list(overrides)), resolve=True)


def made_up(i: int):
    """A trajectory of 64 tokens, the second half the policy's."""
    from rose import protocol

    tokens = np.random.default_rng(i).integers(0, 200, 64)
    mask = np.repeat([0, 1], 32).astype(np.uint8)
    return protocol.Trajectory(
        f"g0.{i}", "g0", protocol.Phase.TRAIN, protocol.pack_tokens(tokens), mask.tobytes(),
        protocol.pack_floats(-1.0 * mask), protocol.pack_tokens(np.where(mask, 0, -1)), float(i % 2), bool(i % 2), 1, 32)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command: list[str]) -> str:
    """The last line of a Python script's output; its failure with its last lines."""
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE_S)
    if ran.returncode:
        raise RuntimeError(f"{Path(command[0]).name} exited with {ran.returncode}:\n" + "\n".join(
            (ran.stdout + ran.stderr).splitlines()[-15:]))
    return ran.stdout.strip().splitlines()[-1]


def main() -> int:
    checks: list[Callable[[], str]] = [packages, engine, trainer, job]
    failed = 0
    for check in checks:
        try:
            if check is job and device_count() < 2:
                print("job       not run: it needs two GPUs", flush=True)
                continue
            print(f"{check.__name__:9} ok: {check()}", flush=True)
        except Exception as error:  # each check says its own; the next may still tell more
            failed += 1
            print(f"{check.__name__:9} FAILED: {type(error).__name__}: {error}", flush=True)
            if check is packages:
                break
    return int(failed > 0)


def device_count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
