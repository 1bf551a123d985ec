"""`make train` on a system that has nothing of this machine, in a clone of what is committed."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "fresh_machine.sh"
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
SECONDS = 2000


def suite_of(commit: str) -> str:
    """Debian 12 or 13 in turn, the same for a commit each time."""
    return sorted(PYTHONS)[int(commit, 16) % len(PYTHONS)]


@pytest.fixture
def start():
    """start(WORD, ...) -> scripts/fresh_machine.sh, which gets SIGTERM when this process ends."""
    if os.geteuid() != 0:
        pytest.skip("only root may make a system of its own")
    if not shutil.which("apt-get"):
        pytest.skip("mmdebstrap makes the system, and this machine has no apt-get to install it")
    started = []

    def start(*words: str) -> subprocess.Popen:
        command = ["setpriv", "--pdeathsig", "TERM", str(SCRIPT), *words]
        own = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        own |= {"cwd": REPOSITORY, "start_new_session": True}
        started.append(subprocess.Popen(command, **own))
        return started[-1]

    yield start
    for each in started:
        each.terminate()
        each.communicate()


def test_make_train_sets_up_and_trains(start):
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, text=True)
    suite = suite_of(head.strip())
    train = "make train ARGS='trainer.steps=2 observe.terminal=false'"
    made = start(suite, "sh", "-c", f"{train} && ls outputs/frozenlake/report.html")
    said, _ = made.communicate(timeout=SECONDS)
    assert made.returncode == 0, said
    assert f"a virtual environment of Python {PYTHONS[suite]}." in said
    assert "the system lacks libnuma.so.1: unpacked into" in said
    assert said.endswith("outputs/frozenlake/report.html\n")


def test_an_interrupted_one_leaves_nothing(start):
    """SIGTERM comes while mmdebstrap fills the folder, which is removed."""
    before = set(Path("/tmp").glob("fresh-*"))
    made = start("trixie", "true")
    [folder] = processes.until(
        lambda: {f for f in Path("/tmp").glob("fresh-*") if any(f.iterdir())} - before, "a system"
    )
    made.send_signal(signal.SIGTERM)
    made.communicate(timeout=processes.DEADLINE_S)
    assert not folder.exists() and not processes.left(lambda: processes.bearing(str(folder)))
