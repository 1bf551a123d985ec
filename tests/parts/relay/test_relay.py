"""A relay pulls each byte once, gives exact bytes or an error, and nothing without the token."""

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import urllib3

from rose.parts.relay.cache import CHUNK, Cache
from rose.parts.relay.relay_client import Relayed
from rose.parts.relay.server import AHEAD
from rose.transfer import Corrupted, TransferError
from rose.transfer.source import Folder, Missing, Refused, Stat, open_source
from tests.parts.relay.relays import TOKEN, Cutting, Running, Upstream

EDGE = "v000002/from-000001"
FILE = f"{EDGE}/rank-00000.h5"


@pytest.fixture
def start(store, tmp_path):
    """start(upstream, cache, limit) -> a relay, by default of the store."""
    running = []

    def start(upstream=None, cache="cache", **limit):
        running.append(Running(upstream or Upstream(store), tmp_path / cache, **limit))
        return running[-1]

    yield start
    for each in reversed(running):
        each.stop()


@pytest.fixture
def store(tmp_path):
    (tmp_path / "weights" / EDGE).mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "weights"


def fill(store, mebibytes: float, path: str = FILE) -> bytes:
    data = os.urandom(int(mebibytes * 2**20))
    (store / path).parent.mkdir(parents=True, exist_ok=True)
    (store / path).write_bytes(data)
    return data


def test_however_many_read_at_once_each_byte_crosses_the_link_once(start, store):
    data = fill(store, 5.3)
    near = start(upstream := Upstream(store), "near", limit=0)
    far = start(near.client(), "far")
    source = far.client()

    def read(begin: int) -> bool:
        whole = source.read(FILE, begin) == data[begin:]
        return whole and source.read(FILE, begin, 77) == data[begin : begin + 77]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(0, 1_800_000, 300_000)))
    assert near.metrics()["served_bytes_total"] == len(data)
    assert far.metrics()["upstream_bytes_total"] == len(data)
    assert sorted(upstream.reads) == [(FILE, index) for index in range(6)]
    assert far.metrics()["cache_bytes"] == len(data)


def test_names_sizes_and_what_is_absent_are_as_in_the_folder(start, store):
    fill(store, 0.1)
    (store / EDGE / "empty").touch()
    relayed = start().client()
    assert relayed.names("") == ["v000002"] and relayed.names(EDGE) == ["empty", "rank-00000.h5"]
    assert relayed.names("v000009") == []
    assert relayed.stat(FILE) == Folder(store).stat(FILE)
    assert relayed.stat(FILE).size == 104857
    assert relayed.stat("v000009/x") is None and relayed.stat(EDGE) is None
    assert relayed.read(f"{EDGE}/empty") == b"" == relayed.read(FILE, 10, 0)
    with pytest.raises(Missing, match="404: v000009/x: no such file"):
        relayed.read("v000009/x")
    asked = "400: .*bytes 104857 to 104858 were asked for, it has 104857"
    with pytest.raises(Refused, match=asked):
        relayed.read(FILE, 104857, 1)

    class Odd(Upstream):
        def stat(self, path):
            return Stat(5, "../../tag")

    with pytest.raises(TransferError, match="odd: tag '../../tag'"):
        start(Odd(store), "other").client().stat("odd")


def test_a_relay_that_is_started_again_goes_on_where_it_was(start, store, tmp_path):
    data = fill(store, 6)
    upstream = Upstream(store)
    first = start(upstream)
    assert first.client().read(FILE, 0, 3 * CHUNK) == data[: 3 * CHUNK]
    with pytest.raises(TransferError, match="cache: another relay uses it"):
        Cache(tmp_path / "cache", 0)
    first.stop()
    (tmp_path / "cache/chunks" / "half.part").write_bytes(b"half")
    assert start(upstream).client().read(FILE) == data
    assert sorted(upstream.reads) == [(FILE, index) for index in range(6)]
    assert not list((tmp_path / "cache").glob("chunks/*.part"))


