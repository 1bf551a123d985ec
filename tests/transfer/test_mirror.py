"""What a node keeps in its memory of new versions: whole files or none, and nothing after the
run."""

import asyncio
import os
import sys
from pathlib import Path

from rose.transfer import mirror as mirrors
from rose.transfer.mirror import Mirror, choose_path
from tests.processes import ran

EDGE, NEXT = "v000012/from-000011", "v000013/from-000012"


def fill(mirror: Mirror, edge: str = EDGE, size: int = 100) -> None:
    for root in range(2):
        name = f"{edge}/rank-{root:05d}.h5"
        if (buffer := mirror.open(name, size)) is not None:
            buffer[:] = root
            mirror.finish(name)


def wait(mirror: Mirror, edge: str = EDGE) -> str:
    return asyncio.run(mirror.wait(edge))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_new_edge_takes_the_place_of_the_last_and_spares_who_reads_it(tmp_path):
    mirror = Mirror(tmp_path / "m", 2, 1000)
    fill(mirror)
    assert mirror.path.stat().st_mode & 0o777 == 0o700
    with open(mirror.path / EDGE / "rank-00001.h5", "rb") as reader:
        fill(mirror, NEXT)
        assert reader.read() == bytes([1]) * 100
    assert files(mirror.path) == [f"{NEXT}/rank-00000.h5", f"{NEXT}/rank-00001.h5"]
    assert [path.name for path in mirror.path.iterdir()] == [NEXT.partition("/")[0]]


def test_an_edge_over_the_limit_is_refused_with_the_reason_and_the_next_is_not(tmp_path):
    mirror = Mirror(tmp_path / "m", 2, 500)
    fill(mirror, size=300)
    assert wait(mirror) == "OSError: the mirror would hold 600 bytes; its limit is 500"
    assert files(mirror.path) == [f"{EDGE}/refused"]
    fill(mirror, NEXT)
    assert wait(mirror, NEXT) == ""
    assert files(mirror.path) == [f"{NEXT}/rank-00000.h5", f"{NEXT}/rank-00001.h5"]


def test_without_a_folder_every_edge_is_read_from_the_store_and_nothing_raises(tmp_path):
    mirror = Mirror(tmp_path / "absent" / "m", 2, 1000)
    fill(mirror)
    assert "not broadcast within 0.2 s" in wait(mirror)
    mirror.close()


def test_what_a_dead_rank_of_the_same_run_left_is_removed_and_nothing_else(tmp_path):
    runs = [tmp_path / "run", tmp_path / "another"]
    script = (
        "from pathlib import Path; from rose.transfer.mirror import choose_path\n"
        f"for run in {[str(run) for run in runs]!r}:\n"
        f"    path = choose_path(Path(run), Path({str(tmp_path)!r})); path.mkdir(); print(path)\n"
    )
    done = ran([sys.executable, "-c", script], timeout=120)
    dead, other = map(Path, done.stdout.split())
    alive = choose_path(runs[0], tmp_path)
    (tmp_path / f"{alive.name.rpartition('-')[0]}-copy").mkdir()  # somebody else's, of no process
    alive.mkdir()
    assert not dead.exists() and other.is_dir()
    # our pid, of another start
    reused = alive.with_name(alive.name.rpartition(".")[0] + ".1")
    reused.mkdir()
    assert choose_path(runs[0], tmp_path) == alive
    assert alive.is_dir() and not reused.exists()


def test_a_node_without_shared_memory_uses_its_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(mirrors, "SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = choose_path(tmp_path)
    assert path.parent == tmp_path and f"rose-{os.getuid()}-" in path.name
