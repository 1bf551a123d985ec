"""Weight transfer under damage, briefly: tests/soak/fuzz_transfer.py has all of it, and says what must
hold."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "soak"))
import fuzz_transfer as fuzz
from fuzz_transfer_world import Tally

SEED = 11
DAMAGED = {"bytes flipped": 16, "flips behind a relay": 3, "refused by name": 1}
DAMAGED |= {"reached by other routes": 1}
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk of its own")


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, amount, counts",
    [
        (fuzz.bytes_part, 300, DAMAGED),
        (fuzz.killed_writers, 3, {"committed edges right": 4}),
        (fuzz.killed_readers, 4, {"versions loaded before": 1}),
        (fuzz.collected_meanwhile, 4.0, {"loads beside the collector": 1}),
        (fuzz.routes_part, 2, {"late joiners": 40, "wrong bases": 21}),
        pytest.param(fuzz.disk_part, 2500, {"full disks": 4}, marks=root),
    ],
)
def test_a_reader_gets_right_weights_or_a_reason(tmp_path, part, amount, counts):
    tally = Tally()
    part(tmp_path, SEED, amount, tally)
    assert not tally.violations
    assert all(tally.counts[what] >= least for what, least in counts.items()), tally.counts
