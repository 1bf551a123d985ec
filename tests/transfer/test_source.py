"""A folder as the source of weight versions: exact bytes, nothing outside of it, and leases that
end."""

import os
import time
import warnings

import pytest

from rose.transfer import TransferError
from rose.transfer.relay_client import open_source
from rose.transfer.source import (
    FORGET_S,
    MAX_LEASE_S,
    Changed,
    Folder,
    Missing,
    Refused,
    Stat,
    held_until,
    leases,
    read_token,
)

EDGE = "v000002/from-000001"


@pytest.fixture
def store(tmp_path):
    """A store with one edge and something beside it that is nobody's business."""
    root = tmp_path / "weights"
    (root / EDGE).mkdir(parents=True)
    (root / EDGE / "rank-00000.h5").write_bytes(bytes(range(200)))
    (root / EDGE / "manifest.json").write_text("{}")
    (root / EDGE / ".rank-00001.h5.77").write_bytes(b"half")
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
    with pytest.raises(Refused, match="beginning"):
        source.read(f"{EDGE}/.rank-00001.h5.77")


def test_what_is_absent_is_told_apart_from_what_fails(store):
    source = open_source(store)
    assert source.names("v000003") == [] and source.names(f"{EDGE}/manifest.json") == []
    assert source.size("v000003/full/manifest.json") is None and source.size(EDGE) is None
    assert source.size(f"{EDGE}/rank-00000.h5") == 200
    with pytest.raises(Missing, match="v000003/full/rank-00000.h5"):
        source.read("v000003/full/rank-00000.h5")
    with pytest.raises(Refused, match="no file"):
        source.read(EDGE)


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "/etc/passwd",
        f"{EDGE}/../../../secret",
        "v000002//from-000001",
        ".",
        "v000002/.",
        "a\0b",
        "a\nb",
        "",
        "x" * 200,
        "v000002\\..\\secret",
        "%2e%2e/secret",
    ],
)
def test_a_path_that_is_no_plain_relative_one_is_refused(store, path):
    for ask in (Folder(store).read, Folder(store).stat, Folder(store).size):
        with pytest.raises(Refused, match="expected names of letters"):
            ask(path)
    if path:
        with pytest.raises(Refused, match="expected names of letters"):
            Folder(store).names(path)


def test_a_link_out_of_the_store_is_refused_and_one_within_is_followed(store):
    (store / "out").symlink_to(store.parent / "secret")
    (store / "up").symlink_to(store.parent)
    (store / "within").symlink_to(EDGE)
    for path in ("out", "up/secret"):
        with pytest.raises(Refused, match="a link out of the store"):
            Folder(store).read(path)
    assert Folder(store).size("within/rank-00000.h5") == 200
    (store.parent / "link").symlink_to(store)
    assert Folder(store.parent / "link").size(f"{EDGE}/rank-00000.h5") == 200


def test_a_file_that_was_written_anew_is_not_taken_for_the_one_that_was_looked_at(store):
    source, path = open_source(store), f"{EDGE}/rank-00000.h5"
    before = source.stat(path)
    assert isinstance(before, Stat) and source.read(path, 0, 1, tag=before.tag) == b"\0"
    (store / "new").write_bytes(bytes(200))
    os.replace(store / "new", store / path)
    assert source.stat(path).size == before.size
    with pytest.raises(Changed, match="written anew"):
        source.read(path, 0, 1, tag=before.tag)


def test_a_fifo_in_the_store_blocks_nobody(store):
    os.mkfifo(store / "fifo")
    with pytest.raises(TransferError, match="fifo: no file"):
        Folder(store).read("fifo")


def test_a_lease_holds_until_it_expires_is_replaced_or_given_back(store):
    source, now = Folder(store), time.time()
    source.hold("node7.worker-0", [EDGE, "v000001/full"], 60)
    source.hold("node8", [EDGE], 600)
    assert leases(store, now) == {EDGE, "v000001/full"}
    assert leases(store, now + 90) == {EDGE}
    assert 590 < held_until(store, now)[EDGE] - now < 610
    source.hold("node8", ["v000002/full"], 60)
    assert leases(store, now) == {EDGE, "v000001/full", "v000002/full"}
    source.hold("node7.worker-0", [], 0)
    source.hold("node7.worker-0", [], 0)
    assert leases(store, now) == {"v000002/full"}
    assert leases(store, now + 60 + FORGET_S / 2) == set() and list(store.glob("leases/*.json"))
    assert leases(store, now + 70 + FORGET_S) == set() and not list(store.glob("leases/*"))
    assert leases(store / "nothing", now) == set()


@pytest.mark.parametrize("content", [b"", b"{", b'{"edges": 3, "until": 99999999999}', b"[]"])
def test_a_lease_file_that_makes_no_sense_holds_nothing_and_goes_in_the_end(store, content):
    (store / "leases").mkdir()
    (store / "leases" / "broken.json").write_bytes(content)
    assert leases(store, time.time()) == set() and list(store.glob("leases/*"))
    assert leases(store, time.time() + MAX_LEASE_S + FORGET_S + 1) == set() and not list(
        store.glob("leases/*")
    )


def test_no_lease_is_for_ever_whatever_its_file_says(store):
    (store / "leases").mkdir()
    (store / "leases" / "ahead.json").write_text(
        '{"edges": ["v000001/full"], "until": 99999999999}'
    )
    assert leases(store, time.time()) == {"v000001/full"}
    assert leases(store, time.time() + MAX_LEASE_S + 1) == set()


@pytest.mark.parametrize(
    "holder, edges, seconds, why",
    [
        ("", [EDGE], 1, "holder ''"),
        ("../up", [EDGE], 1, "holder"),
        ("x" * 101, [EDGE], 1, "holder"),
        ("node", ["../v1"], 1, "path '../v1'"),
        ("node", [EDGE], 0, "for 0 s"),
        ("node", [EDGE], MAX_LEASE_S + 1, "renew"),
    ],
)
def test_what_is_no_lease_is_refused(store, holder, edges, seconds, why):
    with pytest.raises(Refused, match=why):
        Folder(store).hold(holder, edges, seconds)


def test_a_store_that_takes_no_files_is_read_without_leases_and_says_so_once(disk):
    (disk.path / EDGE).mkdir(parents=True)
    disk.fail()
    source = Folder(disk.path)
    with pytest.warns(UserWarning, match="takes no leases"):
        source.hold("node", [EDGE], 60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.hold("node", [EDGE], 60)


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
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(where, token, why):
    with pytest.raises(TransferError, match=why):
        open_source(where, token)