def test_a_whole_range_is_pulled_several_chunks_at_a_time(start, store):
    data = fill(store, AHEAD)
    together = threading.Barrier(AHEAD)  # breaks, and fails the read, if they come one by one
    assert start(Upstream(store, lambda _: together.wait(120))).client().read(FILE) == data


def test_a_wrong_token_is_told_at_once_and_a_missing_one_too(start, store):
    fill(store, 0.1)
    running = start()
    for call in (lambda s: s.read(FILE), lambda s: s.names(""), lambda s: s.stat(FILE)):
        with pytest.raises(Refused, match=rf"{running.url}: .*401: wrong token"):
            call(open_source(running.url, TOKEN[:-1] + "x", 120))
    for kind in ("files/" + FILE, "stat/" + FILE, "names/", "metrics", "nothing"):
        answer = urllib3.request("GET", f"{running.url}/{kind}", retries=False)
        assert answer.status == 401 and b"no token" in answer.data
    assert running.metrics()["refused_total"] == 3 + 5
    # A token that the upstream relay refuses is told to the client.
    far = start(open_source(running.url, "x" * 32, 120), "far")
    with pytest.raises(Refused, match=rf"{far.url}.*424.*{running.url}.*401: wrong token"):
        far.client().read(FILE)


HEAD = "HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKEN + "\r\n"


def _raw(port: int, target: str, headers: str = "") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"GET {target} {HEAD}Connection: close\r\n{headers}\r\n".encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


OUTSIDE = (
    "../secret /etc/passwd %2e%2e/secret ..%2fsecret v000002/../../secret %00 link ..%5csecret "
    "v000002/%2e%2e/%2e%2e/secret %2Fetc%2Fpasswd .hidden //secret v000002/..;/secret "
    "%252e%252e/secret"
)


@pytest.mark.parametrize("path", OUTSIDE.split())
def test_nothing_outside_of_the_store_is_named_or_read(start, store, tmp_path, path):
    (store / "link").symlink_to(tmp_path / "secret")
    (store / ".hidden").write_text("secret")
    running = start()
    for kind in ("files", "stat", "names"):
        answer = _raw(running.port, f"/{kind}/{path}")
        assert re.match(rb"HTTP/1.1 4\d\d ", answer) or answer.endswith(b"\r\n\r\n[]"), answer
        assert b"root:" not in answer and b"\r\n\r\nsecret" not in answer


def test_requests_that_make_no_sense_are_refused_with_a_reason(start, store):
    fill(store, 0.1)
    running = start()
    for given in ("5-4x", "-5", "0-1,3-4", "9-3", "0-99999999", "9" * 30 + "-"):
        answer = _raw(running.port, f"/files/{FILE}", f"Range: bytes={given}\r\n")
        assert answer.startswith(b"HTTP/1.1 400"), given
    assert b" 400 " in _raw(running.port, "/stat/x", "X: " + "y" * 100_000 + "\r\n")[:20]
    assert running.client().read(FILE, 0, 5)


def test_a_link_that_breaks_in_the_middle_costs_only_the_bytes_on_their_way(start, store):
    data = fill(store, 9)
    running = start()
    cutting = Cutting(running.port, 700_000, times=12)
    # pauses would add up to more if progress did not begin them anew
    source = open_source(cutting.url, TOKEN, 2)
    assert source.read(FILE) == data
    assert len(data) < cutting.passed < len(data) + 13 * 140_000
    assert source.read(FILE, 5, 5) == data[5:10]
    cutting = Cutting(running.port, 700_000, times=3)
    far = start(open_source(cutting.url, TOKEN, 120), "far")
    assert far.client().read(FILE) == data


@pytest.mark.parametrize(
    "said, error, words",
    [
        (b"404 Not Found\r\nContent-Length: 4", Refused, "no relay of ROSE answers there"),
        (b"206 Partial Content\r\nConnection: close", TransferError, "has no Content-Length"),
    ],
)
def test_what_is_no_relay_is_not_taken_for_one(said, error, words):
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def answer():
        connection, _ = listening.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 " + said + b"\r\n\r\nnope")
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(error, match=words):
        open_source(url, TOKEN, 120).read(FILE)


