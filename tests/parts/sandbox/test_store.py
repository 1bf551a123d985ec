"""The store of checkpoints gives what was saved, finds all damage and keeps what is named."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rose.parts.sandbox.packs import StoreDamaged
from rose.parts.sandbox.store import Store
from tests.parts.sandbox.raw_captures import Upper, check_loaded, sparse

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def files_of(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def saved_turns(store, folder, seed, turns=6, name="t"):
    """{turn: what it must give}"""
    upper, made, parent = Upper(folder / f"upper-{name}-{seed}", seed), {}, None
    for turn in range(turns):
        upper.change()
        capture = folder / f"raw-{name}-{turn}"
        made[turn] = upper.capture(capture, process=True)
        store.save(name, turn, capture, parent)
        shutil.rmtree(capture)
        parent = (name, turn)
    return made


@pytest.mark.parametrize("seed", range(4))
def test_every_turn_comes_back_byte_for_byte(tmp_path, store, seed):
    made = saved_turns(store, tmp_path, seed)
    again = Store(tmp_path / "store")
    assert again.turns("t") == list(made) and again.names() == ["t"]
    for turn, expected in made.items():
        check_loaded(again.load("t", turn, tmp_path / f"back-{turn}"), expected)


def test_a_page_is_written_once(tmp_path, store):
    upper = Upper(tmp_path / "upper", 1)
    upper.image = bytearray(random.Random(1).randbytes(100 * 4096))
    upper.capture(tmp_path / "raw-0", process=True)
    first = store.save("a", 0, tmp_path / "raw-0")
    upper.image[8 * 4096 : 9 * 4096] = bytes(range(256)) * 16
    upper.capture(tmp_path / "raw-1", process=True)
    second = store.save("a", 1, tmp_path / "raw-1", ("a", 0))
    assert first.written > 100 * 4096 and second.written < 4096
    # of another sandbox, and by a process that knows no more than the parent
    assert store.save("b", 0, tmp_path / "raw-1").written < 4096
    assert Store(tmp_path / "store").save("a", 2, tmp_path / "raw-1", ("a", 1)).written < 4096


def test_files_alone_keep_an_earlier_image(tmp_path, store):
    upper = Upper(tmp_path / "upper", 2)
    upper.change()
    _, _, before = upper.capture(tmp_path / "raw-0", process=True)
    store.save("a", 0, tmp_path / "raw-0")
    upper.change()
    entries, contents, files = upper.capture(tmp_path / "raw-1", process=False)
    assert store.save("a", 1, tmp_path / "raw-1", ("a", 0), keep_image=True).image_turn == 0
    kept = {where: data for where, data in before.items() if where != "shell"}
    loaded = store.load("a", 1, tmp_path / "back-1")
    check_loaded(loaded, (entries, contents, files | kept))
    assert (loaded / "image" / "empty").is_dir()
    assert store.save("a", 2, tmp_path / "raw-1", ("a", 1)).image_turn is None
    assert not (store.load("a", 2, tmp_path / "back-2") / "image").exists()


def test_unchanged_without_a_parent_is_refused(tmp_path, store):
    upper = Upper(tmp_path / "upper", 4)
    upper.change()
    for turn in range(2):
        upper.capture(tmp_path / f"raw-{turn}", process=False)
    for parent, words in ((None, "there's no parent"), (("a", 0), "No such file")):
        with pytest.raises(StoreDamaged, match=words):
            store.save("a", 1, tmp_path / "raw-1", parent)
    assert store.turns("a") == [] and not any((tmp_path / "store" / "parts").iterdir())


def test_every_damaged_byte_is_found_and_the_turn_before_is_whole(tmp_path, store):
    made, back = {}, tmp_path / "back"

    def contents(folder):
        return {path.name: path.read_bytes() for path in files_of(folder)}

    for turn in range(2):
        content = f"turn {turn} {os.urandom(8).hex()}".encode()
        raw = sparse(tmp_path / f"raw-{turn}", len(content), {0: content})
        (raw / "about.json").write_text("{}")
        before = files_of(tmp_path / "store")
        store.save("t", turn, raw)
        made[turn] = contents(raw)
    new = [path for path in files_of(tmp_path / "store") if path not in before]
    assert len(new) == 2
    tried, picked = 0, random.Random(5)
    for path in new:
        whole = path.read_bytes()
        for at in range(0, len(whole), 3):
            damaged = bytearray(whole)
            damaged[at] ^= picked.randrange(1, 256)
            path.write_bytes(damaged)
            with pytest.raises(StoreDamaged, match=re.escape(str(path))):
                store.load("t", 1, back)
            assert contents(store.load("t", 0, back)) == made[0]
            shutil.rmtree(back)
            tried += 1
        for cut in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(StoreDamaged):
                store.load("t", 1, back)
        path.write_bytes(whole)
    assert tried > 100
    store.load("t", 1, back)


def test_what_one_copy_has_damaged_the_other_gives(tmp_path):
    shared = Store(tmp_path / "shared", sync=True)
    local = Store(tmp_path / "local", behind=shared)
    made = saved_turns(local, tmp_path, 6, turns=3)
    paced = []
    for turn in made:
        local.copy("t", turn, shared, paced.append)
    for path in files_of(tmp_path / "local"):
        if data := bytearray(path.read_bytes()):
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    for turn, expected in made.items():
        check_loaded(local.load("t", turn, tmp_path / f"local-{turn}"), expected)
        check_loaded(shared.load("t", turn, tmp_path / f"shared-{turn}"), expected)
    assert sum(paced) == sum(path.stat().st_size for path in files_of(tmp_path / "shared/packs"))


def test_a_manifest_under_another_name_is_not_taken_for_that_turn(tmp_path, store):
    for name, turn in (("t", 1), ("t", 2), ("u", 1)):
        Upper(tmp_path / f"{name}{turn}", turn).capture(tmp_path / f"raw-{name}{turn}", False)
        store.save(name, turn, tmp_path / f"raw-{name}{turn}", life=turn)
    turns = tmp_path / "store/turns"
    for other in ("t/000001", "u/000001"):
        (turns / "t/000002").write_bytes((turns / other).read_bytes())
        with pytest.raises(StoreDamaged, match=f"has turn 1 of {other[0]}"):
            store.load("t", 2, tmp_path / "out")
    assert store.newest_life("t") == 1 and store.newest_life("none") == 0


def two_hosts(folder):
    """The shared store, those of two hosts, of which the first has turn 0 stored, and what the
    capture of turn 1 has, `raw-1`."""
    shared = Store(folder / "shared")
    one, other = (Store(folder / name, behind=shared) for name in ("one", "other"))
    upper = Upper(folder / "upper", 7)
    upper.change()
    upper.capture(folder / "raw-0", process=True)
    one.save("t", 0, folder / "raw-0")
    one.copy("t", 0, shared, lambda _: None)
    upper.change()
    return shared, one, other, upper.capture(folder / "raw-1", process=True)


def test_a_turn_of_an_older_life_does_not_hide_that_of_the_shared_store(tmp_path):
    shared, one, other, made = two_hosts(tmp_path)
    other.save("t", 1, tmp_path / "raw-1", ("t", 0), life=1)
    other.copy("t", 1, shared, lambda _: None)
    one.save("t", 1, tmp_path / "raw-0", ("t", 0), life=0)
    assert one.has("t", 1, 1) and one.has("t", 1, 0) and not one.has("t", 1, 2)
    check_loaded(one.load("t", 1, tmp_path / "back", life=1), made)


def test_a_sandbox_goes_on_elsewhere(tmp_path):
    """Another host's local store has nothing: what a new turn refers to lies in the shared one."""
    shared, one, other, made = two_hosts(tmp_path)
    other.save("t", 1, tmp_path / "raw-1", ("t", 0))
    other.copy("t", 1, shared, lambda _: None)
    shared.forget("t", keep=1)
    shared.collect()
    assert shared.turns("t") == [1]
    for number, store in enumerate((other, shared, one)):
        assert 1 in store.turns("t")
        check_loaded(store.load("t", 1, tmp_path / f"back-{number}"), made)


