"""The mailbox between real MPI ranks; `python tests/comm/test_mailbox.py BROADCASTS` for longer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.launch.local import MPIEXEC

HERE = Path(__file__).parent


def ranks(*script: str, deadline_s: float = 240.0) -> str:
    env = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp;ofi_rxm", "MPIR_CVAR_NOLOCAL": "1"}
    env = os.environ | env | {"PYTHONPATH": str(HERE.parents[1])}
    command = [*MPIEXEC, "-n", "3", sys.executable, *script]
    options = {"cwd": HERE, "env": env, "timeout": deadline_s}
    ran = subprocess.run(command, capture_output=True, text=True, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_real_ranks_exchange_messages_of_all_sizes(tmp_path):
    said = ranks("mailbox_ranks.py", str(tmp_path))
    assert "waited 0 s for a word that never comes" in said


@pytest.mark.slow
def test_words_and_broadcasts_to_one_rank_all_arrive():
    assert ranks("traffic_ranks.py", "300") == "300 broadcasts taken\n"


if __name__ == "__main__":
    print(ranks("traffic_ranks.py", sys.argv[1], deadline_s=3600.0))
