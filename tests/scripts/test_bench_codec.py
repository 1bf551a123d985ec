"""The codec's benchmark: its rivals undo what they did, and its bound is the entropy."""

import csv

import numpy as np
import pytest

from scripts import bench_codec
from scripts.run_weights import RIVALS, Rival


def test_every_encoding_is_measured_and_verified_on_made_up_values(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    given = ["--elements", "30000", "--rounds", "1", "--csv", str(file)]
    assert bench_codec.main(given) == 0
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == len(RIVALS) * len(bench_codec.FRACTIONS)
    ours = {row["workload"]: row for row in rows if row["encoding"] == "ours"}
    assert float(ours["5% changed"]["of_bound"]) < 1.2
    assert "bound" in capsys.readouterr().out


def test_a_wrong_encoding_ends_the_run():
    old = np.zeros(10, np.uint16)
    lossy = Rival("lossy", lambda new, old: b"", lambda data, values: None)
    with pytest.raises(SystemExit, match="lossy on it: a block came back different"):
        bench_codec.measure(lossy, "it", [(old + np.uint16(1), old)], 1.0, 1)
