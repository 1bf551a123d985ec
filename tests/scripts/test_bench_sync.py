"""The benchmark of a whole sync: the versions of a run reach its receivers bit for bit by every
encoding."""

import csv
import sys
from pathlib import Path

import msgspec
import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "trainer"))
from scripts import bench_sync, run_weights
from scripts.harness import Failed, cfg, configured


@pytest.fixture
def run(tmp_path):
    """A run's folder with versions 0 and 1, of which the latter changed a tenth of the values."""
    import torch
    from safetensors.torch import load_file
    from tiny_world import save_model

    model, config = save_model(tmp_path / "model"), configured()
    shape = cfg.read_shape(model)
    tensors = load_file(model / "model.safetensors")
    known = msgspec.structs.replace(config.model, shape=shape)
    config = msgspec.structs.replace(config, model=known)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes(msgspec.json.encode(config))
    attempt = tmp_path / "run" / "weights" / "attempt-001"
    store = run_weights.Whole(attempt, tensors, shape)
    store.publish(0)
    for name, tensor in tensors.items():
        moved = torch.rand(tensor.shape) < 0.1
        store.tensors[name] = torch.where(moved, tensor * 1.01, tensor)
    store.publish(1)
    return tmp_path / "run"


@pytest.mark.slow
def test_every_encoding_is_synced_and_verified(run, tmp_path, capsys):
    file = tmp_path / "rows.csv"
    given = ["--rates", "0", "--receivers", "1", "--steps", "1", "--csv", str(file)]
    assert bench_sync.main([str(run), *given]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [row["encoding"] for row in rows] == list(bench_sync.ENCODINGS)
    size = {row["encoding"]: float(row["MB"]) for row in rows}
    assert 0 < size["ours"] < size["xor"] < size["dense"]
    assert "no limit, medians" in capsys.readouterr().out


def test_a_run_with_too_few_versions_is_refused(run, tmp_path):
    words = r"versions \[0, 1\]; 3, one after the other, are needed: fewer"
    with pytest.raises(Failed, match=words):
        run_weights.last_versions(run, 3)
    with pytest.raises(Failed, match="versions none; 2"):
        run_weights.last_versions(tmp_path, 2)
