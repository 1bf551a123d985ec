"""The online server as a child: a small program, but for one test with vLLM's."""

import asyncio
import os
import socket
import subprocess
import sys

import aiohttp
import pytest

from rose.config import ConfigError
from rose.parts.lending import settings
from rose.parts.lending.board import Online, Reader
from rose.parts.lending.operator import metrics, report, server
from rose.parts.lending.operator.server import OnlineServer, ServerError
from rose.parts.lending.vllm import device
from tests import processes
from tests.engine.conftest import folders  # noqa: F401

SLO_KEYS = {"ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"}

PROGRAM = """
import http.server, os, subprocess, sys, time
folder, port = sys.argv[1:]
print("hello from", os.getpid(), flush=True)
if os.path.exists(f"{folder}/broken") or "BROKEN" in os.environ:
    sys.exit("the model has the wrong shape")
if os.path.exists(f"{folder}/slow"):
    time.sleep(600)
child = subprocess.Popen(["sleep", "1000"])  # as vLLM's engine process
open(f"{folder}/child", "w").write(str(child.pid))
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(port)), Answer).serve_forever()
"""


class Small(OnlineServer):
    def command(self):
        return [sys.executable, "-c", PROGRAM, str(self.folder), str(self.port)]


@pytest.fixture
def make(tmp_path, monkeypatch):
    for name, value in {"BACK_OFF_S": (0.05, 0.2), "POLL_S": 0.02, "STOP_S": 60.0}.items():
        monkeypatch.setattr(server, name, value)

    def make(*arguments, kind=Small):
        given = ["serving.online.model=hub/model", "serving.online.port=0", *arguments]
        log = tmp_path / "online.log"
        return kind(settings.of_server(given), tmp_path, log, gpus=False, threads=1)

    return make


async def up(made, starts=1):
    async with asyncio.timeout(60):
        while not (made.up and made.starts >= starts):
            await asyncio.sleep(0.01)


async def gone(pid):
    await asyncio.to_thread(processes.until, lambda: not processes.alive(pid), f"{pid} to end")


@pytest.mark.slow
async def test_one_that_is_killed_is_started_again_until_it_starts_at_the_same_address(
    make, tmp_path
):
    made, said = make(), []
    running = asyncio.create_task(made.run(said.append))
    await up(made)
    url, engine = made.url, int((tmp_path / "child").read_text())
    # It gets no signal of our group, and competes by its priority within our session.
    assert os.getpgid(engine) != os.getpgid(0) and os.getsid(engine) == os.getsid(0)
    (tmp_path / "broken").touch()
    os.kill(made._process.pid, 9)
    async with asyncio.timeout(60):
        while len(said) < 4:
            await asyncio.sleep(0.01)
    (tmp_path / "broken").unlink()
    await up(made, starts=4)
    await gone(engine)
    assert made.url == url and url in said[0]
    assert "killed by SIGKILL" in said[1] and "hello from" in said[1]
    pauses = [words.rpartition("started in ")[2] for words in said[1:4]]
    assert pauses == ["0.05 s", "0.1 s", "0.2 s"]
    running.cancel()
    second = int((tmp_path / "child").read_text())
    await asyncio.sleep(0)
    # It lives until it is told to end, because requests under way may end.
    assert processes.alive(made._process.pid)
    await made.stop()
    await gone(second)
    assert made._process.returncode == -15


@pytest.mark.parametrize(
    "fault, given, words",
    [
        ("broken", [], "code 1 before it served.*the wrong shape"),
        ("slow", ["serving.online.start_timeout_s=0.5"], "did not answer .*start_timeout_s=0.5"),
    ],
)
def test_one_that_never_comes_up_is_an_error_and_is_ended(make, tmp_path, fault, given, words):
    (tmp_path / fault).touch()
    made = make(*given)
    with pytest.raises(ServerError, match=f"(?s){words}"):
        asyncio.run(made.run(print))
    assert not processes.alive(made._process.pid)


