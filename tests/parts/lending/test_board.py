"""A board tells whole states only, not torn, damaged, foreign, outdated or dead writers' ones."""

import dataclasses
import os
import subprocess
import sys
import threading
import time

import pytest

from rose.parts.lending import board
from rose.parts.lending.board import Control, Online, Peer, Reader, Rollout, Writer


def test_what_was_written_is_read_with_the_writers_process_and_time(tmp_path):
    writer = Writer(tmp_path / "online", Online)
    writer.state.running, writer.state.hold_until = 3, 123.5
    before = time.monotonic()
    writer.write()
    found = Reader(tmp_path / "online", Online).read()
    assert (found.running, found.hold_until, found.pid) == (3, 123.5, os.getpid())
    assert before <= found.beat <= time.monotonic() and board.is_alive(found)
    assert not board.is_alive(dataclasses.replace(found, pid_started=found.pid_started - 1))
    assert (tmp_path / "online").stat().st_mode & 0o777 == 0o600


def test_every_flipped_byte_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(board, "TRIES", 1)  # nobody writes
    Writer(tmp_path / "board", Online).write()
    reader = Reader(tmp_path / "board", Online)
    whole = (tmp_path / "board").read_bytes()
    with open(tmp_path / "board", "r+b", buffering=0) as file:
        for at in range(len(whole)):
            os.pwrite(file.fileno(), bytes([whole[at] ^ 0x41]), at)
            assert reader.read() is None, f"byte {at}"
            assert str(tmp_path / "board") in reader.why
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert reader.read() is not None


@pytest.mark.parametrize("nbytes", [0, 16, 100])
def test_a_board_that_was_cut_kills_nobody_and_is_whole_after_the_next_write(tmp_path, nbytes):
    writer = Writer(tmp_path / "board", Online)
    writer.write()
    reader = Reader(tmp_path / "board", Online)
    os.truncate(tmp_path / "board", nbytes)
    assert reader.read() is None and f"{nbytes} bytes" in reader.why
    writer.write()
    assert reader.read() is not None
    os.truncate(tmp_path / "board", nbytes)
    assert Writer(tmp_path / "board", Online) and reader.read() is None


def test_a_state_of_zeros_or_of_another_kind_or_size_is_none(tmp_path):
    writer = Writer(tmp_path / "board", Online)
    reader = Reader(tmp_path / "board", Online)
    assert reader.read() is None and "not a board of Online" in reader.why
    writer.write()
    with pytest.raises(ValueError, match="bytes, a board of Control has"):
        Reader(tmp_path / "board", Control)
    renamed = [(f"{field.name}x", float, 0.0) for field in dataclasses.fields(Online)]
    other = dataclasses.make_dataclass("Online", renamed)
    assert Reader(tmp_path / "board", other).read() is None


def test_a_stale_state_and_one_of_the_future_are_none_and_say_their_age(tmp_path, monkeypatch):
    Writer(tmp_path / "board", Control).write()
    reader = Reader(tmp_path / "board", Control)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.0)
    assert reader.read() is not None
    assert reader.read(stale_after_s=0.5) is None
    assert "old, over 0.5" in reader.why
    monkeypatch.setattr(time, "monotonic", lambda: now - 1.0)
    assert reader.read() is None and "in the future" in reader.why


def test_no_reader_ever_sees_half_of_a_state(tmp_path):
    writer = Writer(tmp_path / "board", Online)
    writer.write()
    stop = threading.Event()
    fields = [field.name for field in dataclasses.fields(Online)]
    fields = fields[3:]  # all but pid, pid_started and beat

    def write():
        count = 0
        while not stop.is_set():
            count += 1
            vars(writer.state).update(dict.fromkeys(fields, count))
            writer.write()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        reader, seen = Reader(tmp_path / "board", Online), set()
        while len(seen) < 20:
            if (found := reader.read()) is not None:
                values = {getattr(found, name) for name in fields}
                assert len(values) == 1 or found.steps == 0
                seen.add(found.steps)
    finally:
        stop.set()
        thread.join()


def test_a_new_writer_takes_over_and_a_killed_one_is_not_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(board, "ALIVE_S", 0.0)
    code = (
        "import sys, time; from pathlib import Path; from rose.parts.lending import board\n"
        "w = board.Writer(Path(sys.argv[1]), board.Rollout)\n"
        "w.state.kv_budget = 7; w.write(); print('up', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, tmp_path / "board"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            peer = Peer(tmp_path / "board", Rollout)
            found = peer.read()
            assert found.kv_budget == 7 and board.is_alive(found) and not peer.gone()
        finally:
            process.kill()
    assert not board.is_alive(found) and peer.gone()
    Writer(tmp_path / "board", Rollout).write()
    assert peer.read().pid == os.getpid() and not peer.gone()


def test_a_board_that_is_not_there_yet_is_found_later(tmp_path, monkeypatch):
    peer = Peer(tmp_path / "board", Control)
    assert peer.read() is None and peer.gone()
    Writer(tmp_path / "board", Control).write()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + board.OPEN_RETRY_S + 0.1)
    assert peer.read() is not None
