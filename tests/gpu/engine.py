"""The checks of the engine for gpu_check.py: vLLM as a run starts it on GPUs (CUDA graphs, model
runner V2, asynchronous scheduling).

The engine must generate fast enough, load new weights while turns run, and generate after the flip
with the log-probabilities of the trainer's own forward pass. Imports vLLM only within the checks.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
import numpy as np

from scripts.harness import configured
from tests.gpu.frame import GIB, Report, check
from tests.gpu.model import Versions, folder, of_model, score, shape_of

DTYPE_BYTES = 2
# Largest difference in nats between the log-probabilities of engine and trainer. On CUDA, attention
# in float32 is a Triton kernel with TF32 products (ten bits), because FlashAttention takes no
# float32. On a CPU it is float32 throughout.
FLOAT32_MOST = {"cuda": 1e-2, "cpu": 1e-3}
BFLOAT16_MEAN = 0.05
KEPT = (
    "what sleeps keeps too much: rollout.engine_args.enable_sleep_mode must reach vLLM, and "
    "weights lie in its pool"
)
# Least factor by which the old weights must fit worse, or the comparison shows nothing.
OLD_WEIGHTS = 3.0


class Engines(msgspec.Struct):
    rollout: str  # file of conf/rollout
    dtype: str
    utilization: float  # rollout.gpu_memory_utilization
    turns: int  # concurrent turns for the throughput
    prompt: int  # tokens
    new: int
    alone: int  # tokens of the single turn
    beside: int  # turns that run while the version is loaded
    beside_new: int  # tokens of each turn; more turns follow until the version is loaded
    changed: float  # share of the values that the version changes
    scored: int  # turns compared with the trainer's forward
    scored_new: int
    given_back: float = 0.0  # least share of the memory that a sleeping engine releases
    tensor_parallel: int = 1
    kv_gib: float | None = None  # rollout.kv_cache_gib, where other work shares the card
    executor: str | None = None  # vLLM's: mp has the model in a process of its own


GPU = Engines("gpu", "bfloat16", 0.9, 256, 256, 256, 256, 64, 1024, 0.02, 16, 96)
CPU = Engines("cpu", "bfloat16", 0.9, 4, 16, 8, 8, 2, 300, 0.2, 4, 24)
NARROW = Engines("gpu", "float32", 0.3, 0, 64, 0, 0, 2, 256, 0.02, 16, 96)
NARROW_CPU = Engines("cpu", "float32", 0.9, 0, 16, 0, 0, 2, 300, 0.02, 4, 24)
BOTH = Engines("gpu", "bfloat16", 0.5, 0, 64, 0, 0, 4, 512, 0.02, 16, 96, 0.0, 2)
SLEEPS = Engines("gpu", "bfloat16", 0.6, 4, 256, 64, 0, 0, 0, 0.25, 0, 0, 0.8)
SLEEPS_CPU = Engines("cpu", "bfloat16", 0.9, 2, 16, 8, 0, 0, 0, 0.25, 0, 0, 0.2)


def kv_cache(gib: float | None) -> list[str]:
    """Return the overrides of an engine with a KV cache of `gib`, if that is given. vLLM starts it
    only where the share gpu_memory_utilization of the card is free."""
    given = ["rollout.gpu_memory_utilization=0.05", f"rollout.kv_cache_gib={gib}"]
    return [] if gib is None else given


def settings(report: Report, *overrides: str):
    """Return the checked configuration of an engine of this model, by conf/rollout."""
    sizes = report.sizes
    context = sizes.prompt + max(sizes.new, sizes.alone, sizes.beside_new, sizes.scored_new)
    words = f"rollout={sizes.rollout} rollout.gpu_memory_utilization={sizes.utilization} "
    words += f"trainer.micro_batch_tokens={max(2048, context)} "
    if report.gpus:
        words += f"cluster=gpus cluster.gpus={1 + sizes.tensor_parallel} trainer.ranks=1 "
        words += f"rollout.tensor_parallel={sizes.tensor_parallel}"
    given = [*words.split(), *of_model(report, context), *kv_cache(sizes.kv_gib)]
    if sizes.executor:
        given.append(f"+rollout.engine_args.distributed_executor_backend={sizes.executor}")
    return configured(*given, *overrides)


async def start(report: Report, config) -> Any:
    from rose.engine.vllm_engine import Engine

    with report.took("start"):
        lora = config.trainer.lora
        engine = await Engine.start(
            folder(report), config.rollout, config.model, gpus=report.gpus, lora=lora
        )
    report.figure("KV cache", engine.kv_tokens, "tokens", least=config.model.max_context)
    return engine


def prompts(report: Report, count: int, seed: int) -> list[list[int]]:
    vocabulary, dice = shape_of(report).vocab, np.random.default_rng(seed)
    return [dice.integers(0, vocabulary, report.sizes.prompt).tolist() for _ in range(count)]


class Turn(msgspec.Struct):
    prompt: list[int]
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []


async def turn(
    engine,
    name: str,
    prompt: list[int],
    new: int,
    begun: asyncio.Event | None = None,
    temperature: float = 1.0,
) -> Turn:
    """Generate exactly `new` tokens: a turn that the model ends early is continued."""
    from rose import protocol

    made, part = Turn(prompt), 0
    while len(made.tokens) < new:
        sampling = protocol.Sampling(max_new_tokens=new - len(made.tokens), temperature=temperature)
        before, part = len(made.tokens), part + 1
        async for chunk in engine.generate(
            f"{name}.{part}", protocol.pack_tokens(prompt + made.tokens), sampling
        ):
            made.tokens += chunk.tokens
            made.logprobs += chunk.logprobs
            made.versions += [chunk.version] * len(chunk.tokens)
            if begun is not None and made.tokens:
                begun.set()
        if len(made.tokens) == before:
            raise RuntimeError(f"turn {name} ended after {before} of {new} tokens")
    return made


async def turns(engine, name: str, given: list[list[int]], new: int) -> list[Turn]:
    """Generate a turn of `new` tokens for each prompt, all at once."""
    each = (turn(engine, f"{name}-{i}", prompt, new) for i, prompt in enumerate(given))
    return await asyncio.gather(*each)


# --------------------------------------------------------------------------- engine


@check(
    "a non-eager engine: speed, a flip under traffic, log-probabilities against the trainer's",
    "the engine's own words are in the log; VLLM_LOGGING_LEVEL=INFO says more. Memory: --set "
    "engine.utilization=0.8",
    {"cuda": GPU, "cpu": CPU},
)
async def engine(report: Report, *overrides: str, speed: bool = True) -> None:
    config = settings(report, *overrides)
    running = await start(report, config)
    try:
        if speed:
            ways(report, running)
            await _speed(report, running)
        *_, versions = await flip_under_traffic(report, running, config)
        await compare(report, running, versions)
    finally:
        await running.shutdown()


def ways(report: Report, running) -> None:
    """Check the paths that vLLM takes on GPUs, which CPU tests never take."""
    config = running._llm.vllm_config
    graphs = str(config.compilation_config.cudagraph_mode).rpartition(".")[2]
    expected = {"equal": True} if report.gpus else {}
    report.figure("model runner V2", bool(config.use_v2_model_runner), **expected)
    report.figure(
        "asynchronous scheduling", bool(config.scheduler_config.async_scheduling), **expected
    )
    report.figure("CUDA graphs", graphs)
    if report.gpus and graphs in ("NONE", "None"):
        remedy = "rollout.enforce_eager must be false"
        report.figure("CUDA graphs captured", False, equal=True, remedy=remedy)


async def _speed(report: Report, running) -> None:
    sizes, shape = report.sizes, shape_of(report)
    weights = DTYPE_BYTES * shape.parameters
    kv = shape.kv_bytes_per_token * (sizes.prompt + sizes.new / 2)  # mean KV bytes of a turn
    bandwidth = report.setup.rates[1]
    await turn(running, "warm", prompts(report, 1, 1)[0], sizes.alone)
    began = time.monotonic()
    await turn(running, "alone", prompts(report, 1, 2)[0], sizes.alone)
    rate, bound = sizes.alone / (time.monotonic() - began), bandwidth and bandwidth / weights
    words = "weights once a token from HBM"
    remedy = "slow steps: are CUDA graphs in use, is the CPU busy with something else?"
    report.share("one turn alone", rate, "token/s", bound, 0.04, words, remedy)
    # The first round compiles kernels. Only the second counts.
    for name, seed, new in (("first", 4, sizes.new // 8), ("all", 3, sizes.new)):
        began = time.monotonic()
        await turns(running, name, prompts(report, sizes.turns, seed), new)
    rate = sizes.turns * sizes.new / (time.monotonic() - began)
    bound = bandwidth and sizes.turns * bandwidth / (weights + sizes.turns * kv)
    words = "weights and KV from HBM, prefill not counted"
    remedy = "a slow CPU holds the scheduler up: ask for more cores"
    report.share(f"{sizes.turns} turns at once", rate, "token/s", bound, 0.03, words, remedy)


async def flip_under_traffic(
    report: Report, running, config, versions: Versions | None = None
) -> tuple[int, int, Versions]:
    """Load a version while turns run. Return the number of tokens by the old and by the new
    weights, and the versions' store, which is created if none is given."""
    sizes = report.sizes
    versions = versions or _versions(report, f"store-{sizes.dtype}")
    begun, over = [asyncio.Event() for _ in range(sizes.beside)], asyncio.Event()
    each = (
        _traffic(running, f"beside-{i}", prompt, sizes.beside_new, begun[i], over)
        for i, prompt in enumerate(prompts(report, sizes.beside, 5))
    )
    traffic = asyncio.gather(*each)
    version = await asyncio.to_thread(versions.change, sizes.changed)
    await asyncio.gather(*(event.wait() for event in begun))
    loaded = await running.load_version(version, str(versions.store), config.transfer)
    over.set()
    made = [v for part in await traffic for v in part]
    report.figure("values changed", loaded.changed, least=1)
    report.figure("staged beside generation in", loaded.stage_s, "s")
    remedy = "the flip should be scatters on the device: see transfer.stage_gib"
    pause_ms = 1000 * loaded.pause_s
    report.figure("generation stood still for", pause_ms, "ms", most=2000.0, remedy=remedy)
    report.figure("tokens by the old weights", made.count(-1), least=1)
    remedy = "turns across the flip should have gone on by the new weights: the log says why not"
    report.figure("tokens by the new weights", made.count(version), least=1, remedy=remedy)
    return made.count(-1), made.count(version), versions


