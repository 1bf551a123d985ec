"""The codec's benchmark: its rivals undo what they did, and its bound is the entropy."""

import csv

from scripts import bench_codec
from scripts.run_weights import RIVALS


def test_every_encoding_is_measured_and_verified_on_made_up_values(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    given = ["--elements", "30000", "--rounds", "1", "--csv", str(file)]
    assert bench_codec.main(given) == 0
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == len(RIVALS) * len(bench_codec.FRACTIONS)
    ours = {row["workload"]: row for row in rows if row["encoding"] == "ours"}
    assert float(ours["5% changed"]["of_bound"]) < 1.2
    assert "bound" in capsys.readouterr().out
