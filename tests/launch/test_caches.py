"""Compiled kernels lie on the node's disk under Slurm, where the user says otherwise there, and
nowhere strange."""

import msgspec

from rose.launch import caches


def of(make_config, kind, folder):
    c = make_config().cluster
    return msgspec.structs.replace(c, kind=kind, cache_dir=folder and str(folder))


def test_slurm_ranks_compile_on_their_nodes_disk(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path))
    found = caches.variables(of(make_config, "slurm", None), {"TRITON_CACHE_DIR": "/mine"})
    assert set(found) == set(caches.FOLDERS) - {"TRITON_CACHE_DIR"}
    (home,) = tmp_path.iterdir()
    assert all(value.startswith(str(home)) for value in found.values())
    assert home.stat().st_mode & 0o777 == 0o700
    assert caches.variables(of(make_config, "local", None), {}) == {}
    assert caches.variables(of(make_config, "local", tmp_path / "k"), {})["VLLM_CACHE_ROOT"] == str(
        tmp_path / "k/vllm"
    )


def test_somebody_elses_folder_is_left_alone(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(caches.os, "geteuid", lambda: 12345)
    assert caches.variables(of(make_config, "slurm", tmp_path), {}) == {}
    (tmp_path / "file").write_text("")
    assert caches.variables(of(make_config, "slurm", tmp_path / "file" / "below"), {}) == {}
