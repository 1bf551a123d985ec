"""The benchmark of a whole sync: every encoding arrives bit for bit over its link; verdicts follow
the figures."""

import json
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "trainer")]
import bench_sync  # noqa: E402
import bench_sync_link  # noqa: E402
import bench_sync_parts  # noqa: E402
from bench_sync_tables import NAMES, Sync, targets  # noqa: E402


@pytest.mark.slow
def test_every_encoding_is_synced_and_verified_from_two_real_trainer_ranks(tmp_path, capsys):
    from tiny_world import save_model

    file, model = tmp_path / "rows.json", save_model(tmp_path / "model")
    assert (
        bench_sync.main(
            [
                "--model",
                str(model),
                "--work",
                str(tmp_path / "work"),
                "--rates",
                "0",
                "--link",
                "proxy",
                "--receivers",
                "1",
                "--lrs",
                "1e-3",
                "--steps",
                "1",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    rows = json.loads(file.read_text())
    assert [row["encoding"] for row in rows] == list(NAMES)
    assert all(
        row["changed"] > 0 and row["link"] >= row["pulled"] >= row["payload"] > 0 for row in rows
    )
    payload = {row["encoding"]: row["payload"] for row in rows}
    assert payload["ours"] < payload["xor"] < payload["dense"]
    words = capsys.readouterr().out
    assert "loopback, unlimited" in words and all(
        f"  0.001 {name} " in words for name in NAMES.values()
    )
    assert [
        path.name for path in (tmp_path / "work").iterdir() if not path.name.startswith("steps-")
    ] == []


@pytest.mark.parametrize("name", ["dense", "coo", "xor"])
def test_a_rival_gives_back_every_value_with_and_without_a_base(name):
    codec, draw = bench_sync_parts.codec_of(name), np.random.default_rng(0)
    old = draw.integers(0, 65536, 1001, dtype=np.uint16)
    new = old.copy()
    new[::7] += 3
    whole, payload = codec.encode(new, None), codec.encode(new, old)
    assert not codec.info(whole).needs_base and (codec.decode(memoryview(whole)) == new).all()
    assert codec.info(payload).needs_base is (name != "dense")
    if name == "dense":
        assert (codec.decode(memoryview(payload)) == new).all()
    else:
        codec.apply(memoryview(payload), old)
        assert (old == new).all()


def test_the_proxy_passes_everything_at_its_rate_and_counts_what_comes_down():
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = server.accept()
        assert connection.recv(4) == b"send"
        connection.sendall(bytes(1_000_000))
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    with bench_sync_link.Proxy(40e6) as link:
        port = int(link.upstream(server.getsockname()[1]).rpartition(":")[2])
        began, got = time.monotonic(), 0
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"send")
            while data := client.recv(1 << 16):
                got += len(data)
        assert got == link.bytes() == 1_000_000
        # no faster than it may be
        assert time.monotonic() - began >= (1_000_000 - bench_sync_link.BURST) / 5e6
    server.close()


def test_a_verdict_says_what_was_missed():
    def row(encoding, receivers, link, seconds, engines=False):
        return Sync(
            200,
            1e-6,
            encoding,
            receivers,
            engines,
            1,
            link,
            link,
            link,
            seconds,
            publish_s=0.1,
            stage_s=0.2,
            pause_s=0.01,
            publish_cpu_s=0.1,
            stage_cpu_s=0.1,
            changed=5,
            trainer_peak=1,
            receiver_peak=1,
        )

    few, dense = row("ours", 1, 100, 0.6), row("dense", 1, 4000, 12.0)
    said = targets([dense, few, row("ours", 4, 104, 0.7), row("ours", 1, 100, 0.4, engines=True)])
    # bytes, seconds, growth, pause of the engine, flip alone
    assert [line.split("  ")[1] for line in said] == ["met", "NOT met", "met", "NOT met", "met"]
    assert "NOT met" in targets([dense, few, row("ours", 4, 399, 0.7)])[2]
