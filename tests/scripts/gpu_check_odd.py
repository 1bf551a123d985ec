"""Checks that go wrong in every way, for test_gpu_check.py: run as a script it is the process of
one of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2]),
    str(Path(__file__).resolve().parents[2] / "scripts"),
]

from tests.gpu.frame import Check, Impossible, child


class Sizes(msgspec.Struct):
    number: int = 1


def well(report):
    report.say("working")
    report.figure("number", report.sizes.number, "things", least=1, most=10)


def outside(report):
    report.figure("rate", 2.0, "TFLOP/s", least=3.0, bound=10.0, remedy="ask for a faster one")
    report.figure("after it", True)


def impossible(report):
    raise Impossible("no such thing here")


def raises(report):
    print("the last words of a library")
    raise ValueError("what was wrong")


def killed(report):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(report):
    report.figure("before it hung", 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)


def leaves(report):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


CHECKS = {
    work.__name__: Check(
        work.__name__, "", work, {"cpu": Sizes(), "cuda": Sizes()}, 60.0, "do this", **rest
    )
    for work, rest in (
        (well, {}),
        (outside, {}),
        (impossible, {}),
        (raises, {}),
        (killed, {}),
        (hangs, {}),
        (leaves, {}),
    )
}

if __name__ == "__main__":
    _, _, name, setup, events = sys.argv
    sys.exit(child(CHECKS[name], Path(setup), Path(events)))
