"""One real server for both sides: online requests over vLLM's own routes, turns of a borrowed rank over ROSE's."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import aclosing

import msgspec
import numpy as np
import psutil
import pytest

from rose import config as configuration
from rose import protocol
from rose.config import ConfigError
from rose.coserving import board, device
from rose.coserving.predictor import Predictor
from rose.engine.start import EngineError
from rose.engine.vllm_engine import EngineDied
from rose.models import resolve
from rose.serving import settings, turns
from rose.serving.remote_engine import RemoteEngine
from rose.serving.server import OnlineServer
from tests.conftest import compose_tree
from tests.engine.test_vllm_engine import perturbed, publish, reference

pytestmark = pytest.mark.slow
UP_S, SOON_S = 240.0, 60.0
PREDICTOR = Predictor([0.001, 1e-6, 0.0, 1e-6, 0.0]).to_dict()
PROFILE = {"online": {"predictor": PREDICTOR}, "rollout": {"predictor": PREDICTOR}, "interference": {"hold_p99": 1.0}}
SLO = "serving.online.slo={ttft_p50_s: 30.0, ttft_p99_s: 60.0, tpot_p50_s: 5.0, tpot_p99_s: 10.0}"  # of a busy machine
PROMPT = list(range(40, 75))


class Device:
    """The server, and the operator's board as the test wants it."""

    def __init__(self, home, model) -> None:
        self.boards, self.log = home / "boards", home / "online.log"
        serving = settings.of_server([
            f"serving.online.model={model}", "serving.online.served_name=both", "serving.online.dtype=float32",
            "serving.online.max_context=512", "serving.online.kv_cache_gib=0.05", "serving.lending.same_weights=true",
            "serving.lending.patience_s=1.0", "serving.online.max_sequences=8", SLO])
        device.describe(self.boards, serving, PROFILE)
        self.control = board.Writer(self.boards / "control", board.Control)
        self.control.state.lend = self.control.state.share = 1.0
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        self.server = OnlineServer(serving, self.boards, self.log, gpus=False, threads=1)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.server.port = free.getsockname()[1]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.server.command(), env=self.server.environment(), stdout=log,
                                            stderr=subprocess.STDOUT, start_new_session=True)

    def _beat(self) -> None:
        while not self._stop.wait(0.05):
            self.control.write()

    def get(self, path: str, body: bytes | None = None, **headers: str) -> bytes:
        request = urllib.request.Request(self.server.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=SOON_S) as answer:
            return answer.read()

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        body = {"model": "both", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True,
                "ignore_eos": True}
        found = self.get("/v1/completions", json.dumps(body).encode(), **{"Content-Type": "application/json"})
        return json.loads(found)["choices"][0]["token_ids"]

    def rollout(self) -> board.Rollout:
        return board.Reader(self.boards / "rollout", board.Rollout).read()

    def succeeded(self) -> float:
        """Requests, by vLLM's own count."""
        found = re.findall(r"^vllm:request_success_total{.*} (\S+)$", self.get("/metrics").decode(), re.M)
        return sum(map(float, found))

    def close(self) -> None:
        self._stop.set()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model, whose turns end nowhere early: the end of a turn is a token that it never makes."""
    made = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(resolve(configuration.from_dict(compose_tree()).model), made)
    for name in ("config.json", "generation_config.json"):
        if (made / name).exists():
            (made / name).write_text(json.dumps(json.loads((made / name).read_text()) | {"eos_token_id": 511}))
    return made


@pytest.fixture
def config(make_config, folder):
    return make_config(f"rollout.engine_start_timeout_s={UP_S}", f"model.path={folder}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, folder):
    made = Device(tmp_path_factory.mktemp("device"), folder)
    yield made
    made.close()
    print(made.log.read_text()[-4000:])


@pytest.fixture
def connect(loop, shared, config):
    """connect(**overrides) -> RemoteEngine."""
    made = []

    def connect(**changes):
        changed = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))
        made.append(loop.run_until_complete(RemoteEngine.connect(shared.boards, resolve(config.model), changed)))
        return made[-1]

    yield connect
    for engine in made:
        loop.run_until_complete(engine.shutdown())


async def turn(engine, name, prompt=PROMPT, tokens=24):
    found = {"tokens": [], "logprobs": [], "versions": [], "finish": None}
    sampling = protocol.Sampling(max_new_tokens=tokens, temperature=0.0)
    async for chunk in engine.generate(name, protocol.pack_tokens(prompt), sampling):
        found["tokens"] += chunk.tokens
        found["logprobs"] += chunk.logprobs
        found["versions"] += [chunk.version] * len(chunk.tokens)
        found["finish"] = chunk.finish
    return found


async def until(condition, what):
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, f"waited {SOON_S:g} s for {what}"
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def model(shared):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(shared.server.online.model).float().eval()


def agrees(model, found, prompt=PROMPT):
    tokens, logprobs = reference(model, prompt, found["tokens"])
    assert found["tokens"] == tokens
    np.testing.assert_allclose(found["logprobs"], logprobs, atol=1e-3)


def test_an_online_request_and_a_turn_at_once_on_one_engine_and_only_the_first_is_counted_by_vllm(
        connect, loop, shared, model):
    engine = connect()
    prompt = PROMPT[::-1]

    async def scene():
        running = asyncio.create_task(turn(engine, "g.0.t0#1", prompt, 300))
        await until(lambda: shared.rollout().running, "the turn to run")
        online = await asyncio.to_thread(shared.complete, PROMPT, 16)
        return online, running.done(), await running

    before = shared.succeeded()
    online, over, found = loop.run_until_complete(scene())
    assert not over and len(online) == 16 and found["finish"] is protocol.FinishReason.LENGTH
    agrees(model, found, prompt)
    assert set(found["versions"]) == {-1} and engine.version == -1
    assert shared.succeeded() == before + 1
    state = shared.rollout()
    assert state.pid == engine.pid and 0 < state.kv_budget <= state.kv_total and state.open and not state.running
    loop.run_until_complete(until(lambda: engine.stats().generated_tokens >= 300, "the count of tokens"))


def test_who_does_not_show_the_token_or_sends_anything_else_gets_nothing(connect, shared):
    connect()
    address = turns.find(shared.boards)
    assert (shared.boards / turns.FILE).stat().st_mode & 0o777 == 0o600
    for header in ({}, {"Authorization": "Bearer no"}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            shared.get(turns.STATE, **header)
    with pytest.raises(urllib.error.HTTPError, match="400") as found:
        shared.get(turns.TURNS, b"nonsense", **address.header)
    assert "rose/turns" in msgspec.msgpack.decode(found.value.read(), type=turns.Failure).text


def test_a_new_version_reaches_both_sides_and_the_next_rank_begins_with_the_folders_weights(
        connect, loop, shared, model, config, tmp_path):
    engine, folder = connect(), resolve(config.model)
    new = perturbed(folder)
    store = publish(tmp_path / "store", folder, 5, new)
    prompt = PROMPT[::-1]

    async def scene():
        running = asyncio.create_task(turn(engine, "v.0.t0#1", prompt, 400))
        await until(lambda: shared.rollout().made_tokens and shared.rollout().running, "the turn to run")
        online = asyncio.create_task(asyncio.to_thread(shared.complete, PROMPT, 200))
        loaded = await engine.load_version(5, store, config.transfer)
        return loaded, await running, await online

    loaded, found, online = loop.run_until_complete(scene())
    assert loaded.version == engine.version == 5 and len(online) == 200  # it was not aborted
    assert found["finish"] is not protocol.FinishReason.ABORT and set(found["versions"]) <= {-1, 5}
    after = loop.run_until_complete(turn(engine, "v.0.t1#1"))
    agrees(new, after)
    assert set(after["versions"]) == {5}
    assert shared.complete(PROMPT, len(after["tokens"])) == after["tokens"]  # no prefix of the old weights
    loop.run_until_complete(engine.shutdown())

    again = connect()
    assert again.version == -1 and engine.pid == again.pid
    agrees(model, loop.run_until_complete(turn(again, "v.0.t2#1")))


def test_a_version_that_is_not_there_leaves_the_weights(connect, loop, shared, model, config, tmp_path):
    from rose.transfer import TransferError

    engine = connect()
    with pytest.raises(TransferError, match="no-store"):
        loop.run_until_complete(engine.load_version(6, str(tmp_path / "no-store"), config.transfer))
    agrees(model, loop.run_until_complete(turn(engine, "w.0.t0#1")))


def test_turns_end_when_lending_stops_when_told_and_when_nobody_listens(connect, loop, shared, model):
    engine, prompt = connect(), PROMPT[::-1]

    async def running(name):
        task = asyncio.create_task(turn(engine, name, prompt, 450))
        await until(lambda: shared.rollout().running, "the turn to run")
        return task

    async def scene():
        evicted = await running("x.0.t0#1")
        shared.control.state.lend = 0.0
        found = await asyncio.wait_for(evicted, SOON_S)
        assert shared.rollout().kv_budget == 0 and shared.rollout().evicted == 1
        shared.control.state.lend = 1.0
        aborted = await running("x.0.t1#1")
        await engine.abort("x.0.t1#1")
        await engine.abort("x.0.unknown#1")
        other = await asyncio.wait_for(aborted, SOON_S)
        left = await running("x.0.t2#1")
        left.cancel()
        await until(lambda: not shared.rollout().running + shared.rollout().waiting, "its end in the engine")
        return found, other

    for found in loop.run_until_complete(scene()):
        assert found["finish"] is protocol.FinishReason.ABORT and len(found["tokens"]) < 450


def test_a_run_with_another_model_or_longer_turns_is_refused(connect, loop, shared, config, tmp_path):
    connect()
    with pytest.raises(ConfigError, match="serving.online.max_context=512: the run's turns need model.max_context=600"):
        connect(max_context=600)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the run's model"):
        loop.run_until_complete(RemoteEngine.connect(shared.boards, other, config))


def test_an_engine_that_is_killed_has_died_and_ends_its_turns(connect, loop, shared, model, config):
    engine, prompt = connect(), PROMPT[::-1]

    async def scene():
        async with aclosing(engine.generate("k.0.t0#1", protocol.pack_tokens(prompt),
                                            protocol.Sampling(max_new_tokens=450, temperature=0.0))) as chunks:
            await anext(chunks)
            psutil.Process(engine.pid).kill()
            with pytest.raises(EngineDied):
                async for _ in chunks:
                    pass
        await asyncio.wait_for(asyncio.shield(engine.died), SOON_S)
        with pytest.raises(EngineDied):
            await turn(engine, "k.0.t1#1")
        await asyncio.to_thread(shared.process.wait, SOON_S)  # the server goes with its engine
        rollout = msgspec.structs.replace(config.rollout, engine_start_timeout_s=0.1)
        hasty = msgspec.structs.replace(config, rollout=rollout)
        with pytest.raises(EngineError, match="no online engine to share within 0.1 s"):
            await RemoteEngine.connect(shared.boards, resolve(config.model), hasty)

    loop.run_until_complete(scene())
