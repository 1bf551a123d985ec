"""Ranks of this machine find each other by rose/launch/mpiexec.py, which listens nowhere and lets
none outlive it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rose.launch.local import MPIEXEC
from rose.launch.mpiexec import World
from tests import processes

REPOSITORY = Path(__file__).resolve().parents[2]
MPI = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp;ofi_rxm", "MPIR_CVAR_NOLOCAL": "1"}
MPI |= {"FI_TCP_IFACE": "lo"}
# Each rank waits for all others, then says what it sees.
WORLD = """
import json, os
from mpi4py import MPI
from rose.comm import mpi_process
world = MPI.COMM_WORLD
mpi_process.unlink_shared(world)  # ranks that are killed would leave shared memory
ranks = world.allgather(os.environ["KIND"])
os.write(1, json.dumps([world.Get_rank(), ranks]).encode() + b"\\n")
"""


def mpiexec(*arguments: str) -> subprocess.Popen:
    own = {"text": True, "env": os.environ | MPI | {"PYTHONPATH": str(REPOSITORY)}}
    own |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*MPIEXEC, *arguments], **own)


def python(source: str, *words: str) -> list[str]:
    return [sys.executable, "-c", source, *words]


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    said, complained = process.communicate(timeout=60)
    return process.returncode, said, complained


def test_ranks_of_two_commands_are_one_world(monkeypatch):
    # As a run on this machine alone has them that is started in `srun --pty bash`.
    for name in ("PMIX_RANK", "PMI_SPAWNED", "PMI_PORT", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "7")
    program = python(WORLD)
    code, said, complained = ended(
        mpiexec("-n", "2", "-env", "KIND", "a", *program, ":", "-env", "KIND", "b", *program)
    )
    assert code == 0, complained
    found = sorted(json.loads(line) for line in said.splitlines())
    assert found == [[number, ["a", "a", "b"]] for number in range(3)]
    code, _, complained = ended(mpiexec("-n", "2", "/no/such/program"))
    assert code == 1 and "/no/such/program can't be started: No such file" in complained


def test_nothing_listens_but_the_ranks_on_loopback():
    source = f"{WORLD}\nimport time; time.sleep(60)"
    with mpiexec("-n", "2", "-env", "KIND", "a", *python(source)) as process:
        try:
            for _ in range(2):
                process.stdout.readline()
            own = psutil.Process(process.pid)
            assert processes.listens(own) == []
            heard = [at for rank in own.children() for at in processes.listens(rank)]
            assert {at.ip for at in heard} <= {"127.0.0.1"}
        finally:
            process.kill()


FAILS = [
    ("raise SystemExit(3)", 3, "rank 0 ended with code 3"),
    ("import os; os.kill(os.getpid(), 9)", 137, "rank 0 ended with SIGKILL"),
    ("import os; os.kill(os.getpid(), 40)", 168, "rank 0 ended with signal 40"),
    (f"{WORLD}MPI.COMM_WORLD.Abort(5)", 5, "called MPI_Abort"),
]


@pytest.mark.parametrize("source, code, words", FAILS)
def test_a_rank_that_fails_ends_the_others_and_gives_its_code(source, code, words):
    variable = ("-env", "KIND", "a")
    waits = python(f"{WORLD if WORLD in source else ''}\nimport time; time.sleep(600)")
    fails = python(source)
    got, _, complained = ended(mpiexec(*variable, *fails, ":", "-n", "2", *variable, *waits))
    assert got == code and words in complained


def test_with_keep_the_others_go_on():
    fails, waits = python("raise SystemExit(3)"), python("import time; time.sleep(1); print('on')")
    got, said, _ = ended(mpiexec("-keep", *fails, ":", *waits))
    assert (got, said) == (3, "on\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_it(number, tmp_path):
    source = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
    process = mpiexec("-n", "2", *python(source))
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    process.communicate(timeout=60)
    processes.until(lambda: not any(map(processes.alive, ranks)), "the ranks to end", 30.0)


def test_a_rank_that_sends_garbage_ends_nothing():
    """Nobody but the rank has the other end of its socket."""
    source = (
        "import os, socket; s = socket.socket(fileno=int(os.environ['PMI_FD']));"
        "s.sendall(b'cmd=get\\n\\xff\\xfe\\n' + b'x' * 70000); print('sent')"
    )
    code, said, complained = ended(mpiexec(*python(source)))
    assert (code, said) == (0, "sent\n") and "sent what is no request" in complained


def test_worlds_have_different_names():
    """MPICH names a world's shared memory after it, which worlds of a host must not share."""
    assert World(2).name != World(2).name