def _versions(report: Report, name: str) -> Versions:
    sizes, store = report.sizes, report.folder / name
    return Versions(folder(report), store, sizes.dtype, report.setup.device)


async def _traffic(
    engine, name: str, prompt: list[int], new: int, begun: asyncio.Event, over: asyncio.Event
) -> list[int]:
    """Run turns one after the other until `over` is set. Return the version of each token."""
    versions: list[int] = []
    while not over.is_set():
        versions += (await turn(engine, f"{name}.{len(versions)}", prompt, new, begun)).versions
    return versions


async def compare(report: Report, running, versions: Versions) -> None:
    """Compare the engine's log-probabilities with the trainer's forward pass over the same tokens:
    with the new weights, and with the old to see that the comparison is sensitive."""
    sizes, device = report.sizes, report.setup.device
    scored = await turns(running, "scored", prompts(report, sizes.scored, 7), sizes.scored_new)
    pairs = [(one.prompt, one.tokens) for one in scored]
    engine_says = np.concatenate([np.asarray(one.logprobs) for one in scored])
    where = folder(report), sizes.dtype, device, pairs
    both = (score(*where, tensors, versions.lora) for tensors in (versions.tensors, None))
    new, old = (np.abs(trainer_says - engine_says) for trainer_says in both)
    words = "a wrong kernel, or weights that are not the version's: the check precision tells which"
    figure, source = partial(report.figure, remedy=words), "float32"
    if report.gpus:
        source = "TF32 in attention"
    bound = {"most": FLOAT32_MOST[device], "source": source} if sizes.dtype == "float32" else {}
    figure("largest |difference|, new weights", float(new.max()), "nats", **bound)
    figure("mean |difference|, new weights", float(new.mean()), "nats", most=BFLOAT16_MEAN)
    worse = float(old.mean() / max(new.mean(), 1e-9))
    figure("the old weights fit worse by", worse, "times", least=OLD_WEIGHTS)