@pytest.mark.slow
def test_it_dies_with_this_process(tmp_path):
    program = f"""
import asyncio, sys
from pathlib import Path
from tests.parts.lending.test_server import Small, up
from rose.parts.lending import settings
async def run():
    serving = settings.of_server(["serving.online.model=hub/model", "serving.online.port=0"])
    made = Small(serving, Path({str(tmp_path)!r}), Path({str(tmp_path)!r}) / "log", False, 1)
    running = asyncio.create_task(made.run(lambda words: None))
    await up(made)
    print(made._process.pid, flush=True)
    await running
asyncio.run(run())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert processes.alive(pid)
        process.kill()
    asyncio.run(gone(pid))
    # this one's engine process follows its server by the plugin
    os.kill(int((tmp_path / "child").read_text()), 9)


def test_what_can_be_said_before_a_start_is(make, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    drafts = "engine_args={speculative-config: {method: ngram}}"  # wrong tokens on a CPU
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given, words in (
            (f"port={port}", f"port={port}: Address already in use.*or 0 for a free"),
            ("model=/no/such", "model='/no/such': no such folder here"),
            (f"model={tmp_path}/model", "no config.json there"),
            ("host=300.1.1.1", "host=300.1.1.1"),
            (drafts, "engine_args.spec.*wrong tokens"),
        ):
            with pytest.raises(ConfigError, match=words):
                make(f"serving.online.{given}").check()
    make("serving.online.engine_args={speculative_config: null}").check()
    made = make(f"serving.online.{drafts}")
    made.gpus = True
    made.check()
    monkeypatch.setattr(server, "entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match="plugin .vllm.general_plugins.; install ROSE there"):
        make().check()


def test_settings_become_arguments_and_engine_args_go_over_them(make, monkeypatch):
    for name in ("ROSE_COSERVING", "VLLM_KV_CACHE_LAYOUT"):
        monkeypatch.delenv(name, raising=False)
    given = "max-num-seqs: 3, compilation_config: {level: 0}, allowed_origins: ['*', a]"
    given += ", async_scheduling: false, enforce_eager: true"
    made = make(f"serving.online.engine_args={{{given}}}", kind=OnlineServer)
    words = " ".join(made.command())
    assert words.count("--max-num-seqs") == 1 and "--served-model-name" not in words
    for option in (
        "--max-num-seqs 3 ",
        '--compilation-config {"level": 0} ',
        "--allowed-origins * a ",
        "--no-async-scheduling",
        "--enforce-eager",
        "--scheduler-cls rose.parts.lending.vllm.online.scheduler",
    ):
        assert option in words
    variables = made.environment()
    assert "VLLM_KV_CACHE_LAYOUT" not in variables and variables["OMP_NUM_THREADS"] == "1"
    assert variables["ROSE_COSERVING"] == str(made.folder)
    made.gpus = True  # a KV block lies in one place, so that its pages can be given back
    assert made.environment()["VLLM_KV_CACHE_LAYOUT"] == "BLHNC"


@pytest.mark.slow
async def test_vllms_server_serves_and_shows_the_boards_beside_its_own_metrics(tmp_path, folders):  # noqa: F811
    given = {"port": 0, "served_name": "tiny", "kv_cache_gib": 0.05, "max_context": 256}
    given |= {"model": folders["Qwen3"], "engine_args": "{skip_tokenizer_init: true}"}
    given |= {"slo": "{ttft_p50_s: 20, ttft_p99_s: 20, tpot_p50_s: 5, tpot_p99_s: 5}"}
    serving = settings.of_server([f"serving.online.{key}={value}" for key, value in given.items()])
    device.describe(tmp_path, serving, None)
    made = OnlineServer(serving, tmp_path, tmp_path / "log", gpus=False, threads=1)
    made.check()
    running = asyncio.create_task(made.run(print))

    async def serves(starts):
        while not (made.up and made.starts == starts):
            await asyncio.wait({running}, timeout=0.2)
            assert not running.done(), running.exception()

    await serves(1)
    async with aiohttp.ClientSession(made.url) as client:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True}
        async with client.post("/v1/completions", json=body) as answer:
            said = await answer.json()
            assert answer.status == 200, (said, (tmp_path / "log").read_text()[-4000:])
        assert said["usage"]["completion_tokens"] == 6
        async with client.get("/metrics") as answer:
            text = await answer.text()
    assert 'rose_online_requests_total{lending="without",met="yes"} 1.0' in text
    assert 'rose_online_tokens_total{kind="made"} 6.0' in text
    assert report.quantiles(text).keys() == SLO_KEYS
    os.kill(made._process.pid, 9)
    state = Reader(tmp_path / "online", Online).read()
    await gone(int(state.pid))  # the engine process, at once: not by the sweep alone
    await serves(2)
    async with aiohttp.ClientSession(made.url) as client:
        long = asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 240}))
        async with asyncio.timeout(60):
            while not (metrics.read(tmp_path).online or Online()).running:
                await asyncio.sleep(0.01)
        running.cancel()
        await made.stop()
        answer = await long
        assert answer.status == 200, (tmp_path / "log").read_text()[-4000:]
        assert (await answer.json())["usage"]["completion_tokens"] == 240
