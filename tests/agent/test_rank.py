"""What a dead environment host leaves behind, and its rank."""

import os
import sys
from pathlib import Path

import pytest

from rose.parts.adapters.gateway.run import SCRATCH, remove_stale
from rose.processes import mark
from tests import processes
from tests.processes import ran

# a process of root's that this one, which is nobody by then, can't end
LEFT = """
import os, subprocess
from rose.agent import rank
rank.ALONE_S = rank.END_S = 0.3
left = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.setresuid(65534, 65534, 65534)
rank._end_descendants()
print(left.pid, flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process is needed")
def test_a_process_that_cant_be_ended_holds_up_no_new_host():
    done = ran([sys.executable, "-c", LEFT], timeout=120, check=True)
    words, pid = done.stdout.splitlines()
    try:
        assert words == f"processes {pid} of a dead environment host can't be ended"
    finally:
        processes.kill(int(pid))


def test_folders_of_agents_whose_hosts_were_killed_go(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here, pid, start = mark().split(".")
    gone = f"{SCRATCH}{here}.{pid}.1-x"  # an earlier process of this number
    elsewhere = f"{SCRATCH}{here[::-1]}.{2**22 + 1}.1-x"  # a host of another node
    kept = {f"{SCRATCH}{here}.{pid}.{start}-x", elsewhere, f"{SCRATCH}other"}
    for name in (*kept, gone):
        (tmp_path / name / "in").mkdir(parents=True)
    remove_stale()
    assert {path.name for path in Path(tmp_path).iterdir()} == kept
