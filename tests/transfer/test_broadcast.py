"""Every byte of every trainer rank's file reaches the memory of every rollout rank's node; whoever
is late costs speed only."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rose.launch.local import MPIEXEC
from rose.transfer.broadcast import _read_header, make_broadcast
from rose.transfer.errors import TransferError

HERE = Path(__file__).parent
MPI = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp;ofi_rxm", "MPIR_CVAR_NOLOCAL": "1"}
MPI |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}


def run(case: str, ranks: int, folder: Path) -> str:
    command = [*MPIEXEC, "-keep", "-n", str(ranks), sys.executable]
    command += [str(HERE / "broadcast_ranks.py"), case, str(folder)]
    ran = subprocess.run(command, env=os.environ | MPI, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not [path for path in folder.rglob("*") if path.is_file()]
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case, ranks", [("exchange", 7), ("shared", 6), ("gloo", 5)])
def test_all_rollouts_get_the_files_of_two_trainers_while_the_mailbox_talks(tmp_path, case, ranks):
    """Nodes with busy loops, 4 versions; the second one's kernel refuses files over a piece. Or all
    ranks share the memory of one node, or pieces travel over torch.distributed."""
    said = run(case, ranks, tmp_path)
    assert all(f"identical at rollout {rollout}" in said for rollout in range(ranks - 3))


@pytest.mark.slow
def test_a_receiver_that_takes_nothing_hangs_neither_the_trainer_nor_the_others(tmp_path):
    said = run("deaf", 5, tmp_path)
    why = r"not done within 2 s \(transfer.load_timeout_s\): the last \d pieces of \d+ of 67108864"
    why += " bytes did not move"
    file = "broadcast of v000001/from-000000/rank-00000.h5"
    assert re.search(f"trainer rank 0: {file}: {why}", said), said
    assert len(re.findall(f"rollout says: {file} by trainer rank 0: {why}", said)) == 2, said
    assert "the late one has what was posted" in said
    assert said.count("engines read this version and later ones from the store's files") == 1


def make(kind: str, rollouts: list[int]):
    """A choice that is refused sends nothing: a rank stands in for `MPI.Comm`."""
    rank = SimpleNamespace(Get_rank=lambda: 1)
    return make_broadcast(kind, rank, [1], rollouts, 5, Path("run"), 1 << 30)


def test_an_unknown_kind_and_nccl_without_a_gpu_are_refused_and_none_broadcasts_nothing():
    with pytest.raises(TransferError, match="transfer.broadcast='tcp'; known are 'mpi', 'nccl'"):
        make("tcp", [2])
    with pytest.raises(TransferError, match="MPI rank 1 has no GPU"):
        make("nccl", [2])
    assert make("none", [2]) is None and make("mpi", []) is None


@pytest.mark.parametrize("start", [b"HTTP/1.1 404 Not Found", b"RSB2" + bytes(8) + b"../up"])
def test_bytes_that_are_no_header_are_an_error(start):
    with pytest.raises(TransferError, match="begins with b'RSB2' and names a relative path"):
        _read_header(np.frombuffer(start.ljust(128, b"\0"), np.uint8))
