"""The doctor's findings from outputs of nvidia-smi, torch and /dev/shm on real machines."""

import pytest

from rose.parts.doctor import devices
from rose.parts.doctor.finding import Ended
from tests.parts.doctor.conftest import check, ended

H200 = "0, NVIDIA H200, 580.159.04, 143771, 143150, 9.0, Disabled\n"
OLD_DRIVER = H200.replace("580.159.04", "570.86.15")
TWO = H200 + H200.replace("0, NV", "1, NV", 1).replace("143150", "93150")
T4 = "0, Tesla T4, 580.65.06, 15360, 15101, 7.5, [N/A]\n"
SLICED = "0, NVIDIA H100 80GB HBM3, 580.65.06, 81559, [N/A], 9.0, Enabled\n"
BROKEN = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n"
)
TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-47\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \t48-95\t1\t\tN/A\nNIC0\tPXB\tPXB\tSYS\n\nLegend:\n\n  X    = Self\n"
)


def view(cuda="13.0", error="", no_peer=(), version="2.13.0+cu130"):
    said = {"version": version, "cuda": cuda, "count": 1, "error": error, "no_peer": no_peer}
    return ended({"what": "torch"} | said)


@pytest.mark.parametrize(
    ("text", "wanted", "state", "words"),
    [
        (H200, 1, "ok", "1 x NVIDIA H200, sm_90, 139.8 of 140.4 GiB free"),
        (TWO, 0, "warning", "2 x NVIDIA H200, sm_90, 91.0 of 140.4 GiB free on GPU 1"),
        (H200, 4, "failed", "the run wants 4"),
        (SLICED, 1, "warning", "GPU 0 is cut into MIG slices"),
    ],
)
def test_number_and_free_memory(text, wanted, state, words):
    check(devices.here(devices.parse(text), wanted), state, words)


@pytest.mark.parametrize(
    ("variable", "wanted", "words"),
    [
        ("4,5", 8, ["names 2 GPUs; the run wants 8"]),
        ("", 1, ["names 0 GPUs; the run wants 1"]),
        ("4,5", 2, []),
        (None, 8, []),
        ("9", 1, []),
    ],
)
def test_gpus_that_are_there_and_not_given_do_not_count(nvidia_smi, variable, wanted, words):
    nvidia_smi(variable=variable)
    found = devices.named(wanted)
    assert [finding.words for finding in found] == words
    for finding in found:
        assert finding[:2] == ("failed", f"CUDA_VISIBLE_DEVICES={variable}")


def test_a_node_is_looked_at_with_what_was_given_of_it(nvidia_smi_says, monkeypatch):
    listing = "".join(f"GPU {number}: NVIDIA H200 (UUID: GPU-{number})\n" for number in (0, 1))
    smi = nvidia_smi_says(f'case "$1" in -L) echo "{listing}" ;; --query*) echo "{TWO}" ;; esac')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    real = devices.run
    monkeypatch.setattr(
        devices, "run", lambda argv, **more: real(argv, **more) if argv[0] == str(smi) else view()
    )
    found = [(each.state, each.words) for each in devices.of_node(2, 0.0)]
    assert ("failed", "names 1 GPUs; the run wants 2") in found


BUILT = "driver 580.159.04, torch 2.13.0+cu130 built for CUDA 13.0; torch computes on 1"
OLD = view(error="The NVIDIA driver on your system is too old")
NO_TORCH = Ended(1, "", "ModuleNotFoundError: No module named 'torch'\n")
CPU = view(cuda=None, version="2.13.0+cpu")
FABRIC = view(error="system not yet initialized")


@pytest.mark.parametrize(
    ("text", "seen", "state", "words", "remedy"),
    [
        (H200, view(), "ok", BUILT, ""),
        (OLD_DRIVER, OLD, "failed", "too old", "needs driver 580 or later"),
        (OLD_DRIVER, view(), "ok", "by a compatibility package", ""),
        (OLD_DRIVER, view(cuda="12.8"), "ok", "built for CUDA 12.8; torch computes on 1", ""),
        (H200, FABRIC, "failed", "not yet initialized", "nvidia-fabricmanager"),
        (H200, CPU, "failed", "torch 2.13.0+cpu is not built for CUDA", "make gpu"),
        (H200, NO_TORCH, "failed", "No module named", "make gpu"),
    ],
)
def test_the_driver_against_torchs_cuda(text, seen, state, words, remedy):
    check(devices.cuda(devices.parse(text), seen), state, words, remedy)
    [found] = devices.old(devices.parse(T4))
    check(found, "warning", "sm_75", "sm_80")
    assert devices.old(devices.parse(text)) == []


def test_links_are_each_pairs():
    pairs = devices.links(TOPO)
    assert pairs == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    assert devices.between(pairs, view()).words == "NV18 (1 pairs), SYS (2 pairs)"
    check(devices.between({(0, 1): "PHB"}, view()), "warning", "no NVLink")
    blocked = devices.between(pairs, view(no_peer=[(0, 2)]))
    check(blocked, "warning", "GPUs 0 and 2 can't read", "ACS")


@pytest.mark.parametrize(
    ("total", "free", "wanted", "state", "remedy"),
    [
        (64, 64, 0.0, "failed", "--ipc=host"),
        (32768, 32768, 16.0, "ok", ""),
        (32768, 8192, 16.0, "warning", "transfer.mirror_gib"),
    ],
)
def test_shared_memory(monkeypatch, tmp_path, total, free, wanted, state, remedy):
    class Size:
        f_frsize, f_blocks, f_bavail = 2**20, total, free

    monkeypatch.setattr(devices.os, "statvfs", lambda _: Size)
    found = devices.shared_memory(wanted, "failed", tmp_path)
    check(found, state, f"of {total / 1024:.1f} GiB", remedy)


def test_a_broken_driver_is_told_in_its_own_words_and_none_too(nvidia_smi_says, monkeypatch):
    nvidia_smi_says(f"echo '{BROKEN}'; exit 18")
    check(devices.of_node(0, 0.0)[0], "warning", "NVML library version")
    check(devices.of_node(2, 0.0)[0], "failed", "none of 2: nvidia-smi: NVML library version")
    monkeypatch.setattr(devices.shutil, "which", lambda _: None)
    check(devices.of_node(0, 0.0)[0], "ok", "none, and none needed on this machine")
    check(devices.of_node(8, 0.0)[0], "failed", "none of 8: no NVIDIA driver")


def test_findings_of_another_node_come_through():
    said = {"state": "ok", "part": "GPUs here", "words": "8 x NVIDIA H200", "remedy": ""}
    found = devices.findings(ended({"what": "finding", "node": "n7"} | said))
    assert found == [("ok", "GPUs here on n7", "8 x NVIDIA H200", "")]
    [none] = devices.findings(Ended(1, "", "srun: error: Unable to allocate resources\n"))
    check(none, "failed", "Unable to allocate")