def test_a_file_that_was_cut_short_upstream_gives_an_error_and_no_bytes(start, store):
    fill(store, 3)
    source = start().client()
    stat = source.stat(FILE)
    os.truncate(store / FILE, 1000)
    with pytest.raises(Refused, match="rewritten since"):
        source.read(FILE, tag=stat.tag)
    with pytest.raises(Refused, match="it has 1000"):
        source.read(FILE, 2000, 10)
    assert len(source.read(FILE)) == 1000


def test_what_the_upstreams_disk_can_not_read_is_damaged_at_once_through_two_relays(start, store):
    def fails(offset):
        if offset:
            raise Corrupted("weights: Input/output error")

    fill(store, 3)
    near = start(Upstream(store, fails), "near")
    source = start(near.client(), "far").client()
    with pytest.raises(Corrupted, match=r"422: .*422: weights: Input/output error"):
        source.read(FILE)
    assert len(source.read(FILE, 0, CHUNK)) == CHUNK


def test_a_damaged_chunk_is_pulled_once_more_when_a_reader_says_so(start, store, tmp_path):
    data = fill(store, 2)
    near = start(upstream := Upstream(store), "near")
    source = start(near.client(), "far").client()
    assert source.read(FILE) == data
    for cache in ("near", "far"):
        [damaged] = (tmp_path / cache).glob("chunks/*@000001")
        damaged.write_bytes(bytes(CHUNK))
    assert source.read(FILE, CHUNK, 10) == bytes(10)
    assert source.read(FILE, CHUNK, 10, fresh=True) == data[CHUNK : CHUNK + 10]
    for _ in range(3):
        assert source.read(FILE, fresh=True) == data
    assert source.read(FILE) == data
    assert sorted(upstream.reads) == [(FILE, index) for index in (0, 0, 1, 1)]


@pytest.mark.parametrize("first", [True, False], ids=["fresh", "plain"])
def test_two_readers_who_want_a_fresh_chunk_share_one_pull(start, store, tmp_path, first):
    data, entered, go = fill(store, 1), threading.Semaphore(0), threading.Event()
    running = start(upstream := Upstream(store))
    if first:  # what lies there is damaged
        assert running.client().read(FILE) == data
        [damaged] = (tmp_path / "cache").glob("chunks/*@000000")
        damaged.write_bytes(bytes(CHUNK))
    upstream.during = lambda _: entered.release() or go.wait(120)
    with ThreadPoolExecutor(2) as pool:
        try:
            reads = [pool.submit(running.client(120).read, FILE, fresh=first)]
            assert entered.acquire(timeout=60)
            reads.append(pool.submit(running.client(120).read, FILE, fresh=True))
            both = entered.acquire(timeout=0.3)
        finally:
            go.set()
        assert [read.result(60) == data for read in reads] == [True, True] and not both


def test_a_chunk_that_lost_bytes_on_the_disk_is_pulled_anew(start, store, tmp_path):
    data = fill(store, 2)
    source = start(upstream := Upstream(store)).client()
    assert source.read(FILE) == data
    for index, chunk in enumerate(sorted((tmp_path / "cache").glob("chunks/*"))):
        chunk.unlink() if index else os.truncate(chunk, 5)
    assert source.read(FILE) == data and len(upstream.reads) == 4


def test_a_version_is_seen_at_once_through_two_relays_also_when_published_again(start, store):
    manifest = f"{EDGE}/manifest.json"
    source = start(start().client(), "far").client()
    assert source.names(EDGE) == [] and source.stat(manifest) is None
    for _ in range(2):  # the same names and sizes both times
        data, words = fill(store, 1.5), fill(store, 0.01, manifest)
        assert source.names(EDGE) == ["manifest.json", "rank-00000.h5"]
        assert source.read(manifest) == words
        assert source.read(FILE) == data


