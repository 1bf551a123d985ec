"""The start of a vLLM engine process, by `Engine.start`: environment, arguments and fork."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from rose import extensions, hub, scratch
from rose.config import ConfigError, Draft, Lora, Model, Rollout
from rose.processes import importing

EXTENSION = "rose.engine.worker_extension.WorkerExtension"  # vLLM's worker_extension_cls
PLUGIN = "rose"  # name of the entry point in pyproject.toml
SOCKETS = "rose-vllm-"  # kind of the folder of vLLM's sockets
UUID_BYTES = 37  # bytes of a slash and a UUID, as in the names of vLLM's sockets
FOLDER_BYTES = 40  # most bytes of a slash and our name of the sockets' folder
# Bounds a call into the engine. Pause and resume take an engine step at most.
RPC_TIMEOUT_S = 30.0
# A module whose `lib` returns an object for every attribute name, so that its __dict__ is not a
# dictionary.
UNREADABLE = "llvmlite.binding.ffi"

# Id of the process that forks now: the rank while it starts its engine process, and that engine
# process ever after; 0 in other processes.
_forker = 0


class EngineError(RuntimeError):
    """The engine could not start, or refused or didn't answer a call."""


class EngineDied(EngineError):
    """The engine process is gone; everything it held is lost."""


class Latest:
    """Scheduler statistics of vLLM's last engine step (None before the first), and sums since the
    start: steps with running requests, drafted tokens, and accepted tokens."""

    scheduler = None
    steps = drafted = accepted = 0

    def update(self, stats) -> None:
        if stats is None:
            return
        self.scheduler = stats
        self.steps += stats.num_running_reqs > 0
        if (drafts := stats.spec_decoding_stats) is not None:
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens


def _sockets() -> dict[str, str]:
    """Return the environment variable that names the folder of vLLM's sockets, which vLLM never
    removes. A variable that is set already stays, so that all calls return the same (a lender
    compares what is set with this). Otherwise it is
    1. a folder of this process in TMPDIR, if the path of TMPDIR leaves room for the sockets' names;
    2. or a folder of this process in /tmp;
    3. or, if /tmp can't be written, TMPDIR itself, if its path leaves that room.

    Raises `ConfigError` if /tmp is needed and can't be written."""
    name = "VLLM_RPC_BASE_PATH"
    if name in os.environ:
        return {name: os.environ[name]}
    given, parent = tempfile.gettempdir(), scratch.of_sockets(FOLDER_BYTES + UUID_BYTES)
    try:
        return {name: str(scratch.folder(SOCKETS, parent))}
    except OSError as error:
        if parent == given:
            raise
        if scratch.of_sockets(UUID_BYTES) == given:
            return {name: given}
        raise ConfigError(
            f"TMPDIR={given}: vLLM's sockets have names of {scratch.LONGEST_SOCKET} characters at "
            f"most, so this path may have {scratch.LONGEST_SOCKET - UUID_BYTES}, and /tmp can't be "
            f"used ({error}): set {name} to a shorter folder of this machine"
        ) from None


def _allow_plugins() -> None:
    """Add ROSE's plugin to VLLM_PLUGINS, if a user has set it: vLLM loads no others."""
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:
        names = dict.fromkeys([*filter(None, allowed.split(",")), PLUGIN])
        os.environ["VLLM_PLUGINS"] = ",".join(names)


