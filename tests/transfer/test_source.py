"""A folder as the source of weight versions: exact bytes, and nothing outside of it."""

import errno
import os

import pytest

from rose.transfer import Corrupted, TransferError
from rose.transfer.source import Changed, Folder, Missing, Refused, Stat, open_source, read_token

EDGE = "v000002/from-000001"


@pytest.fixture
def store(tmp_path):
    """A store with one edge and something beside it that is nobody's business."""
    root = tmp_path / "weights"
    (root / EDGE).mkdir(parents=True)
    (root / EDGE / "rank-00000.h5").write_bytes(bytes(range(200)))
    (root / EDGE / "manifest.json").write_text("{}")
    (root / EDGE / ".rank-00001.h5.77").write_bytes(b"half")
    (root / EDGE / "rank-00002.h5.part").write_bytes(b"half")
    (tmp_path / "secret").write_text("secret")
    return root


def test_a_range_is_read_exactly(store):
    source = open_source(store)
    assert source.read(f"{EDGE}/rank-00000.h5", 10, 5) == bytes(range(10, 15))
    assert source.read(f"{EDGE}/rank-00000.h5", 190) == bytes(range(190, 200))
    assert source.read(f"{EDGE}/rank-00000.h5", 10, 5, fresh=True) == bytes(range(10, 15))
    assert source.read(f"{EDGE}/rank-00000.h5", 200, 0) == b""


@pytest.mark.parametrize("offset, length", [(199, 2), (201, None), (201, 0), (-1, 1), (5, -1)])
def test_a_range_that_the_file_has_not_is_refused_with_its_size(store, offset, length):
    with pytest.raises(Refused, match=r"rank-00000.h5: bytes .* were asked for, it has 200"):
        open_source(store).read(f"{EDGE}/rank-00000.h5", offset, length)


def test_temporary_files_are_neither_listed_nor_read(store):
    source = open_source(store)
    assert source.names(EDGE) == ["manifest.json", "rank-00000.h5"]
    for half in (".rank-00001.h5.77", "rank-00002.h5.part"):
        with pytest.raises(Refused, match="beginning with a dot or ending in .part"):
            source.read(f"{EDGE}/{half}")


@pytest.mark.parametrize(
    "call, number, kind",
    [
        ("open", errno.ESTALE, Missing),  # NFS removed it under its reader
        ("pread", errno.ESTALE, Missing),
        ("listdir", errno.ESTALE, None),
        ("pread", errno.EIO, Corrupted),
    ],
)
def test_what_nfs_removed_is_missing_and_what_a_disk_cannot_read_damaged(
    store, monkeypatch, call, number, kind
):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fails)
    if kind is None:
        assert open_source(store).names(EDGE) == []
    else:
        with pytest.raises(kind, match=f"rank-00000.h5: {os.strerror(number)}"):
            open_source(store).read(f"{EDGE}/rank-00000.h5", 0, 10)


def test_what_is_absent_is_told_apart_from_what_fails(store):
    source, file = open_source(store), f"{EDGE}/manifest.json"
    assert source.names("v000003") == source.names(file) == []
    assert source.stat("v000003/full/manifest.json") is source.stat(EDGE) is None
    assert source.stat(f"{EDGE}/rank-00000.h5").size == 200
    with pytest.raises(Missing, match="v000003/full/rank-00000.h5"):
        source.read("v000003/full/rank-00000.h5")
    with pytest.raises(Refused, match="no file"):
        source.read(EDGE)


PATHS = ["../secret", "/etc/passwd", f"{EDGE}/../../../secret", "v000002//from-000001", "."]
PATHS += ["v000002/.", "a\0b", "a\nb", "", "x" * 200, "v000002\\..\\secret", "%2e%2e/secret"]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_no_plain_relative_one_is_refused(store, path):
    source = Folder(store)
    for ask in (source.read, source.stat, *([source.names] if path else [])):
        with pytest.raises(Refused, match="expected names of letters"):
            ask(path)


def test_a_link_out_of_the_store_is_refused_one_within_followed_and_a_fifo_blocks_nobody(store):
    (store / "out").symlink_to(store.parent / "secret")
    (store / "up").symlink_to(store.parent)
    (store / "within").symlink_to(EDGE)
    for path in ("out", "up/secret"):
        with pytest.raises(Refused, match="a link out of the store"):
            Folder(store).read(path)
    assert Folder(store).stat("within/rank-00000.h5").size == 200
    (store.parent / "link").symlink_to(store)
    assert Folder(store.parent / "link").stat(f"{EDGE}/rank-00000.h5").size == 200
    os.mkfifo(store / "fifo")
    with pytest.raises(TransferError, match="fifo: no file"):
        Folder(store).read("fifo")


def test_a_file_that_was_written_anew_is_not_taken_for_the_one_that_was_looked_at(store):
    source, path = open_source(store), f"{EDGE}/rank-00000.h5"
    before = source.stat(path)
    assert isinstance(before, Stat) and source.read(path, 0, 1, tag=before.tag) == b"\0"
    (store / "new").write_bytes(bytes(200))
    os.replace(store / "new", store / path)
    assert source.stat(path).size == before.size
    with pytest.raises(Changed, match="rewritten since"):
        source.read(path, 0, 1, tag=before.tag)


def test_a_token_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    with pytest.raises(TransferError, match="token: No such file"):
        read_token(path)
    path.write_text("0123456789abcdef0123\n")
    path.chmod(0o640)
    with pytest.raises(TransferError, match="mode 0640: others can read it"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "0123456789abcdef0123"
    for content in ("", "short", "two words, and that is none", "x" * 300):
        path.write_text(content)
        with pytest.raises(TransferError, match="expected 16 to 256"):
            read_token(path)


@pytest.mark.parametrize(
    "where, token, why",
    [
        ("http://node:1", None, "needs its token"),
        ("ftp://node:1", "t", "expected http://host:port"),
        ("http://node:1/../weights", "t" * 16, "names of letters"),
        ("http://", "t", "expected http://host:port"),
        ("http://node:76730", "t", "expected http://host:port"),
        ("http://[::1:7673", "t", "expected http://host:port"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(where, token, why):
    with pytest.raises(TransferError, match=why):
        open_source(where, token)
