"""The disk that a run takes is counted, shown, and named where it grew."""

import errno
import os
import subprocess
from contextlib import suppress

import pytest
from rich.console import Console

from rose.coordinator.journal import Journal, read
from rose.coordinator.retention import Retention
from rose.files import refusal
from rose.launch import state
from rose.observe import disk, recorder
from rose.observe.metrics import MetricsWriter
from rose.observe.recorder import Recorder, read_events
from rose.observe.status import LiveStatus, read_status
from rose.scheduler.events import Tick
from tests.processes import ran, until


def test_bytes_and_files_are_those_that_a_quota_counts(tmp_path):
    (tmp_path / "rollouts/deep").mkdir(parents=True)
    (tmp_path / "rollouts/deep/a").write_bytes(os.urandom(100_000))
    (tmp_path / "rollouts/again").hardlink_to(tmp_path / "rollouts/deep/a")
    (tmp_path / "turns").symlink_to("/usr")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**30)
    found, whole = disk.measure(tmp_path)
    counted = subprocess.run(["du", "-s", "-B1", tmp_path / "rollouts"], capture_output=True)
    assert whole and found["rollouts"] == (int(counted.stdout.split()[0]), 3)
    assert found[disk.OWN_FILES].files == 2 and found[disk.OWN_FILES].bytes < 2**20
    assert disk.measure(tmp_path, within_s=-1) == ({}, False)


def test_state_prints_bytes_and_files_of_each_folder(tmp_path):
    LiveStatus(tmp_path).update(step=3, steps=9)
    (tmp_path / "odd [b]").mkdir()
    (tmp_path / "odd [b]/file").write_bytes(os.urandom(3 * 2**20))
    console = Console(width=100, record=True)
    assert state.show_run(tmp_path, console)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["│", "odd", "[b]", "│", "3.0", "MiB", "│", "2", "│"] in rows
    assert any(row[1:2] == ["all"] and row[-2] == "3" for row in rows)


def test_what_grew_is_named_the_most_grown_first():
    """... unless it was counted in part: then the walk may have come to other folders this time."""
    before = {"turns": disk.Use(10, 1), "events": disk.Use(2**20, 5)}
    now = {"turns": disk.Use(2**30 + 10, 7), "events": disk.Use(2**19, 5), "logs": disk.Use(0, 1)}
    words = disk.growth((before, True), (now, True))
    assert "grew turns by 1.0 GiB and 6 files to 1.0 GiB and 7 files; logs by" in words
    assert "events" not in words and "something else took" in disk.growth((now, True), (now, True))
    for whole in ((True, False), (False, True), (False, False)):
        words = disk.growth((before, whole[0]), (now, whole[1]))
        assert "grew" not in words and "at least turns 1.0 GiB and 7 files" in words


def test_events_begin_new_files_again_once_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 60.0)
    made, folder = Recorder(tmp_path, 4, "trainer", "trainer-0"), tmp_path / "events/1"
    made.instant("before")
    with monkeypatch.context() as full:
        full.setattr(made, "_open_file", lambda: (_ for _ in ()).throw(OSError(28, "full")))
        made._begin_segment()
    assert [path.name for path in folder.iterdir()] == ["trainer-4.jsonl"]
    made._begin_segment()
    made.instant("after")
    made.close()
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 0.01)
    made = Recorder(tmp_path, 5, "trainer", "trainer-1")
    for number in range(2, 5):
        made.instant(f"n{number}")
        until(lambda: len([*folder.glob("trainer-5*")]) >= number, "the next file")
    made.close()
    names = {rank.rank: [event["name"] for event in rank.events] for rank in read_events(tmp_path)}
    assert names == {4: ["before", "after"], 5: ["n2", "n3", "n4"]}


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """ended(retention, step): the step ended 1000 s after the one before."""

    def end(retention: Retention, step: int) -> None:
        monkeypatch.setattr("rose.coordinator.retention.time.time", lambda: 1000.0 * step)
        retention.step_ended(step)

    for name in [f"step-{step:06d}.msgpack" for step in range(1, 6)] + ["step-best.msgpack"]:
        path = tmp_path / "rollouts" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return end


def test_steps_before_the_kept_ones_go_and_nothing_that_is_still_written(tmp_path, ended):
    """Nor what somebody else has put there."""
    MetricsWriter(tmp_path, tensorboard=False).write(1, {"time": 1000.0})
    old = ["events/1/a-0.jsonl", "events/2/a-0.000001.jsonl", "journal/attempt-001.jsonl"]
    kept = ["events/2/a-0.jsonl", "events/2/a-0.000002.jsonl", "journal/attempt-002.jsonl"]
    kept += ["turns/v000001.turns", "checkpoints/step-000001/x", "snapshots/g1.0/x"]
    for name in old + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (2500, 2500))
    os.utime(tmp_path / "events/2/a-0.000002.jsonl", (3500, 3500))
    ended(Retention(tmp_path, None, 2), 6)
    assert len(list((tmp_path / "rollouts").iterdir())) == 6
    retention = Retention(tmp_path, 3, 2)
    for step in range(2, 7):
        ended(retention, step)
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["step-000004.msgpack", "step-000005.msgpack", "step-best.msgpack"]
    assert not [name for name in old if (tmp_path / name).exists()]
    assert not [name for name in kept if not (tmp_path / name).exists()]


def test_events_of_this_attempt_go_by_its_own_clock(tmp_path, ended):
    """... which may be behind that of the attempt before."""
    metrics = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(1, 5):
        metrics.write(step, {"time": 1e6 + step})
    own, other = tmp_path / "events/2/a-0.000001.jsonl", tmp_path / "events/1/a-0.jsonl"
    for path in (own, other):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (4500, 4500))
    retention = Retention(tmp_path, 1, 2)
    ended(retention, 5)
    assert own.exists() and not other.exists()


@pytest.fixture
def small(tmp_path):
    """A file system of 64 KiB in memory."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = ran(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder])
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_ends_the_journal_and_the_display_but_raises_nothing(small, capsys):
    live, journal = LiveStatus(small), Journal(small / "journal/a.jsonl", {})
    journal.write(Tick(at=1.0), [])
    journal.flush()
    with suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert refusal(small).errno == errno.ENOSPC
    live.update(phase="train")
    for number in range(3000):
        journal.write(Tick(at=float(number)), [])
    journal.flush()
    assert capsys.readouterr().out.count("No space left on device") == 1
    (small / "filler").unlink()
    journal.write(Tick(at=9.0), [])  # behind what is lost: a replay would go wrong
    journal.close()
    entries = list(read(small / "journal/a.jsonl"))[1:]
    assert [entry.event.at for entry in entries] == [1.0, *map(float, range(len(entries) - 1))]
    assert len(entries) < 3000 and read_status(small).phase == "starting"
