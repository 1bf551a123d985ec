"""Weight transfer under damage, briefly: tests/soak/fuzz_transfer.py has all of it, and says what must
hold."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "soak"))
import fuzz_transfer as fuzz
from fuzz_transfer_bytes import attempt
from fuzz_transfer_world import History, Tally

from rose.transfer import TransferError
from rose.transfer.store import FULL, edge_name

SEED = 11


def test_a_reader_that_took_damaged_bytes_would_be_a_violation(tmp_path):
    """The checks themselves: each kind of wrong answer is told."""
    tally, history, file = Tally(), History(SEED), tmp_path / "rank-00000.h5"
    wrong = [lambda: ([edge_name(2, 1)], history.at(1)), lambda: ([edge_name(2, 1)], history.at(2))]

    def unnamed():
        raise TransferError("something is wrong")

    for reader, avoid, found in (
        (wrong[0], (2, 1), 2),
        (wrong[1], (2, 1), 1),
        (wrong[1], None, 1),
        (unnamed, None, 1),
        (unnamed, (2, FULL), 2),
        (lambda: 1 / 0, None, 1),
    ):
        before = len(tally.violations)
        attempt(reader, avoid, file, history, "told", tally)
        assert len(tally.violations) == before + found


@pytest.mark.slow
def test_flipped_bytes_cut_and_exchanged_files_are_detected(tmp_path):
    tally = Tally()
    fuzz.bytes_part(tmp_path, SEED, 300, tally)
    assert not tally.violations
    assert tally.counts["bytes flipped"] > 15 and tally.counts["flips behind a relay"] == 3
    assert tally.counts["refused by name"] and tally.counts["reached by other routes"]


@pytest.mark.slow
def test_killed_writers_leave_whole_edges_and_killed_readers_whole_weights(tmp_path):
    tally = Tally()
    fuzz.killed_writers(tmp_path, SEED, 3, tally)
    fuzz.killed_readers(tmp_path, SEED, 4, tally)
    assert not tally.violations
    assert tally.counts["committed edges right"] > 3 and tally.counts["versions loaded before"]


@pytest.mark.slow
def test_readers_beside_the_collector_get_right_weights_or_a_reason(tmp_path):
    tally = Tally()
    fuzz.collected_meanwhile(tmp_path, SEED, 4.0, tally)
    assert not tally.violations and tally.counts["loads beside the collector"]


@pytest.mark.slow
def test_late_joiners_gaps_and_wrong_bases(tmp_path):
    tally = Tally()
    fuzz.routes_part(tmp_path, SEED, 2, tally)
    assert not tally.violations
    assert tally.counts["late joiners"] == 40 and tally.counts["wrong bases"] == 21


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk of its own")
def test_full_disks(tmp_path):
    tally = Tally()
    fuzz.disk_part(tmp_path, SEED, 2500, tally)
    assert not tally.violations and tally.counts["full disks"] > 3
