"""vLLM schedulers of ours without an engine: real KV blocks and queues, and one token a step."""

import queue
import threading
import time
import zlib
from types import SimpleNamespace

import msgspec
import pytest

from rose.parts.lending import board, settings
from rose.parts.lending.config import Slo
from rose.parts.lending.rules import gate
from rose.parts.lending.rules.predictor import Predictor
from rose.parts.lending.vllm import device

BLOCK = 16  # tokens
BLOCK_BYTES = 4096
BLOCKS = 65  # one of them vLLM's own
PREDICTOR = Predictor([0.001, 1e-5, 0.0, 1e-5, 0.0])
SLO = Slo(ttft_p50_s=0.2, ttft_p99_s=0.5, tpot_p50_s=0.05, tpot_p99_s=0.1)
PROFILE = {
    "online": {"predictor": PREDICTOR.to_dict()},
    "rollout": {"predictor": PREDICTOR.to_dict()},
    "interference": {"hold_p99": 1.0, "hold_mean": 0.5},
}

KINDS = {"online": board.Online, "rollout": board.Rollout, "control": board.Control}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    import transformers

    from tests.engine.conftest import COMMON, EXTRA

    folder = tmp_path_factory.mktemp("model")
    shape = COMMON | EXTRA["Qwen3"] | {"max_position_embeddings": 2048}
    transformers.Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    return folder


class Boards:
    """The boards of a device, which the test writes and a thread keeps fresh."""

    def __init__(self, folder):
        self.folder, self.writers = folder, {}
        self._stop, self._one_writes = threading.Event(), threading.Lock()
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._beating.start()

    def begin(self, name, **fields):
        writer = self.writers[name] = board.Writer(self.folder / name, KINDS[name])
        self.set(name, **fields)
        return writer

    def set(self, name, **fields):
        with self._one_writes:
            vars(self.writers[name].state).update(fields)
            self.writers[name].write()

    def damage(self, name):
        """Damage the board, which is not written again."""
        with self._one_writes:
            del self.writers[name]
        with open(self.folder / name, "r+b") as file:
            file.seek(40)
            file.write(b"\xff" * 16)

    def _beats(self):
        while not self._stop.wait(0.02):
            with self._one_writes:
                for writer in list(self.writers.values()):
                    writer.write()

    def close(self):
        """After this nothing is written any more."""
        self._stop.set()
        self._beating.join()


@pytest.fixture
def boards(tmp_path, monkeypatch):
    serving = settings.of_server([])
    # A test on a busy machine may be held up for long, between any two lines: what is stale, or
    # takes longer than was predicted, is a matter of single tests.
    monkeypatch.setattr(gate, "CONTROL_STALE_S", 60.0)
    monkeypatch.setattr(gate, "AHEAD_S", 60.0)
    monkeypatch.setattr("rose.parts.lending.vllm.stopped.SHUT_S", 600.0)
    monkeypatch.setattr(board, "ALIVE_S", 0.0)
    monkeypatch.setattr(board, "OPEN_RETRY_S", -1.0)  # boards that appear later are opened at once
    observe = Predictor.observe
    as_predicted = lambda self, work, seconds: observe(self, work, 1.01 * self.seconds(work))  # noqa: E731
    monkeypatch.setattr(Predictor, "observe", as_predicted)
    replace, kv_gib = msgspec.structs.replace, (BLOCKS - 1) * BLOCK_BYTES / 2**30
    patient = {"stale_after_s": 60.0, "patience_s": 600.0, "revoke_after_s": 600.0}
    lending = replace(serving.lending, kv_gib=kv_gib, **patient)
    serving = replace(serving, lending=lending, online=replace(serving.online, slo=SLO))
    for name, value in device.describe(tmp_path / "boards", serving, PROFILE).items():
        monkeypatch.setenv(name, value)
    made = Boards(tmp_path / "boards")
    yield made
    made.close()


@pytest.fixture
def asynchronous():
    """True if vLLM plans a step while the one before runs, as on GPUs; a test's parameter."""
    return False


