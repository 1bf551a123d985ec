"""The codec's benchmark: its rivals undo what they did, and its verdicts follow the figures."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_codec


def test_every_encoding_is_measured_and_verified_on_made_up_values(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert (
        bench_codec.main(
            [
                "--no-model",
                "--elements",
                "30000",
                "--rounds",
                "1",
                "--threads",
                "2",
                "--only",
                "ours,coo,xor,bitmask,gaps,gapdiff",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    rows = json.loads(file.read_text())
    assert len(rows) == 6 * (len(bench_codec.FRACTIONS) + 1)
    ours = {row["workload"]: row for row in rows if row["encoding"] == "ours"}
    assert ours["5% changed"]["ratio"] < 1.2 and ours["noise to noise"]["raw"] < 1.01
    assert "at most 1.1 x the bound, 5% changed" in capsys.readouterr().out


def test_byte_gaps_hold_gaps_of_any_length():
    at = np.array([0, 1, 255, 510, 511, 1276, 5000])
    made = bench_codec.byte_gaps(at)
    assert made.dtype == np.uint8 and bench_codec.gap_positions(made).tolist() == at.tolist()
    assert bench_codec.byte_gaps(at[:0]).size == 0


def test_the_bound_is_the_entropy_of_places_and_differences():
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[::2] = 1
    new[::4] = 2
    assert bench_codec.bound([(new, old)]) == pytest.approx((1000 + 500) / 8)
    assert bench_codec.bound([(old, old)]) == 0


def test_a_verdict_says_what_was_missed_and_a_wrong_encoding_ends_the_run():
    def row(encoding, size, ratio, decode):
        return bench_codec.Row("1% changed", encoding, size, ratio, 0.5, 1.0, decode, 1.0, decode)

    said = bench_codec.targets(
        [row("ours", 100, 1.2, 5.0), row("rival", 100, 1.2, 6.0), row("large", 101, 1.2, 9.0)]
    )
    assert [line.split("  ")[1] for line in said[:4]] == ["NOT met", "NOT met", "NOT met", "met"]
    old = np.zeros(10, np.uint16)
    lossy = bench_codec.Rival("lossy", lambda new, old: b"", lambda data, values: None)
    with pytest.raises(SystemExit, match="lossy on it: a block came back different"):
        bench_codec.measure(lossy, "it", [(old + np.uint16(1), old)], 1.0, 1, 1)