def test_what_another_host_stored_may_go_before_a_turn_that_has_it_is_copied(tmp_path):
    shared, _, other, made = two_hosts(tmp_path)
    other.save("fork", 1, tmp_path / "raw-1", ("t", 0))
    shared.forget("t")
    assert shared.collect() > 0
    other.copy("fork", 1, shared, lambda _: None)
    check_loaded(shared.load("fork", 1, tmp_path / "back"), made)


def test_holes_are_neither_read_nor_stored(tmp_path, store):
    size, middle = 4 << 30, (2 << 30) + 5000
    raw = sparse(tmp_path / "raw", size, {0: b"first", middle: b"middle"})
    made = store.save("t", 0, raw)
    assert made.raw < 4 * 65536 and len(made.files["data/0"][1]) <= 4
    entry = json.loads((raw / "listing.json").read_text())[0]
    (tmp_path / "raw-1" / "data").mkdir(parents=True)
    (tmp_path / "raw-1/listing.json").write_text(json.dumps([entry | {"data": None}]))
    store.save("t", 1, tmp_path / "raw-1", ("t", 0))
    for turn in (0, 1):
        back = Store(tmp_path / "store").load("t", turn, tmp_path / f"back-{turn}") / "data/0"
        with back.open("rb") as file:
            assert file.read(9) == b"first" + bytes(4)
            file.seek(middle - 2)
            assert file.read(10) == bytes(2) + b"middle" + bytes(2)
            assert file.seek(0, os.SEEK_END) == size
        assert back.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("size", [0, 1, 4096, 65535, 65536, 65537, 300_000])
