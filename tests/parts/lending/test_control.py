"""The operator's word: what stops lending, and how it is said to the boards' readers."""

import asyncio
import contextlib
import threading
import time

import aiohttp
import msgspec
import pytest

from rose.parts.lending import board, settings
from rose.parts.lending.board import Control, Reader
from rose.parts.lending.operator import control as controls
from rose.parts.lending.operator.control import ControlBoard
from rose.parts.lending.operator.web import Web


@pytest.fixture
def serving():
    return settings.of_server(["serving.lending.hours={08-20: 0.25, 22-02: 0}"])


def make(folder, serving, never="", **lending):
    said, lending = [], msgspec.structs.replace(serving.lending, **lending)
    made = ControlBoard(folder, lending, never, said.append)
    return made, said, Reader(folder / "control", Control)


async def until(reader, lend):
    async with asyncio.timeout(60):
        while reader.read().lend != lend:
            await asyncio.sleep(0.01)


def test_a_clock_that_is_set_changes_the_share_at_the_next_beat(tmp_path, serving, monkeypatch):
    hours = [12]
    now = lambda: time.struct_time((2026, 1, 1, hours[-1], 0, 0, 0, 1, 0))  # noqa: E731
    monkeypatch.setattr(time, "localtime", now)
    made, said, reader = make(tmp_path, serving)
    for hour, share in ((23, 0), (9, 0.25), (3, 1)):
        hours.append(hour)
        made.write()
        assert reader.read().share == share and f"{share:g} of what" in said[-1]


def test_a_stop_by_hand_is_on_the_board_at_once_and_holds_until_a_start(tmp_path, serving):
    made, said, reader = make(tmp_path, serving)
    assert reader.read().lend == 1 and board.is_alive(reader.read())
    made.stop("SIGUSR1")
    made.stop("SIGUSR1")
    made.write()
    assert reader.read().lend == 0 and said == ["lending stopped by SIGUSR1"]
    made.start("HTTP")
    assert reader.read().lend == 1
    made.close()
    assert Reader(tmp_path / "control", Control).read().lend == 0
    # A start does not overrule a permanent reason.
    made, said, reader = make(tmp_path, serving, never="no profile")
    made.stop("HTTP")
    made.start("HTTP")
    assert reader.read().lend == 0 and said[-1] == "lending started by HTTP, but: no profile"


async def test_while_the_stop_file_exists_nothing_is_lent(tmp_path, serving, monkeypatch):
    monkeypatch.setattr(controls, "POLL_S", 0.01)
    stop = tmp_path / "sub" / "stop"
    made, said, reader = make(tmp_path, serving, stop_file=str(stop))
    watching = asyncio.create_task(made.watch_file())
    await until(reader, 1)
    stop.parent.mkdir()
    stop.symlink_to("nowhere")  # a stop is a stop
    await until(reader, 0)
    stop.unlink()
    await until(reader, 1)
    watching.cancel()
    stopped, again = said
    assert "exists (serving.lending.stop_file)" in stopped and "lending again" in again


async def test_a_stop_file_whose_mount_is_silent_stops_lending_and_delays_no_end(
    tmp_path, serving, monkeypatch
):
    answers, late = threading.Event(), []
    monkeypatch.setattr(controls, "LOST_S", 0.02)
    monkeypatch.setattr(controls, "_exists", lambda path: late.append(answers.wait(60)))
    made, said, reader = make(tmp_path, serving, stop_file="/mnt/dead/stop")
    watching = asyncio.create_task(made.watch_file())
    await until(reader, 0)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert "does not answer" in said[0] and not late
    answers.set()


def test_a_new_policy_version_is_a_new_epoch(tmp_path, serving):
    writer = board.Writer(tmp_path / "epoch", board.Epoch)
    writer.state.epoch = 3
    writer.write()
    made, _, reader = make(tmp_path, serving)
    assert reader.read().epoch == 3
    # damaged: the last one holds
    (tmp_path / "epoch").write_bytes(bytes((tmp_path / "epoch").stat().st_size))
    made.write()
    assert reader.read().epoch == 3


async def test_http_stops_and_starts_with_the_token_only(tmp_path, serving):
    replace = msgspec.structs.replace
    serving = replace(serving, online=replace(serving.online, port=0))
    made, said, reader = make(tmp_path, serving)

    async def page():
        return "<p>report</p>"

    status = lambda: {"lend": bool(made.state.lend)}  # noqa: E731
    server = Web(tmp_path, tmp_path, serving, made, page, status)
    await server.open()
    token = (tmp_path / "token").read_text().strip()
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600 and len(token) == 64
    right = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client:

        async def answered(method, path, status, headers=right):
            async with client.request(method, path, headers=headers) as answer:
                assert answer.status == status
                return await answer.text()

        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": token}):
            assert "token" in await answered("POST", "/lending/stop", 401, headers)
        assert reader.read().lend == 1
        assert await answered("POST", "/lending/stop", 200) == '{"lend": false}'
        assert reader.read().lend == 0 and "HTTP from 127.0.0.1" in said[-1]
        assert "\nrose_lending 0.0\n" in await answered("GET", "/metrics", 200, {})
        assert "report" in await answered("GET", "/report", 200, {})
        assert await answered("POST", "/lending/start", 200) == '{"lend": true}'
        await answered("GET", "/lending/stop", 405)
        await answered("POST", "/lending/halt", 404)
    await server.close()
