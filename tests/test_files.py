"""Files on a disk that is full or read-only: whole or absent, and the refusal is told with its
remedy."""

import errno
import os

import pytest

from rose import files


def test_a_folder_is_asked_without_a_trace_and_one_that_is_gone_refuses(tmp_path):
    assert files.refusal(tmp_path) is None and list(tmp_path.iterdir()) == []
    gone = tmp_path / "gone"
    assert files.advice(files.refusal(gone)).startswith(f"{gone}: No such file")


def test_an_error_gets_a_remedy_where_it_is_about_another_disk():
    assert files.advice(None, "ValueError: no such thing") == ""
    words = "rank 2 exited with code 1: OSError: [Errno 28] No space left on device: '/other/file'"
    remedy = "No space left on device, see below where; free some space"
    assert files.advice(None, words).startswith(remedy)


def test_a_full_disk_leaves_the_old_file_and_no_half_of_the_new(disk):
    path = disk.path / "state.json"
    files.write_whole(path, b"old")
    disk.fill()
    with pytest.raises(OSError, match=f"No space left on device: '{path}'") as full:
        files.write_whole(path, bytes(100_000), sync=True)
    assert full.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert {p.name for p in disk.path.iterdir()} == {"state.json", "filler", "lost+found"}


@pytest.mark.parametrize(
    "deed, words",
    [
        ("fill", "No space left on device; free some space there"),
        ("fail", "Read-only file system; have it mounted writable again"),
    ],
)
def test_a_refusing_folder_is_named_with_the_remedy(disk, deed, words):
    getattr(disk, deed)()
    advice = files.advice(files.refusal(disk.path))
    assert advice.startswith(f"{disk.path}: {words}; the same launch.py command")


def test_words_that_find_no_room_are_lost_without_an_error(disk):
    with open(disk.path / "log", "wb"):
        disk.fill()
    with files.Lossy(disk.path / "log", "ab") as log:
        assert log.write(bytes(50_000)) > 0
        assert log.write(bytes(50_000)) == 50_000, "the second finds no block at all"


def test_a_private_file_is_its_owners_alone_whatever_lay_there_and_whatever_the_mask(tmp_path):
    path = tmp_path / "token"
    (tmp_path / "token.part").write_text("left by a killed process, for everybody to read")
    before = os.umask(0)
    try:
        files.write_whole(path, b"secret\n", private=True)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"secret\n" and path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["token"]


def test_a_lock_is_for_one_and_waiting_for_it_has_a_deadline(tmp_path):
    path = tmp_path / "lock"
    with files.held(path, 1.0), path.open("w") as second:
        with pytest.raises(BlockingIOError):
            files.lock_now(second)
        with (
            pytest.raises(TimeoutError, match=f"{path}: held by another process for over 0 s"),
            files.held(path, 0.0),
        ):
            pass
    with files.held(path, 0.0):
        pass


def test_a_folder_beside_those_of_other_users_is_no_link_and_nobody_elses(tmp_path, monkeypatch):
    files.own_folder(tmp_path / "new/one")
    assert (tmp_path / "new/one").stat().st_mode & 0o777 == 0o700
    files.own_folder(tmp_path / "new/one")
    (tmp_path / "link").symlink_to(tmp_path / "new/one")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for link in ("link", "dangling"):
        with pytest.raises(PermissionError, match=f"is a symbolic link.*{link}'"):
            files.own_folder(tmp_path / link)
    assert not (tmp_path / "nowhere").exists()
    files.own_folder(tmp_path / "link", follow=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        files.own_folder(tmp_path / "file")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to user "):
        files.own_folder(tmp_path / "new/one")