def test_a_file_that_is_one_hole_comes_back(tmp_path, store, size):
    store.save("t", 0, sparse(tmp_path / "raw", size, {}))
    assert (store.load("t", 0, tmp_path / "back") / "data/0").read_bytes() == bytes(size)


def test_a_sparse_file_takes_no_more_when_it_comes_back(tmp_path, store):
    """A page in each 64 KiB of it is data."""
    data = {at: random.Random(at).randbytes(4096) for at in range(0, 4 << 20, 65536)}
    raw = sparse(tmp_path / "raw", 4 << 20, data) / "data/0"
    store.save("t", 0, tmp_path / "raw")
    back = store.load("t", 0, tmp_path / "back") / "data/0"
    assert back.read_bytes() == raw.read_bytes()
    assert back.stat().st_blocks <= raw.stat().st_blocks


def test_forgetting_frees_what_nobody_else_names(tmp_path, store):
    made = saved_turns(store, tmp_path, 8, turns=2, name="a")
    saved_turns(store, tmp_path, 9, turns=2, name="b/../c")
    assert store.names() == ["a", "b/../c"]
    store.forget("b/../c")
    assert store.collect() > 0 and store.names() == ["a"] and store.collect() == 0
    check_loaded(store.load("a", 1, tmp_path / "back"), made[1])
    store.forget("a")
    store.forget("never stored")
    store.collect()
    assert not any((tmp_path / "store" / "packs").iterdir())


WRITER = """
import json, random, sys
from pathlib import Path
from rose.parts.sandbox.store import Store
from tests.parts.sandbox.raw_captures import Upper, check_loaded
folder, name, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
shared = Store(folder / "store")
upper, kept = Upper(folder / name, seed), {}
for turn in range(25):
    upper.change()
    raw = folder / f"{name}-{turn}"
    kept[turn] = upper.capture(raw, process=True)
    shared.save(name, turn, raw, (name, turn - 1) if turn else None)
    if turn % 3 == 2:
        shared.forget(name, keep=2)
        shared.collect()
for turn in shared.turns(name)[-2:]:
    check_loaded(shared.load(name, turn, folder / f"{name}-back-{turn}"), kept[turn])
print("whole", len(shared.turns(name)))
"""


@pytest.mark.slow
def test_several_processes_write_and_remove_at_once(tmp_path):
    """Same seeds: they refer to one another's packs, which the others remove."""
    more = {"env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    argvs = [[*command, f"w{i}", str(i % 2)] for i in range(4)]
    begun = [subprocess.Popen(argv, text=True, **more) for argv in argvs]
    said = [process.communicate(timeout=300)[0] for process in begun]
    assert [process.returncode for process in begun] == [0] * 4, said
    assert all(words.startswith("whole") for words in said)
    left = Store(tmp_path / "store")
    assert not any((tmp_path / "store" / "parts").iterdir())
    for name in left.names():
        left.forget(name)
    left.collect()
    assert not any((tmp_path / "store" / "packs").iterdir())


def test_what_a_killed_writer_left_is_removed(tmp_path, store):
    (tmp_path / "store" / "parts" / "dead").write_bytes(b"half")
    with store._writer() as living:
        store.collect()
        assert [p for p in (tmp_path / "store" / "parts").iterdir()] == [living.path]


def test_a_full_disk_leaves_nothing_half_written(tmp_path, small_disk):
    store, upper = Store(small_disk / "store"), Upper(tmp_path / "upper", 10)
    made = upper.capture(tmp_path / "raw-0", process=True)
    store.save("t", 0, tmp_path / "raw-0")
    upper.image = bytearray(os.urandom(2 << 20))
    upper.capture(tmp_path / "raw-1", process=True)
    before, turn = sorted(small_disk.rglob("*")), ("t", 1, tmp_path / "raw-1", ("t", 0))
    elsewhere = Store(tmp_path / "big", behind=store)
    elsewhere.save(*turn)
    copied = "t", 1, store, lambda _: None
    for attempt, what in ((store.save, turn), (elsewhere.copy, copied)):
        with pytest.raises(OSError) as failure:
            attempt(*what)
        assert failure.value.errno == errno.ENOSPC
        assert sorted(small_disk.rglob("*")) == before
    assert store.turns("t") == [0]
    check_loaded(store.load("t", 0, tmp_path / "back"), made)
