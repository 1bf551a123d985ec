"""What the two processes say to each other: frames, tokens, errors; and a client before a server that misbehaves."""

import asyncio
import os
import subprocess
import sys

import msgspec
import pytest
from aiohttp import web

from rose import protocol
from rose.engine.start import EngineError
from rose.engine.vllm_engine import Chunk, EngineDied, Stats
from rose.serving import remote_engine, turns
from rose.serving.remote_engine import RemoteEngine
from rose.serving.turns import Failure, Frames, State, frame
from rose.transfer import TransferError

CHUNKS = [Chunk([1, 2], [-0.1, -1e-30], -1, None, 7), Chunk([3], [float("-inf")], 4, None, 7),
          Chunk([], [], 4, protocol.FinishReason.ABORT, 7)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_survive_however_the_bytes_arrive(size):
    stream, frames, found = b"".join(map(frame, [*CHUNKS, Failure("engine", "no")])), Frames(), []
    for at in range(0, len(stream), size):
        found += frames.feed(stream[at:at + size])
    assert found == [*CHUNKS, Failure("engine", "no")] and isinstance(found[0], Chunk)
    assert found[2].finish is protocol.FinishReason.ABORT


@pytest.mark.parametrize("data", [b"HTTP/1.1 200", b"\0\0\0\1\xc1"])
def test_other_bytes_are_no_frames(data):
    with pytest.raises(ValueError):
        Frames().feed(data)


@pytest.mark.parametrize("error, kind, text", [
    (EngineDied("gone"), EngineDied, "gone"), (TransferError("damaged"), TransferError, "damaged"),
    (EngineError("seeded"), EngineError, "seeded"), (KeyError("x"), EngineError, "KeyError: 'x'")])
def test_an_error_arrives_as_what_it_was(error, kind, text):
    found = turns.error_of(msgspec.msgpack.decode(msgspec.msgpack.encode(turns.failure(error)), type=Failure))
    assert type(found) is kind and str(found) == text


def test_the_token_is_new_at_each_start_and_only_its_owner_may_read_it(tmp_path):
    first, second = turns.publish(tmp_path, "http://a:1"), turns.publish(tmp_path, "http://a:1")
    assert turns.find(tmp_path) == second != first and (tmp_path / turns.FILE).stat().st_mode & 0o777 == 0o600
    assert second.shown(second.header["Authorization"])
    others = (None, "", second.token, first.header["Authorization"], "Bearer \xff")
    assert not any(second.shown(shown) for shown in others)
    (tmp_path / turns.FILE).write_text("{}")
    with pytest.raises(EngineError, match="turns.json.*same_weights=true"):
        turns.find(tmp_path)


class Server:
    """Answers as the endpoint does, but for what the test does to a turn's stream. Its engine is a sleeping process."""

    def __init__(self, folder, model, stream):
        self.engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        self.folder, self.model, self.stream, self.silent, self.said = folder, model, stream, False, []

    async def begin(self):
        app = web.Application()
        app.add_routes([web.get(turns.STATE, self.state), web.post(turns.ANEW, self.state),
                        web.post(turns.TURNS, self.turn), web.post(turns.LOAD, self.load)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.address = turns.publish(self.folder, f"http://127.0.0.1:{self.runner.addresses[0][1]}")

    async def state(self, request):
        assert self.address.shown(request.headers["Authorization"])
        if self.silent:
            await asyncio.sleep(100)
        state = State(os.getpid(), self.engine.pid, str(self.model), "float32", 512, 8, 1000, "cpu", -1, True,
                      Stats(0, 0, 0.0, 0, 0, 0))
        return web.Response(body=msgspec.msgpack.encode(state))

    async def turn(self, request):
        self.said.append(msgspec.msgpack.decode(await request.read(), type=turns.Turn))
        answer = web.StreamResponse()
        await answer.prepare(request)
        await self.stream(answer)
        return answer

    async def load(self, _):
        return web.Response(status=500, body=msgspec.msgpack.encode(Failure("transfer", "no such version")))

    async def end(self):
        self.engine.kill()
        self.engine.wait()
        await self.runner.cleanup()


@pytest.fixture
def scene(make_config, tmp_path):
    """scene(stream, act, *overrides): `act(engine, server)` with an engine whose turns are answered by `stream`."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def run(stream, act, *overrides):
        async def whole():
            server = Server(tmp_path, model, stream)
            await server.begin()
            engine = await RemoteEngine.connect(tmp_path, model, make_config(*overrides))
            try:
                return await asyncio.wait_for(act(engine, server), 30)
            finally:
                await engine.shutdown()
                assert not engine.alive
                await server.end()

        return asyncio.run(whole())

    return run


async def taken(engine, prompt=(5, 6), tokens=10):
    return [chunk async for chunk in engine.generate("a.0.t0#1", protocol.pack_tokens(prompt),
                                                     protocol.Sampling(max_new_tokens=tokens))]


async def nothing(answer):
    await asyncio.sleep(100)


def test_a_turn_is_what_the_server_sends_and_no_longer_than_the_runs_context(scene):
    async def all_of_it(answer):
        await answer.write(b"".join(map(frame, CHUNKS)))

    async def act(engine, server):
        assert await taken(engine) == CHUNKS
        [full] = await taken(engine, [5] * 512)
        assert full.finish is protocol.FinishReason.LENGTH
        await taken(engine, [5] * 510)
        assert [turn.sampling.max_new_tokens for turn in server.said] == [10, 2]

    scene(all_of_it, act)


@pytest.mark.parametrize("rest", [b"", frame(CHUNKS[1])[:7]])
def test_a_stream_that_breaks_off_while_the_engine_lives_gives_the_turn_back(scene, rest, monkeypatch):
    monkeypatch.setattr(remote_engine, "DEATH_NOTICE_S", 0.05)

    async def breaks(answer):
        await answer.write(frame(CHUNKS[0]) + rest)

    async def act(engine, _):
        return await taken(engine)

    first, last = scene(breaks, act)
    assert first == CHUNKS[0] and (last.tokens, last.finish) == ([], protocol.FinishReason.ABORT)


def test_a_turn_that_brings_nothing_for_too_long_is_given_back(scene, monkeypatch):
    monkeypatch.setattr(remote_engine, "DEATH_NOTICE_S", 0.05)

    async def act(engine, _):
        return await taken(engine)

    [last] = scene(nothing, act, "rollout.turn_timeout_s=0.3")
    assert last.finish is protocol.FinishReason.ABORT


def test_the_death_of_the_engine_ends_its_turns_and_calls(scene):
    async def act(engine, server):
        waiting = asyncio.create_task(taken(engine))
        while not server.said:
            await asyncio.sleep(0.01)
        server.engine.kill()
        with pytest.raises(EngineDied, match=f"process {server.engine.pid}"):
            await waiting
        await engine.died
        with pytest.raises(EngineDied):
            await taken(engine)

    scene(nothing, act)


def test_a_server_that_says_nothing_more_has_died(scene, monkeypatch):
    for name, seconds in (("LOOK_S", 0.02), ("ANSWER_S", 0.1), ("SILENT_S", 0.3)):
        monkeypatch.setattr(remote_engine, name, seconds)

    async def act(engine, server):
        server.silent = True
        await asyncio.shield(engine.died)

    scene(nothing, act)


def test_what_the_server_could_not_do_is_said(scene, make_config):
    async def refused(answer):
        await answer.write(frame(Failure("engine", "turn a.0.t0#1 has a sampling seed")))

    async def act(engine, _):
        with pytest.raises(EngineError, match="sampling seed"):
            await taken(engine)
        with pytest.raises(TransferError, match="no such version"):
            await engine.load_version(1, "store", make_config().transfer)
        assert engine.version == -1

    scene(refused, act)
