"""The stop flag between two processes of a device, and the stops of a step on a GPU and on a CPU."""

import gc
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.parts.lending import settings
from rose.parts.lending.flag import MAY_GO, Flag
from rose.parts.lending.vllm import stops
from rose.parts.lending.vllm.vmm import CudaDriver, CudaError
from tests.parts.lending.libcuda import build_libcuda

JOIN_S = 60.0


@pytest.fixture
def flag(tmp_path):
    made = Flag(tmp_path)
    made.up = False
    return made


def runs(work) -> threading.Thread:
    """Call `work` in a thread, and give it time to end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.2)
    return thread


@pytest.mark.parametrize(
    "up, ignored, may_go", [(0, 0, True), (1, 0, False), (0, 1, True), (1, 1, True)]
)
def test_a_step_goes_on_while_the_flag_is_down_or_ignored(flag, tmp_path, up, ignored, may_go):
    flag.up, flag.ignored = bool(up), bool(ignored)
    other = Flag(tmp_path)  # mapped a second time
    assert (other.up, other.ignored, other.may_go) == (bool(up), bool(ignored), may_go)
    word = int.from_bytes((tmp_path / "flag").read_bytes()[:4], "little")
    assert bool(word & MAY_GO) == may_go


def test_a_page_that_is_locked_for_a_gpu_stays_mapped(tmp_path, monkeypatch):
    """CUDA keeps the address, at which nothing else may be mapped."""

    class Driver:
        def lock(self, address, nbytes):
            return address

        def wait(self, stream, word, bits):
            pass

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    flag = Flag(tmp_path)
    address = f"{flag.address:x}-"
    stop = stops.on_gpu(flag, torch.device("cuda", 0), Driver())
    del flag
    gc.collect()
    assert address in Path("/proc/self/maps").read_text(encoding="utf-8")
    del stop
    gc.collect()
    assert address not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_another_process_sees_the_flag_though_its_file_was_removed(flag, tmp_path):
    code = (
        "import sys; from pathlib import Path; from rose.parts.lending.flag import Flag\n"
        "flag = Flag(Path(sys.argv[1])); print('mapped', flush=True); input(); flag.up = True"
    )
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=-1, stdout=-1, text=True)
    assert child.stdout.readline() == "mapped\n" and not flag.up
    (tmp_path / "flag").unlink()
    child.communicate("go\n", timeout=JOIN_S)
    assert flag.up


def test_a_gpus_stream_waits_for_the_flag_by_the_calls_of_cudas_header(flag, tmp_path, monkeypatch):
    driver = CudaDriver(0, build_libcuda(tmp_path))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x77, raising=False)
    stop = stops.on_gpu(flag, torch.device("cuda", 0), driver)
    stop()
    for byte in ("up", "ignored"):
        flag.up, flag.ignored = True, False
        step = runs(stop)
        assert step.is_alive()
        setattr(flag, byte, byte == "ignored")
        step.join(JOIN_S)
        assert not step.is_alive()


def test_a_gpu_that_cannot_wait_is_refused_with_the_setting_that_helps(flag, monkeypatch):
    class Driver:
        def lock(self, address, nbytes):
            raise CudaError("cuMemHostRegister_v2", 801, "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    with pytest.raises(ValueError, match="NOT_SUPPORTED.*set serving.lending.stops=step"):
        stops.on_gpu(flag, torch.device("cuda", 0), Driver())


def test_on_a_cpu_a_stop_ends_with_the_flag_or_at_its_deadline(flag, monkeypatch):
    stop = stops.on_cpu(flag)
    flag.up = True
    step = runs(stop)
    assert step.is_alive()
    flag.up = False
    step.join(JOIN_S)
    assert not step.is_alive()
    flag.up = True
    monkeypatch.setattr(stops, "DEADLINE_S", 0.05)
    stop()


def config(ranks: int):
    model = SimpleNamespace(get_num_layers=lambda parallel: 28)
    parallel = SimpleNamespace(world_size=ranks)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


def test_a_step_has_a_part_per_layer_and_one_for_the_logits_but_one_alone_over_several_ranks():
    lending = settings.of_server([]).lending
    assert (stops.parts(config(1), lending), stops.parts(config(2), lending)) == (29, 1)
    switched_off = settings.of_server(["serving.lending.stops=step"]).lending
    assert stops.parts(config(1), switched_off) == 1