def test_the_cache_drops_what_was_not_used_for_longest(start, store, tmp_path):
    paths = [f"v00000{version}/full/rank-00000.h5" for version in range(3)]
    contents = [fill(store, 2, path) for path in paths]
    running = start(upstream := Upstream(store), limit=5 * CHUNK)
    source = running.client()
    for version in (0, 1, 0, 2):
        assert source.read(paths[version]) == contents[version]
    assert running.metrics()["cache_bytes"] == 5 * CHUNK
    names = [path.name for path in (tmp_path / "cache/chunks").iterdir()]
    assert [sum(f"v00000{version}" in name for name in names) for version in range(3)] == [2, 1, 2]
    assert source.read(paths[0]) == contents[0] and len(upstream.reads) == 6
    assert source.read(paths[1]) == contents[1] and len(upstream.reads) > 6


def test_a_file_larger_than_the_cache_is_read_all_the_same(start, store, tmp_path):
    data = fill(store, 20)
    running = start(upstream := Upstream(store), limit=CHUNK)
    assert running.client().read(FILE) == data
    assert sorted(upstream.reads) == [(FILE, index) for index in range(20)]
    assert running.metrics()["cache_bytes"] == CHUNK
    running.stop()
    assert start(upstream, limit=CHUNK).metrics()["cache_bytes"] <= CHUNK
    assert len(list((tmp_path / "cache").glob("chunks/*"))) <= 1


def test_a_full_disk_makes_a_relay_slow_and_not_useless(start, store, disk):
    data = fill(store, 2)
    (disk.path / "cache").mkdir()
    running = start(upstream := Upstream(store), disk.path / "cache")
    disk.fill()
    assert running.client().read(FILE) == data and upstream.reads
    upstream.reads.clear()
    assert running.client().read(FILE) == data
    assert upstream.reads == [(FILE, 0), (FILE, 1)]
    assert running.metrics()["cache_errors_total"] >= 4 and running.metrics()["cache_bytes"] == 0
    disk.empty()
    assert running.client().read(FILE) == data
    assert running.metrics()["cache_bytes"] == len(data)
    running.stop()


@pytest.mark.slow
def test_an_upstream_that_is_down_is_waited_for_and_then_named(start, store):
    data = fill(store, 1)
    running = start(upstream := Upstream(store))
    upstream.down = "weights: the mount is gone"
    with pytest.raises(TransferError, match=r"503: weights: the mount is gone; given up after 4 s"):
        running.client(4).read(FILE)
    threading.Timer(0.3, setattr, (upstream, "down", "")).start()
    assert running.client().read(FILE) == data
    assert running.metrics()["upstream_errors_total"] > 0


def test_a_relays_reason_is_not_hidden_by_the_timeout_of_a_later_attempt():
    body = b"weights: the mount is gone"
    answer = b"HTTP/1.1 503 gone\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with socket.create_server(("127.0.0.1", 0)) as server:  # It answers its first request alone.

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(2000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransferError, match="503: weights: the mount is gone; given up after"):
            Relayed(url, TOKEN, 0.5).read(FILE)
        thread.join()


@pytest.mark.slow
def test_an_upstream_that_hangs_blocks_only_its_readers(start, store, monkeypatch):
    monkeypatch.setattr("rose.parts.relay.server.WAIT_S", 0.5)
    data, free = fill(store, 3), threading.Event()
    running = start(Upstream(store, lambda at: at < 2 * CHUNK or free.wait(240)))
    waited = "503: waited 0.5 s for the upstream .*weights; given up"
    with pytest.raises(TransferError, match=waited):
        running.client(4).read(FILE, 2 * CHUNK, 10)
    assert running.client().read(FILE, 0, 2 * CHUNK) == data[: 2 * CHUNK]
    assert running.client().names(EDGE) == ["rank-00000.h5"]
    free.set()


def test_clients_that_take_nothing_block_no_other(start, store):
    data = fill(store, 32)
    running = start()
    idle = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
    for connection in idle:
        connection.sendall(f"GET /files/{FILE} {HEAD}\r\n".encode())
    assert running.client().read(FILE) == data
    for connection in idle:
        connection.close()
    assert running.client().read(FILE, 5, 5) == data[5:10]