@pytest.fixture
def make_scheduler(model_folder, asynchronous):
    """make_scheduler("rose.parts.lending.vllm.rollout") -> a `Driven` scheduler. `memory`: a
    `BlockMemory`, else nothing is behind the blocks."""
    import torch
    from vllm import config as parts
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1 import kv_cache_interface as kv
    from vllm.v1.structured_output import StructuredOutputManager

    model = {"model": str(model_folder), "skip_tokenizer_init": True, "dtype": "float32", "seed": 0}
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512}
    limits |= {"enable_chunked_prefill": True, "is_encoder_decoder": False}
    cache = {"block_size": BLOCK, "gpu_memory_utilization": 0.9, "enable_prefix_caching": True}

    def make(module, memory=None):
        config = parts.VllmConfig(
            model_config=parts.ModelConfig(**model),
            scheduler_config=parts.SchedulerConfig(async_scheduling=asynchronous, **limits),
            cache_config=parts.CacheConfig(**cache),
            device_config=parts.DeviceConfig("cpu"),
        )
        size = memory.layout.block_bytes if memory else BLOCK_BYTES
        tensors = [kv.KVCacheTensor(BLOCKS * size, ["layer"], size, size)]
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [kv.KVCacheGroupSpec(["layer"], kv.FullAttentionSpec(**shape))]
        config.cache_config.num_gpu_blocks = BLOCKS
        scheduler = resolve_obj_by_qualname(f"{module}.scheduler")(
            vllm_config=config,
            kv_cache_config=kv.KVCacheConfig(BLOCKS, tensors, groups),
            log_stats=True,
            block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config),
        )
        return Driven(scheduler, memory)

    return make


def abort():
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


class Driven:
    """A scheduler and the engine core around it: `step` computes a step in no time; `plan` and
    `done` are its halves, of which vLLM plans one ahead where scheduling is asynchronous."""

    def __init__(self, scheduler, memory=None):
        self.scheduler, self.memory = scheduler, memory
        self.calls = []  # (method of the workers, block ids)
        self.ended = {}  # request -> (finish reason, stop reason)
        self.made = {}  # request -> tokens
        self.in_flight = []  # (step, its tokens) that the device has not done yet
        scheduler._core = SimpleNamespace(input_queue=queue.Queue())
        if scheduler.device is None:
            return
        if memory is None:
            scheduler.begin(self._call)
        else:
            memory.map([0])
            scheduler.begin(self._call, memory.layout, memory.pool.page)

    def _call(self, method, ids):
        from rose.parts.lending.vllm.kv_worker import KvWorker

        self.calls.append((method, ids))
        if self.memory is None:
            return [BLOCK_BYTES * len(ids)]
        worker = type("Alone", (KvWorker,), {"rose_kv": self.memory})()
        return [getattr(worker, method)(ids)]

    def add(self, name, prompt=32, tokens=32):
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        params.update_from_generation_config({}, 1)
        # not hash(), by which two names in some processes would share a prefix
        first = zlib.crc32(name.encode())
        ids = [(first + i) % 250 + 2 for i in range(prompt)]
        request = Request(
            request_id=name,
            prompt_token_ids=ids,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)

    def step(self):
        """One step, planned and done; the number of tokens that each request computed in it."""
        scheduled = self.plan()
        while self.in_flight:
            self.done()
        return scheduled

    def plan(self):
        """A step is planned and given to the device."""
        output = self.scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in scheduled]
        sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        self.in_flight.append((output, sampled))
        return scheduled

    def done(self):
        """The oldest step in flight has ended."""
        from vllm.v1.outputs import ModelRunnerOutput

        output, sampled = self.in_flight.pop(0)
        names = list(output.num_scheduled_tokens)
        places = {name: i for i, name in enumerate(names)}
        made = ModelRunnerOutput(names, places, sampled_token_ids=sampled)
        for group in self.scheduler.update_from_output(output, made).values():
            for one in group.outputs:
                name = one.request_id
                self.made[name] = self.made.get(name, 0) + len(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[name] = (one.finish_reason.name, one.stop_reason)

    def steps(self, count):
        return [self.step() for _ in range(count)]