@check(
    "the same weights in float32, where only TF32 may differ",
    "a wrong kernel, or weights that are not the version's: the log has the engine's words",
    {"cuda": NARROW, "cpu": NARROW_CPU},
    180.0,
)
async def precision(report: Report) -> None:
    """Run the engine in float32, where any error larger than rounding shows."""
    await engine.work(report, "rollout.enforce_eager=true", speed=False)


@check(
    "an engine over two GPUs takes a version while turns run",
    "NCCL between the two: rose doctor cluster=gpus; NCCL_DEBUG=INFO; "
    "NCCL_P2P_DISABLE=1 goes around a broken link",
    {"cuda": BOTH, "cpu": NARROW_CPU},
    least_gpus=2,
    on_cpu=False,
)
async def tp2(report: Report) -> None:
    await engine.work(report, speed=False)


# --------------------------------------------------------------------------- sleep


@check(
    "a non-eager engine gives its memory back, wakes, makes the same tokens, and takes a version",
    "rollout.engine_args.enable_sleep_mode needs vLLM's cumem allocator: the log says why it has "
    "none",
    {"cuda": SLEEPS, "cpu": SLEEPS_CPU},
    180.0,
)
async def sleep(report: Report) -> None:
    """Put an engine to sleep and wake it. Its memory must be free meanwhile, it must load new
    weights, and with the folder's weights it must generate the same tokens as before."""
    sleeps = ["+rollout.engine_args.enable_sleep_mode=true"] if report.gpus else []
    config = settings(report, *sleeps)
    others = device_used() if report.gpus else 0
    running = await start(report, config)
    try:
        expected = await _greedy(report, running)
        awake = _used(report, running, others)
        with report.took("keeping its weights: gives memory back in"):
            moved = await running.sleep()
        report.figure("memory awake", awake / GIB, "GiB")
        source = f"{report.sizes.given_back:g} of it"
        bound = {"least": report.sizes.given_back * awake / GIB, "source": source, "remedy": KEPT}
        report.figure("memory given back", moved.gib, "GiB", **bound)
        versions = _versions(report, "store-sleep")
        version = await asyncio.to_thread(versions.change, report.sizes.changed)
        with report.took("takes a version and wakes in"):
            await running.wake_weights()
            loaded = await running.load_version(version, str(versions.store), config.transfer)
            await running.wake()
        report.figure("values of that version", loaded.changed, least=1)
        other = await _greedy(report, running) != expected
        report.figure("turns by the new weights are others", other, equal=True)
        await _forgets(report, running, awake, others)
        pairs = zip(await _greedy(report, running), expected, strict=True)
        same, every = sum(a == b for a, b in pairs), len(expected)
        report.figure("turns by the folder's weights that are as before", same, least=every)
    finally:
        await running.shutdown()


async def _forgets(report: Report, running, awake: int, others: int) -> None:
    """Deactivate an engine, as when it idles. Activated, it reads the folder's weights again."""
    with report.took("forgetting its weights: gives memory back in"):
        await running.deactivate()
    if report.gpus:  # not on a CPU, where released pages return only when touched
        back, least = awake - _used(report, running, others), report.sizes.given_back * awake / GIB
        report.figure("memory given back again", back / GIB, "GiB", least=least, remedy=KEPT)
    with report.took("wakes in"):
        await running.activate()


async def _greedy(report: Report, running) -> list[list[int]]:
    """Run greedy turns one by one, because a batch's other turns change the rounding of sums."""
    return [
        (await turn(running, f"greedy-{i}", prompt, report.sizes.new, temperature=0.0)).tokens
        for i, prompt in enumerate(prompts(report, report.sizes.turns, 11))
    ]


def _used(report: Report, running, others: int) -> int:
    """Return the engine's bytes: on a GPU those in use less the `others` that were in use before
    its start, on a CPU its resident memory."""
    if report.gpus:
        return device_used() - others
    from tests.processes import resident_bytes

    return resident_bytes(running.pid)


def device_used() -> int:
    """Return the bytes that all processes use on the device, by cuMemGetInfo."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free
