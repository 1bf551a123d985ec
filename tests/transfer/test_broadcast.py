"""Every byte of every trainer rank reaches every rollout rank, in order; whoever is late is
named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.launch.local import find_mpiexec
from rose.transfer.broadcast import FRAME_BYTES, Assembly, Header, Kind, make_broadcast
from rose.transfer.errors import TransferError

HERE = Path(__file__).parent
MPI = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp;ofi_rxm",
    "MPIR_CVAR_NOLOCAL": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE.parents[1]),
}


def run(case: str, ranks: int, folder: Path) -> str:
    command = [
        find_mpiexec(),
        "-launcher",
        "fork",
        "-disable-auto-cleanup",
        "-n",
        str(ranks),
        sys.executable,
        str(HERE / "broadcast_ranks.py"),
        case,
        str(folder),
    ]
    ran = subprocess.run(command, env=os.environ | MPI, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(folder.iterdir()) == []
    return ran.stdout


@pytest.mark.slow
def test_all_receivers_get_the_bytes_of_two_roots_while_the_mailbox_talks_and_one_has_no_memory_left(
    tmp_path,
):
    """2 roots, 4 receivers with busy loops, 4 versions; the second one's kernel refuses files over
    a frame. A root sends one edge at a time, under a name that is a path below the mirror."""
    said = run("exchange", 7, tmp_path)
    # 3 has it from 1
    assert all(f"identical at receiver {receiver}" in said for receiver in (0, 2, 3))


@pytest.mark.slow
def test_bodies_over_torch_distributed_arrive_like_those_over_mpi(tmp_path):
    said = run("gloo", 5, tmp_path)
    assert "identical at receiver 0" in said and "identical at receiver 1" in said


@pytest.mark.slow
def test_a_root_that_falls_silent_is_named_at_every_receiver_and_the_others_go_on(tmp_path):
    said = run("silent", 6, tmp_path)
    for receiver in range(3):
        assert (
            f"receiver {receiver} says: broadcast of 'v000009/full' by trainer rank 1: no frame for 2 s, "
            f"after {2 * FRAME_BYTES} bytes of payload"
        ) in said


@pytest.mark.slow
def test_a_receiver_that_takes_nothing_is_named_by_the_rank_before_it_and_stops_the_root(tmp_path):
    said = run("deaf", 4, tmp_path)
    assert (
        "receiver 0 says: rollout rank 0 passes broadcasts on to rollout rank 1 (MPI rank 3), which took no"
        in said
    )
    assert (
        "root says: broadcast of 'v000001/full' by trainer rank 0: rollout rank 0 (MPI rank 2) took no frame"
        in said
    )


class Rank:
    """Stands in for `MPI.Comm`: a choice that is refused talks to nobody."""

    def Get_rank(self) -> int:
        return 1


def test_an_unknown_kind_and_nccl_without_a_gpu_are_refused():
    with pytest.raises(
        TransferError, match="transfer.broadcast='tcp'; known are 'mpi', 'nccl' and 'none'"
    ):
        make_broadcast("tcp", Rank(), [1], [2], 5)
    with pytest.raises(TransferError, match="MPI rank 1 has no GPU"):
        make_broadcast("nccl", Rank(), [1], [2], 5)


def test_none_and_a_run_without_rollout_ranks_broadcast_nothing():
    assert make_broadcast("none", Rank(), [1], [2], 5) is None
    assert make_broadcast("mpi", Rank(), [1], [], 5) is None


class Ignores:
    def begin(self, root, name): ...
    def payload(self, root, data): ...
    def table(self, root, data): ...
    def end(self, root): ...


@pytest.mark.parametrize(
    "frames, words",
    [
        (
            [(Kind.PAYLOAD, 0, b"x")],
            "PAYLOAD frame came from trainer rank 3, whose broadcast of 'an edge' has not begun",
        ),
        ([(Kind.BEGIN, 0, b"v1"), (Kind.BEGIN, 0, b"v2")], "BEGIN frame .* of 'v1' has begun"),
        (
            [(Kind.BEGIN, 0, b"v1"), (Kind.PAYLOAD, 0, b"abc"), (Kind.PAYLOAD, 5, b"d")],
            "for byte 5 came after 3 bytes",
        ),
        (
            [(Kind.BEGIN, 0, b"v1"), (Kind.PAYLOAD, 0, b"abc"), (Kind.END, 4, b"")],
            "END frame for byte 4 came after 3",
        ),
    ],
)
def test_frames_that_are_missing_are_an_error(frames, words):
    assembly = Assembly(deadline_s=5)
    with pytest.raises(TransferError, match=words):
        for number, (kind, at, body) in enumerate(frames):
            assembly.take(Header(kind, 3, number, len(body), at), memoryview(body), Ignores())


def test_bytes_that_are_no_frame_are_an_error():
    with pytest.raises(
        TransferError, match="begins with b'RSB1' and a kind from 1 to 4, this one with b'HTTP'"
    ):
        Header.read(memoryview(b"HTTP" + bytes(40)))
