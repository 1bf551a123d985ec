"""The mailbox between real MPI ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.launch.local import find_mpiexec

HERE = Path(__file__).parent


@pytest.mark.slow
def test_real_ranks_exchange_messages_of_all_sizes():
    env = os.environ | {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp;ofi_rxm", "PYTHONPATH": str(HERE.parents[1])}
    ran = subprocess.run([find_mpiexec(), "-launcher", "fork", "-n", "3", sys.executable, str(HERE / "mailbox_ranks.py")],
                         env=env, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "waited 0 s for a word that never comes" in ran.stdout
