"""`rose relay` as a process: killed, ended, started again, or given what it can't use."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from rose.parts.relay import __main__ as relay
from rose.parts.relay.cache import CHUNK
from rose.transfer import TransferError
from rose.transfer.source import Refused, open_source, read_token
from tests.parts.relay.relays import metrics
from tests.ports import free_port

FILE = "v000001/full/rank-00000.h5"


@pytest.fixture
def store(tmp_path):
    (tmp_path / "weights" / FILE).parent.mkdir(parents=True)
    return tmp_path / "weights"


# The command, whose attempts at its upstream last for an hour.
PATIENT = """
import runpy, rose.parts.relay.relay_client as relay_client, rose.transfer.source as source
opens, relay_client.ATTEMPT_S = source.open_source, 3600.0
source.open_source = lambda upstream, token, _: opens(upstream, token, 3600.0)
runpy.run_module("rose.parts.relay", run_name="__main__")
"""


@pytest.fixture
def secret(tmp_path):
    """A token's file that only its owner can read."""
    path = tmp_path / "secret"
    path.write_text("s" * 64)
    path.chmod(0o600)
    return path


@pytest.fixture
def command():
    """command(upstream, cache, options) -> (process, url); what was started is ended."""
    started = []

    def command(upstream, cache, *options, port=0, program=("-m", "rose.parts.relay")):
        given = [upstream, "--listen", f"127.0.0.1:{port}", "--cache", cache, *options]
        process = subprocess.Popen(
            [sys.executable, *program, *map(str, given)], text=True, stdout=-1, stderr=-1
        )
        started.append(process)
        line = process.stdout.readline()
        found = re.match(r"rose relay: (http://127.0.0.1:\d+) serves ", line)
        assert found, line + process.stderr.read()
        return process, found[1]

    yield command
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_killed_relay_that_comes_back_costs_the_link_nothing(command, store, tmp_path):
    data = os.urandom(24 * CHUNK)
    (store / FILE).write_bytes(data)
    near, near_url = command(store, tmp_path / "near")
    token = tmp_path / "near/token"
    assert token.stat().st_mode & 0o777 == 0o600
    far_port, options = free_port(), ("--token-file", token)
    far, far_url = command(near_url, tmp_path / "far", *options, port=far_port)
    source, parts = open_source(far_url, read_token(token), 120), []

    def read():
        for begin in range(0, len(data), CHUNK):
            parts.append(source.read(FILE, begin, CHUNK))

    reader = threading.Thread(target=read)
    reader.start()
    while len(parts) < 8:
        time.sleep(0.001)
    far.send_signal(signal.SIGKILL)
    far.wait()
    kept = sum(path.suffix != ".part" for path in (tmp_path / "far").glob("chunks/*"))
    assert kept >= 8
    far, _ = command(near_url, tmp_path / "far", *options, port=far_port)
    reader.join(150)
    assert b"".join(parts) == data
    assert len(list((tmp_path / "far").glob("chunks/*"))) == 24
    assert metrics(far_url, read_token(token))["upstream_bytes_total"] == (24 - kept) * CHUNK


@pytest.mark.slow
def test_a_relay_that_is_gone_is_named_and_leaves_no_half_files(command, store, tmp_path):
    (store / FILE).write_bytes(os.urandom(8 * CHUNK))
    process, url = command(store, tmp_path / "cache")
    source = open_source(url, read_token(tmp_path / "cache/token"), 120)
    assert len(source.read(FILE, 0, 100)) == 100
    source.timeout_s = 0.5
    process.terminate()
    assert process.wait(60) == 0
    assert not list((tmp_path / "cache").glob("chunks/*.part"))
    assert process.stderr.read() == ""
    with pytest.raises(TransferError, match=rf"{url}: {FILE}: .*refused.*; given up after 0.5 s"):
        source.read(FILE)


@pytest.mark.slow
def test_it_ends_at_once_though_its_upstream_and_a_client_hang(command, secret, tmp_path):
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    upstream, options = f"http://127.0.0.1:{silent.getsockname()[1]}", ("--token-file", secret)
    process, url = command(upstream, tmp_path / "cache", *options, program=("-c", PATIENT))
    with pytest.raises(TransferError, match=f"{url}: {FILE}: .*timed out.*; given up after 0.5 s"):
        open_source(url, "s" * 64, 0.5).read(FILE)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        head = f"GET /files/{FILE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {'s' * 64}\r\n\r\n"
        client.sendall(head.encode())
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 0, "before the attempt at the upstream was over"
    silent.close()


@pytest.mark.slow
def test_two_relays_with_different_tokens_start_in_any_order(command, store, secret, tmp_path):
    (store / FILE).write_bytes(b"weights")
    port = free_port()
    near, own = f"http://127.0.0.1:{port}", ("--upstream-token-file", secret)
    _, far_url = command(near, tmp_path / "far", *own)
    command(store, tmp_path / "near", "--cache-gib", "0", "--token-file", secret, port=port)
    assert open_source(far_url, read_token(tmp_path / "far/token")).read(FILE) == b"weights"
    with pytest.raises(Refused, match="wrong token"):
        open_source(far_url, "s" * 64).read(FILE)


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["{store}/nothing"], "no such folder here"),
        (["{store}/run"], "is a run's folder; its weights are in .*run/weights"),
        (["{store}", "--listen", "7673"], "--listen '7673': expected HOST:PORT"),
        (["{store}", "--listen", "h:99999"], "expected HOST:PORT"),
        (["{store}", "--cache-gib", "-1"], "--cache-gib -1.0: expected 0 or more"),
        (["{store}", "--token-file", "{store}/readable"], "mode 0644: others can read it"),
        (["http://127.0.0.1:1"], "give the token file of that relay"),
        (["ftp://127.0.0.1:1", "--token-file", "{store}/good"], "expected http://host:port"),
        (["{store}", "--cache={store}/good"], "cache .*good: Not a directory"),
        (["{store}", "--cache=~/good"], "cache .*weights/good: Not a directory"),
    ],
)
def test_what_it_cannot_use_is_refused_in_one_line(
    store, tmp_path, capsys, monkeypatch, arguments, why
):
    monkeypatch.setenv("HOME", str(store))
    (store / "run").mkdir()
    (store / "run" / "config.json").touch()
    for name, mode in (("readable", 0o644), ("good", 0o600)):
        (store / name).write_text("0123456789abcdef")
        (store / name).chmod(mode)
    # The last --cache counts.
    given = ["--cache", str(tmp_path / "cache"), *(each.format(store=store) for each in arguments)]
    assert relay.main(given) == 2
    words = capsys.readouterr().err
    assert re.search(why, words) and words.count("\n") == 1 and words.startswith("rose relay: ")


def test_a_default_cache_that_is_a_link_and_a_port_that_is_taken_are_refused(
    store, tmp_path, capsys, monkeypatch
):
    """Another user could have made the link where all can make files."""
    kept = tmp_path / "theirs" / "chunks" / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(relay, "_default_cache", lambda upstream: tmp_path / "link")
    assert relay.main([str(store), "--listen", "127.0.0.1:0"]) == 2
    assert "is a symbolic link" in capsys.readouterr().err and kept.exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        given = [str(store), "--listen", address, "--cache", str(tmp_path / "cache")]
        assert relay.main(given) == 1
    assert f"--listen {address}: " in capsys.readouterr().err
