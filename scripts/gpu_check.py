"""What of ROSE's GPU paths works on this machine: run it once where GPUs are, before a long job.

    python scripts/gpu_check.py            # needs one GPU; with two or more it also runs the main job on them
    python scripts/gpu_check.py transfer   # only the checks named; without a GPU this one compares on the CPU

Checks, each one line `ok` or `FAILED` with its cause, exit code 1 if any failed: CUDA and the packages; the vLLM
engine against transformers in float32 and bfloat16 (scripts/bench_mismatch.py); one bfloat16 training step of the
DeepSpeed trainer over NCCL, published and read back; the transfer codec, whose bytes on the GPU must be those of the
CPU, and its speed beside a copy on the device; the page pool that lends KV memory, and an engine with it that sleeps
and wakes; with two GPUs, two steps of `launch.py cluster=gpus`.
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
    from rose.transfer.receive import materialise

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
        rank.open_store(Path(folder) / "store", lambda name, extent: ([], []))
        rank.publish(1)
        names = len(materialise(Path(folder) / "store", 1))
    rank.close()
    if not np.isfinite(metrics["loss"]) or not metrics["grad_norm"] > 0:
        raise RuntimeError(f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}")
    peak = torch.cuda.max_memory_allocated() / 2**30
    return f"gradient norm {metrics['grad_norm']:.3g}, {seconds:.2f} s, {names} tensors published, peak {peak:.2f} GiB"


def transfer() -> str:
    """64 Mi bfloat16 values (a sixteenth without a GPU) at several shares of changes, and from nothing."""
    import torch

    from rose.transfer import codec, codec_torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 2**26 if device.type == "cuda" else 2**22
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(size, generator=generator) * 0.02).bfloat16()
    there = old.to(device)
    told = []
    for changed in (0.001, 0.01, 0.05, 0.2, 1.0, None):
        moved = torch.rand(size, generator=generator) < (changed or 0.0)
        steps = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int16) * 2 - 1
        new = (old.view(torch.int16) + moved * steps).view(torch.bfloat16)
        base = None if changed is None else old
        expected = codec.encode(*(None if t is None else t.view(torch.int16).numpy().view(np.uint16)
                                  for t in (new, base)))
        target, values = new.to(device), there.clone()
        payload, encode_s = timed(lambda: codec_torch.encode(target, None if base is None else there), device)
        if not np.array_equal(payload.cpu().numpy(), expected):
            raise RuntimeError(f"{changed}: {payload.numel()} bytes on {device}, {expected.size} others on the CPU")
        _, decode_s = timed(lambda: codec_torch.apply(payload, values.copy_(there)), device)
        if not torch.equal(values.view(torch.int16), target.view(torch.int16)):
            raise RuntimeError(f"{changed}: decoded on {device}, the values are not the encoded ones")
        told.append(f"{'from nothing' if changed is None else f'{100 * changed:g}%'} "
                    f"{2 * size / encode_s / 1e9:.1f}/{2 * size / decode_s / 1e9:.1f}")
    if device.type == "cpu":
        return "bytes on the CPU device are the CPU codec's; no GPU here, so its part was not run"
    other = torch.empty_like(there)
    _, copy_s = timed(lambda: other.copy_(there), device)
    return (f"same bytes as the CPU; encode/decode GB/s {', '.join(told)}; a copy on the device "
            f"{2 * size / copy_s / 1e9:.1f} GB/s")


def coserving() -> str:
    """A pool of 1 GiB on the device; then the tiny model's engine with such a KV cache, deactivated and activated."""
    import torch

    from rose import models
    from rose.config import from_dict
    from rose.coserving.vmm import CudaDriver, PagePool

    torch.cuda.init()
    pages = page_pool(PagePool(CudaDriver(torch.cuda.current_device()), 2**30), lambda: torch.cuda.mem_get_info()[0])
    folder = models.resolve(from_dict(compose("cluster=gpus", "cluster.gpus=2", "rollout.workers=1")).model)
    engine = run([str(REPOSITORY / "scripts" / "bench_activation.py"), "--gpus", "--lent", "--rounds", "2",
                  "--model", str(folder)])
    return f"{pages}; engine: {engine}"


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


def timed(work: Callable, device) -> tuple:
    """(result, seconds) of the fastest of five; what is decoded onto is copied anew each time, within the time."""
    import torch

    best = float("inf")
    for _ in range(5 if device.type == "cuda" else 1):
        began = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return result, best


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


def main(names: list[str]) -> int:
    checks = {check.__name__: check for check in (packages, engine, trainer, transfer, coserving, job)}
    if unknown := set(names) - set(checks):
        print(f"no check {', '.join(sorted(unknown))}; there are {', '.join(checks)}", file=sys.stderr)
        return 2
    failed = 0
    for check in [checks[name] for name in names or checks]:
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
    sys.exit(main(sys.argv[1:]))
