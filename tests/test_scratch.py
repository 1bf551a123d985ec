"""Temporary folders go when their process ends, also when it is killed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rose import scratch

MAKES = "from rose import scratch; import sys; print(scratch.folder('kind-'), flush=True)\n"
FORKS = """import os
if pid := os.fork():
    os.waitpid(pid, 0)
    print("waited", flush=True)
    sys.stdin.read()
"""


def start(tmp_path, then):
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES + then],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


def end(process):
    process.stdin.close()
    process.stdout.close()
    return process.wait(timeout=60)


def test_it_goes_with_its_process_and_not_with_a_forked_one(tmp_path):
    process, path = start(tmp_path, FORKS)
    try:
        assert process.stdout.readline() == "waited\n"
        assert path.is_dir() and path.stat().st_mode & 0o777 == 0o700
        (path / "socket").touch()
    finally:
        end(process)
    assert not path.exists()


def test_the_next_process_removes_those_of_killed_ones_and_no_others(tmp_path, monkeypatch):
    killed, gone = start(tmp_path, "sys.stdin.read()")
    living, kept = start(tmp_path, "sys.stdin.read()")
    try:
        killed.send_signal(signal.SIGKILL)
        end(killed)
        assert gone.is_dir()
        (tmp_path / "kind-of-a-user").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        own = scratch.folder("kind-")
        several = Path(tempfile.mkdtemp(prefix=scratch.prefix("kind-")))
        scratch.remove_stale("kind-")
        assert set(tmp_path.iterdir()) == {kept, own, several, tmp_path / "kind-of-a-user"}
    finally:
        end(living)