def environment(gpus: bool, threads: int | None, shares_device: bool = False) -> dict[str, str]:
    """Return environment variables that must be set before vLLM is imported. `Engine.start` sets
    those that are not set yet. `shares_device` is true for an engine that exchanges KV memory with
    another engine on its device."""
    _allow_plugins()
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TOKENIZERS_PARALLELISM": "false",
        **_sockets(),
        **hub.OFFLINE,
    }
    if gpus:
        # This layout keeps a block in one place, not a part of it in every layer's region. So its
        # pages of 2 MiB can be released. CUDA maps streams onto 8 connections by default. A stream
        # that shares one with a stopped stream would wait, too.
        lent = {"VLLM_KV_CACHE_LAYOUT": "BLHNC", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        lent = lent if shares_device else {}
        # vLLM's warm-up would build FlashInfer's sampler with nvcc, and fail without a CUDA
        # toolkit. vLLM's own Triton kernels compute the same.
        name = "VLLM_USE_FLASHINFER_SAMPLER"
        return common | lent | {name: os.environ.get(name, "0")}
    cpu = {
        # Processes share cores, where passive waiting makes small operations 20 times faster.
        "OMP_WAIT_POLICY": "passive",
        "TORCH_COMPILE_DISABLE": "1",
        # Without this, every engine would be bound to core 0.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Runs the worker inside the engine process, which AsyncLLM starts anyway.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if threads is not None:
        cpu |= {"OMP_NUM_THREADS": str(threads), "ROSE_ENGINE_THREADS": str(threads)}
    return common | cpu


def local_folder(model: str | Path, key: str = "model.path") -> Path:
    """Return `model` if it is a folder, else the folder of the hub id's snapshot. Downloads a
    snapshot that is not in the Hugging Face cache. Raises `ConfigError`, which names `key`."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    return hub.snapshot(str(model), key=key)


def engine_args(
    folder: Path,
    rollout: Rollout,
    model: Model,
    deterministic: bool,
    seed: int,
    gpus: bool = False,
    lora: Lora | None = None,
    routing: bool = False,
) -> dict:
    """Return the arguments for vLLM's AsyncEngineArgs. A deterministic engine computes each request
    alone and without cached prefixes. Log-probabilities are those of the distribution that tokens
    are sampled from, after temperature, top-k and top-p, because the trainer's importance weights
    use them."""
    shares = "ROSE_COSERVING" in os.environ
    unprocessed = (rollout.temperature, rollout.top_p, rollout.top_k) == (1, 1, 0)
    args = dict(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=model.dtype,
        max_model_len=model.max_context,
        max_num_seqs=1 if deterministic else rollout.max_sequences,
        max_num_batched_tokens=rollout.step_tokens(model.max_context, deterministic),
        enable_prefix_caching=rollout.prefix_caching and not deterministic,
        enforce_eager=rollout.enforce_eager,
        tensor_parallel_size=rollout.tensor_parallel,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        stream_interval=rollout.stream_interval,
        logprobs_mode="raw_logprobs" if unprocessed else "processed_logprobs",
        use_tqdm_on_load=False,
        worker_extension_cls=EXTENSION,
        seed=seed,
    )
    if deterministic:
        # vLLM on a CPU dies when it prefills a seeded prompt in chunks.
        args["enable_chunked_prefill"] = False
    if lora is not None:
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora.slot_rank}
        args["lora_target_modules"] = lora.layers
    if gpus:
        args["moe_backend"] = "triton"  # the backend without reordered experts' weights
    if routing:
        args["enable_return_routed_experts"] = True
    if rollout.kv_cache_gib is not None:
        args["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
    for part in extensions.modules("shared_device").values() if shares else ():
        args |= part.engine_args(gpus, rollout)
    # No drafts beside an online engine, because the prediction of step times ignores them.
    if rollout.draft.method != "none" and not shares:
        args |= drafting(rollout.draft, gpus)
    return args | rollout.engine_args


def drafting(draft: Draft, gpus: bool) -> dict:
    """Return vLLM's arguments for speculative decoding with `draft`."""
    if (part := extensions.draft_methods().get(draft.method)) is not None:
        return part.engine_args(draft)
    found = {"num_speculative_tokens": draft.tokens}
    # On a GPU both methods search there, but vLLM schedules asynchronously only with `ngram_gpu`.
    found["method"] = "ngram_gpu" if gpus else "ngram"
    return {"speculative_config": found | {"prompt_lookup_min": 2, "prompt_lookup_max": 5}}


def preload() -> None:
    """Import what `build` needs, so that processes forked from here have it. `environment` must
    have been applied before."""
    with importing():
        from vllm import AsyncEngineArgs  # noqa: F401
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401
        from vllm.v1.executor import Executor  # noqa: F401


def build(args: dict, gpus: bool):
    """Start the engine process and block until it serves. Returns (AsyncLLM, Latest)."""
    global _forker
    preload()
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor import Executor

    from rose.engine import described, plugin

    described.listen()
    # vLLM loads the plugin only if ROSE is installed, not if it is imported from a folder.
    plugin.register()
    if not gpus:
        plugin.end_quickly(EngineCoreProc)
    # rose.engine.worker_extension registers this backend in each worker.
    transfer = WeightTransferConfig(backend="rose")
    if args.get("enable_return_routed_experts") and not gpus:
        from rose.engine import routing

        routing.allow()
    config = AsyncEngineArgs(**({"weight_transfer_config": transfer} | args)).create_engine_config()
    # On a CPU only drafts that `args` ask for are allowed: `rose_begin_drafts` corrects these.
    if not args.get("speculative_config"):
        plugin.refuse_drafts(config)
    if not gpus:
        # vLLM's CPU platform has just set "spawn", which would import everything once more.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    _forker = os.getpid()
    # At its start, vLLM's CPU worker inspects every object of every loaded module, and fails at
    # this module of numba's.
    hidden = sys.modules.pop(UNREADABLE, None)
    try:
        llm = AsyncLLM(config, Executor.get_class(config), log_stats=True, log_requests=False)
    finally:
        _forker = 0
        if hidden is not None:
            sys.modules[UNREADABLE] = hidden
    # Per-token statistics and Prometheus metrics cost this process a few percent. So switch them
    # off before the first output. The engine process still sends its scheduler's statistics.
    latest = Latest()
    llm.log_stats, llm.logger_manager = False, None
    llm.output_processor.update_scheduler_stats = latest.update
    return llm, latest


def _after_fork() -> None:
    """Let the engine process die with the rank, and keep its signals out of the event loop that it
    inherited. Does nothing in another forked process."""
    global _forker
    if _forker:
        from rose.processes import die_with_parent

        parent, _forker = _forker, os.getpid()
        signal.set_wakeup_fd(-1)
        die_with_parent(parent)


os.register_at_fork(after_in_child=_after_fork)
