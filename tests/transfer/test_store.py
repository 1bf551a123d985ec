"""A version is either committed, whole and verified, or it doesn't exist."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from rose.transfer import TransferError, VersionWriter, collect_garbage, commit, open_version, prepare
from rose.transfer.store import version_folder


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"model.layers.0.mlp.up_proj.weight": torch.randn(37, 19, generator=generator),
            "model.norm.weight": torch.randn(19, generator=generator),
            "half": torch.randn(8, 19, generator=generator).bfloat16()}


def publish(folder, version: int = 1, world: int = 2, base: int | None = None):
    prepare(folder, version)
    for rank in range(world):
        writer = VersionWriter(folder, version, rank, world, base)
        for name, tensor in tensors(rank).items():
            writer.add(f"{name}.{rank}", tensor)
        writer.finish()
    return commit(folder, version, world, base)


def test_every_tensor_comes_back_bit_identical_with_its_dtype(tmp_path):
    with open_version(publish(tmp_path)) as version:
        assert (version.version, version.manifest.base_version, version.manifest.dtype) == (1, None, "mixed")
        assert len(version.names) == 6
        for rank in range(2):
            for name, tensor in tensors(rank).items():
                read, entry = version.read(f"{name}.{rank}"), version.entries[f"{name}.{rank}"]
                assert entry.dtype == str(tensor.dtype).removeprefix("torch.")
                bits = tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
                assert read.dtype == bits.dtype and np.array_equal(read, bits)


def test_numpy_arrays_are_taken_too_and_other_dtypes_are_refused(tmp_path):
    writer = VersionWriter(tmp_path, 1, 0, 1)
    writer.add("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add("b", np.arange(4, dtype=np.uint16), dtype="bfloat16")
    with pytest.raises(TransferError, match="'c' is float64"):
        writer.add("c", np.zeros(2))
    writer.finish()
    with open_version(commit(tmp_path, 1, 1)) as version:
        assert dict((n, a.tolist()) for n, a in version.tensors()) == {"a": [[0, 1, 2], [3, 4, 5]], "b": [0, 1, 2, 3]}


def test_a_version_without_manifest_does_not_exist(tmp_path):
    prepare(tmp_path, 1)
    VersionWriter(tmp_path, 1, 0, 2).add("a", torch.ones(3)).finish()
    with pytest.raises(TransferError, match="no readable manifest"):
        open_version(version_folder(tmp_path, 1) / "manifest.json")


def test_commit_waits_for_the_slowest_rank(tmp_path):
    prepare(tmp_path, 1)
    VersionWriter(tmp_path, 1, 0, 2).add("a", torch.ones(3)).finish()
    late = threading.Timer(0.3, lambda: VersionWriter(tmp_path, 1, 1, 2).add("b", torch.ones(3)).finish())
    late.start()
    with open_version(commit(tmp_path, 1, 2, timeout_s=10)) as version:
        assert sorted(version.names) == ["a", "b"]


def test_commit_says_which_file_it_waited_for(tmp_path):
    prepare(tmp_path, 1)
    VersionWriter(tmp_path, 1, 0, 2).add("a", torch.ones(3)).finish()
    with pytest.raises(TransferError, match=r"v000001/rank-00001.h5: trainer rank 1 did not write it within 0.1 s"):
        commit(tmp_path, 1, 2, timeout_s=0.1)
    assert not (version_folder(tmp_path, 1) / "manifest.json").exists()


def test_a_file_of_another_base_is_not_committed(tmp_path):
    prepare(tmp_path, 2)
    VersionWriter(tmp_path, 2, 0, 1, base_version=1).add("a", torch.ones(3)).finish()
    with pytest.raises(TransferError, match="expected"):
        commit(tmp_path, 2, 1, base_version=None)


def test_a_tensor_of_two_ranks_is_not_committed(tmp_path):
    prepare(tmp_path, 1)
    for rank in range(2):
        VersionWriter(tmp_path, 1, rank, 2).add("a", torch.ones(3)).finish()
    with pytest.raises(TransferError, match="'a' is also in rank-00000.h5"):
        commit(tmp_path, 1, 2)


def test_a_flipped_bit_names_file_tensor_and_both_hashes(tmp_path):
    manifest = publish(tmp_path)
    path = manifest.parent / "rank-00001.h5"
    data = bytearray(path.read_bytes())
    needle = tensors(1)["model.layers.0.mlp.up_proj.weight"].numpy().tobytes()
    data[bytes(data).index(needle) + 100] ^= 1
    path.write_bytes(data)
    with open_version(manifest) as version:
        version.read("model.layers.0.mlp.up_proj.weight.0")
        with pytest.raises(TransferError, match=r"rank-00001.h5: tensor 'model.layers.0.mlp.up_proj.weight.1' is "
                                                r"corrupted: xxh3-128 [0-9a-f]{32}, the manifest says [0-9a-f]{32}"):
            version.read("model.layers.0.mlp.up_proj.weight.1")


@pytest.mark.parametrize("damage, says", [
    (lambda file: file.unlink(), "missing"),
    (lambda file: file.write_bytes(file.read_bytes()[:-50]), "bytes, the manifest says"),
])
def test_missing_and_truncated_files_are_found_before_any_tensor_is_read(tmp_path, damage, says):
    manifest = publish(tmp_path)
    damage(manifest.parent / "rank-00000.h5")
    with pytest.raises(TransferError, match=f"rank-00000.h5: .*{says}"):
        open_version(manifest)


def test_a_file_overwritten_with_zeros_of_the_same_size_is_unreadable(tmp_path):
    manifest = publish(tmp_path)
    path = manifest.parent / "rank-00000.h5"
    path.write_bytes(bytes(path.stat().st_size))
    says = "rank-00000.h5: tensor 'half.0' unreadable"
    with open_version(manifest) as version, pytest.raises(TransferError, match=says):
        version.read("half.0")


@pytest.mark.parametrize("change, says", [
    (lambda m: m.update(format=99), "format 99"),
    (lambda m: m["files"][0]["tensors"][0].update(encoding="sparse"), "'sparse'"),
    (lambda m: m["files"][0].update(file="../../etc/passwd"), "missing"),
])
def test_a_manifest_that_this_program_cannot_read_is_refused(tmp_path, change, says):
    manifest = publish(tmp_path)
    content = json.loads(manifest.read_text())
    change(content)
    manifest.write_text(json.dumps(content))
    with pytest.raises(TransferError, match=says):
        open_version(manifest)


def test_half_a_manifest_is_refused(tmp_path):
    manifest = publish(tmp_path)
    manifest.write_bytes(manifest.read_bytes()[:-10])
    with pytest.raises(TransferError, match="no readable manifest"):
        open_version(manifest)


def test_prepare_drops_what_an_interrupted_run_left_of_the_version(tmp_path):
    publish(tmp_path, 3, world=2)
    prepare(tmp_path, 3)
    with pytest.raises(TransferError):
        open_version(version_folder(tmp_path, 3) / "manifest.json")
    assert list(version_folder(tmp_path, 3).iterdir()) == []


def test_a_full_disk_leaves_no_version_and_no_partial_file(tmp_path):
    """The kernel refuses writes beyond 200 kB per file, as a full disk would."""
    script = f"""
import resource, signal, numpy as np
from rose.transfer import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
prepare({str(tmp_path)!r}, 1)
try:
    writer = VersionWriter({str(tmp_path)!r}, 1, 0, 1)
    writer.add("a", np.ones(100, np.float32)).add("b", np.ones(10**6, np.float32)).finish()
except TransferError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout and "rank-00000.h5" in done.stdout
    assert list(version_folder(tmp_path, 1).iterdir()) == []


def test_garbage_collection_keeps_the_newest_versions_and_the_bases_they_need(tmp_path):
    for version, base in ((1, None), (2, 1), (3, None), (4, 3), (5, 4)):
        publish(tmp_path, version, 1, base)
    VersionWriter(tmp_path, 6, 0, 1).add("a", torch.ones(1)).finish()  # being written: not committed yet
    assert collect_garbage(tmp_path, keep=1) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000003", "v000004", "v000005", "v000006"]
    assert collect_garbage(tmp_path, keep=1) == []
