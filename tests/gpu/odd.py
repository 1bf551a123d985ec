"""Checks that go wrong in every way, for tests/scripts/test_gpu_check.py, which runs them as
scripts/gpu_check.py runs those of test_gpu.py."""

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from tests.gpu.frame import check


class Sizes(msgspec.Struct):
    number: int = 1


def well(report):
    report.say("working")
    report.figure("number", report.sizes.number, "things", least=1, most=10)


def outside(report):
    report.figure("rate", 2.0, "TFLOP/s", least=3.0, bound=10.0, remedy="ask for a faster one")
    report.figure("after it", True)


def impossible(report):
    pytest.skip("no such thing here")


def raises(report):
    print("the last words of a library", flush=True)
    raise ValueError("what was wrong")


def killed(report):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(report):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leaves(report)
    time.sleep(600)


def leaves(report):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


SIZES = {"cpu": Sizes(), "cuda": Sizes()}
CHECKS = {
    work.__name__: check("", "do this", SIZES, 60.0, least_gpus=2)(work)
    for work in (well, outside, impossible, raises, killed, hangs, leaves)
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_gpu(check, report):
    check.work(report)
