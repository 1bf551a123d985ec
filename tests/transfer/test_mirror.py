"""What a rollout rank keeps in its node's memory: whole edges or none, and nothing after the
run."""

import os
import subprocess
import sys
from pathlib import Path

from rose.transfer.mirror import Mirror

EDGE = "v000012/from-000011"


def fill(mirror: Mirror, name: str = EDGE, roots: int = 2, size: int = 100) -> None:
    for root in range(roots):
        mirror.begin(root, name)
    for part in range(2):
        for root in range(roots):
            mirror.payload(root, memoryview(bytes([root, part]) * (size // 2)))
    for root in range(roots):
        mirror.table(root, memoryview(b"table %d" % root))
        mirror.end(root)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_edge_is_complete_when_the_last_root_has_ended(tmp_path):
    mirror = Mirror(tmp_path, 1, 4, 2, tmp_path)
    assert mirror.path.stat().st_mode & 0o777 == 0o700
    mirror.begin(0, EDGE)
    mirror.begin(1, EDGE)
    mirror.payload(0, memoryview(b"abc"))
    assert (mirror.path / EDGE / "rank-00000.payload").read_bytes() == b"abc"  # as it comes
    mirror.end(0)
    assert mirror.find(EDGE) is None
    mirror.table(1, memoryview(b"t"))
    mirror.end(1)
    assert mirror.find(EDGE) == mirror.path / EDGE
    assert files(mirror.path / EDGE) == [
        "complete",
        "rank-00000.payload",
        "rank-00000.table",
        "rank-00001.payload",
        "rank-00001.table",
    ]
    assert (mirror.path / EDGE / "rank-00001.payload").read_bytes() == b""
    mirror.close()
    assert list(tmp_path.iterdir()) == []


def test_two_edges_may_come_at_once(tmp_path):
    mirror = Mirror(tmp_path, 1, 4, 2, tmp_path)
    mirror.begin(0, EDGE)
    mirror.end(0)
    mirror.begin(0, "v000013/from-000012")  # root 1 is an edge behind
    mirror.begin(1, EDGE)
    mirror.end(1)
    assert mirror.find(EDGE) is not None and mirror.find("v000013/from-000012") is None


def test_keep_drops_old_edges_and_spares_those_still_coming(tmp_path):
    mirror = Mirror(tmp_path, 1, 4, 2, tmp_path)
    fill(mirror, EDGE)
    fill(mirror, "v000012/full")
    fill(mirror, "v000013/from-000012")
    mirror.begin(0, "v000014/from-000013")
    with open(mirror.path / EDGE / "rank-00000.payload", "rb") as reader:
        mirror.keep(["v000012/full"])
        assert len(reader.read()) == 200  # of a reader that has it open already
    assert mirror.find(EDGE) is None and mirror.find("v000012/full") is not None
    assert sorted(path.name for path in mirror.path.iterdir()) == ["v000012", "v000014"]
    assert [path.name for path in (mirror.path / "v000012").iterdir()] == ["full"]


def test_an_edge_over_the_limit_is_dropped_and_its_stream_goes_on(tmp_path):
    mirror = Mirror(tmp_path, 1, 4, 2, tmp_path, limit_bytes=500)
    fill(mirror, size=1000)
    assert mirror.failures == {EDGE: "OSError: the mirror would hold 1000 bytes; its limit is 500"}
    assert mirror.find(EDGE) is None and files(mirror.path) == []
    fill(mirror, "v000013/from-000012")  # there is room again
    assert mirror.find("v000013/from-000012") is not None
    mirror.keep(["v000013/from-000012"])
    assert mirror.failures == {}


def test_a_kernel_that_refuses_costs_the_edge_only(tmp_path):
    """Files of more than 200 kB are refused, as by memory that is full."""
    script = f"""
import resource
from pathlib import Path
from rose.transfer.mirror import Mirror
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
mirror = Mirror(Path({str(tmp_path)!r}), 1, 0, 1, Path({str(tmp_path)!r}))
for name, size in (("a", 300_000), ("b", 150_000)):
    mirror.begin(0, name)
    mirror.payload(0, memoryview(bytes(size)))
    mirror.payload(0, memoryview(b"more"))
    mirror.table(0, memoryview(b"table"))
    mirror.end(0)
assert mirror.find("a") is None and mirror.find("b") is not None
assert [path.name for path in mirror.path.iterdir()] == ["b"]
print(mirror.failures)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "{'a': 'OSError: [Errno 27] File too large'}" in done.stdout


def test_without_a_folder_every_edge_fails_and_nothing_raises(tmp_path):
    mirror = Mirror(tmp_path, 1, 4, 2, tmp_path / "absent")
    fill(mirror)
    assert mirror.find(EDGE) is None
    assert "absent" in mirror.failures[EDGE] and "could not be made" in mirror.failures[EDGE]
    mirror.close()


def test_what_a_dead_rank_of_the_same_run_left_is_removed_and_nothing_else(tmp_path):
    runs = [tmp_path / "run", tmp_path / "another"]
    script = (
        "from pathlib import Path; from rose.transfer.mirror import Mirror; import os\n"
        f"for run in {[str(run) for run in runs]!r}: print(Mirror(Path(run), 1, 4, 2, Path({str(tmp_path)!r})).path)\n"
        "os._exit(9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    dead, other = map(Path, done.stdout.split())
    alive = Mirror(runs[0], 1, 5, 2, tmp_path)
    assert not dead.exists() and other.is_dir()
    # our pid, of another start
    reused = alive.path.with_name(alive.path.name.rpartition(".")[0] + ".1")
    reused.mkdir()
    Mirror(runs[0], 2, 4, 2, tmp_path)
    assert alive.path.is_dir() and not reused.exists()


def test_a_node_without_shared_memory_uses_its_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("rose.transfer.mirror.SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mirror = Mirror(tmp_path, 1, 4, 2)
    assert mirror.path.parent == tmp_path and f"rose-{os.getuid()}-" in mirror.path.name
    fill(mirror)
    assert mirror.find(EDGE) is not None
