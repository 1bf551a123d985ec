"""The stop flag between two processes of a device, and the stops of a step on a GPU and on a CPU."""

import gc
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.parts.lending import flag as flags
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


def ends_with_either_byte(stop, flag, other) -> None:
    """Check that `stop` waits while the flag is up, until `other` lowers or ignores it."""
    for byte in ("up", "ignored"):
        flag.up, flag.ignored = True, False
        step = runs(stop)
        assert step.is_alive()
        setattr(other, byte, byte == "ignored")
        step.join(JOIN_S)
        assert not step.is_alive()


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_step_goes_on_while_the_flag_is_down_or_ignored(flag, tmp_path, up, ignored):
    flag.up, flag.ignored, may_go = up, ignored, ignored or not up
    other = Flag(tmp_path)  # mapped a second time
    assert (other.up, other.ignored, other.may_go) == (up, ignored, may_go)
    word = int.from_bytes((tmp_path / "flag").read_bytes()[:4], "little")
    assert bool(word & MAY_GO) == may_go


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU's driver of which the calls are those of CUDA's header."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x77, raising=False)
    return CudaDriver(0, build_libcuda(tmp_path))


def test_a_page_that_is_locked_for_a_gpu_stays_mapped(tmp_path, gpu):
    """CUDA keeps the address, at which nothing else may be mapped."""

    def mapped() -> bool:
        gc.collect()
        return address in Path("/proc/self/maps").read_text(encoding="utf-8")

    flag = Flag(tmp_path)
    flag.up, address = False, f"{flag.address:x}-"
    stop = stops.on_gpu(flag, torch.device("cuda", 0), gpu)
    del flag
    assert mapped()
    del stop
    assert not mapped()


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


def test_a_gpus_stream_waits_for_the_flag_by_the_calls_of_cudas_header(flag, gpu, monkeypatch):
    stop = stops.on_gpu(flag, torch.device("cuda", 0), gpu)
    stop()
    ends_with_either_byte(stop, flag, flag)

    def lock(address, nbytes):
        raise CudaError("cuMemHostRegister_v2", 801, "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(gpu, "lock", lock)
    with pytest.raises(ValueError, match="NOT_SUPPORTED.*set serving.lending.stops=step"):
        stops.on_gpu(flag, torch.device("cuda", 0), gpu)


@pytest.mark.parametrize("number", [flags._FUTEX, None, 10**6])
def test_on_a_cpu_a_stop_ends_with_the_flag_or_at_its_deadline(flag, tmp_path, monkeypatch, number):
    """The system call may be there, unknown, or refused."""
    monkeypatch.setattr(flags, "_FUTEX", number)
    monkeypatch.setattr(stops, "DEADLINE_S", 10 * JOIN_S)
    stop, other = stops.on_cpu(flag), Flag(tmp_path)
    ends_with_either_byte(stop, flag, other)
    flag.up, flag.ignored = True, False
    monkeypatch.setattr(stops, "DEADLINE_S", 0.05)
    stop()


def test_a_step_has_a_part_per_layer_and_one_for_the_logits_but_one_alone_over_several_ranks():
    model = SimpleNamespace(get_num_layers=lambda parallel: 28)
    for ranks, given, expected in ((1, [], 29), (2, [], 1), (1, ["serving.lending.stops=step"], 1)):
        parallel = SimpleNamespace(world_size=ranks)
        config = SimpleNamespace(model_config=model, parallel_config=parallel)
        assert stops.parts(config, settings.of_server(given).lending) == expected
