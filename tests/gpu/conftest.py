"""Figures of the GPU checks: tests/gpu is run by scripts/gpu_check.py, a process for each check,
and reports to it."""

import os
from pathlib import Path

import msgspec
import pytest

from scripts.harness import answers
from tests.gpu.frame import Check, Report, Setup

SETUP = os.environ.get("ROSE_GPU_SETUP")  # file that scripts/gpu_check.py writes
# Taken before pytest writes anything, whose output goes to the check's log.
tell = answers() if SETUP else print


@pytest.fixture
def report(check: Check) -> Report:
    if SETUP is None:
        pytest.skip("checks of GPUs are run by scripts/gpu_check.py; --device cpu needs no GPU")
    setup = msgspec.json.decode(Path(SETUP).read_bytes(), type=Setup)
    if setup.device == "cpu" and not check.on_cpu:
        pytest.skip("needs a GPU")
    if setup.device == "cuda" and setup.gpus < check.least_gpus:
        pytest.skip(f"needs {check.least_gpus} GPUs, {setup.gpus} visible")
    return check.report(setup, tell)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    result = yield
    if SETUP and (call.when == "call" or not result.passed):
        error = call.excinfo and call.excinfo.value
        words = "" if error is None else f"{type(error).__name__}: {error}"
        tell({"end": result.outcome, "words": error.msg if result.skipped else words})
    return result
