"""vLLM's worker in an engine that shares its GPU, on pages that kill: from weights to warm-up."""

from types import SimpleNamespace

import pytest
import torch

from rose.engine import plugin
from rose.parts.lending.vllm import headroom
from rose.parts.lending.vllm.vmm import SPARE
from tests.parts.lending.allocator import Gpu, Process
from tests.parts.lending.fatal_pages import PAGE, Device, FatalPages

pytestmark = pytest.mark.slow  # imports vLLM
BLOCKS, STRIDE, STEP = 17, 896 * 2**10, 100 * 2**20


class Standing:
    """A driver of vLLM's worker: its calls in EngineCore's order. `steps`: blocks that warm-up writes."""

    device = torch.device("cuda", 0)

    def __init__(self, process: Process, steps) -> None:
        tensor = SimpleNamespace(size=BLOCKS * STRIDE, block_stride=STRIDE, host_resident=False)
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(has_layer_views=True))
        config = SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=[tensor])
        config.has_mamba_layers, config.num_blocks = False, BLOCKS
        self.model_runner = SimpleNamespace(kv_cache_config=config)
        layout = SimpleNamespace(name="BLHNC")
        self.cache_config = SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout)
        self.process, self.steps = process, steps
        model = SimpleNamespace(enable_cumem_allocator=False)
        self.vllm_config = SimpleNamespace(model_config=model)

    def determine_available_memory(self) -> int:
        self.process.pass_by(STEP)
        return BLOCKS * STRIDE

    def compile_or_warm_up_model(self) -> str:
        for block in self.steps:
            self.rose_kv.pool.touch(block * STRIDE)
            self.rose_kv.pool.touch((block + 1) * STRIDE - 1)
        self.process.empty_cache()  # graphs are captured
        return "times"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """started(gpu, steps) -> (the worker after its start, its process)."""
    from rose.engine.inactive import InactiveWorker
    from rose.parts.lending.vllm import kv_worker

    monkeypatch.setenv(plugin.FOLDER, str(tmp_path))
    new_pool = lambda nbytes, device: FatalPages(Device(20), nbytes)  # noqa: E731
    monkeypatch.setattr(kv_worker, "new_pool", new_pool)

    def start(gpu: Gpu, steps=range(1, BLOCKS)):
        process = Process(gpu)
        monkeypatch.setattr(headroom, "torch", process)
        worker = type("Worker", (Standing, kv_worker.KvWorker, InactiveWorker), {})(process, steps)
        with kv_worker._context(worker, "weights"):
            process.take(10 * 2**20)
        assert worker.determine_available_memory() == BLOCKS * STRIDE
        with kv_worker._context(worker, "kv_cache"):
            torch.zeros(BLOCKS * STRIDE, dtype=torch.int8, device="cuda:0")
        assert worker.compile_or_warm_up_model() == "times"
        return worker, process

    return start


def test_warm_up_may_write_to_any_block_and_leaves_the_null_block_and_the_largest_step(started):
    gpu = Gpu(2**30)
    worker, process = started(gpu)
    assert worker.rose_kv_layout()["held"] == 1
    assert worker.rose_kv.mapped_bytes == worker.rose_kv.pool.mapped_bytes == PAGE
    Process(gpu).take(gpu.free)
    process.pass_by(STEP)


def test_an_engine_that_was_inactive_has_that_memory_again_before_it_serves(started):
    gpu = Gpu(2**30)
    worker, process = started(gpu)
    process.empty_cache()  # as vLLM's sleep mode does
    worker.wake_up = worker._read_folder = lambda: None
    worker._rose_initial = None
    worker.rose_activate()
    Process(gpu).take(gpu.free)
    process.pass_by(STEP)


def test_an_engine_that_has_too_little_does_not_start_and_on_a_cpu_it_keeps_nothing(
    started, monkeypatch
):
    with pytest.raises(RuntimeError, match="the steps of this engine take 0.11 GiB"):
        started(Gpu(10 * 2**20 + STEP + SPARE))
    monkeypatch.setattr(Standing, "device", torch.device("cpu"))
    worker, process = started(Gpu(2**30))
    assert worker.rose_headroom is None and not process.cached
