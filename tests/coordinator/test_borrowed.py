"""Ranks that join over MPI and behave in every way: the hub's turns survive, and nobody else is
concerned."""

import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from rose import protocol as p
from rose.comm import guest, join, mpi_process, porter
from rose.comm.guest import Guest
from rose.coordinator import borrowed
from rose.coordinator.borrowed import Borrowed
from tests import processes
from tests.coordinator.conftest import HOST, RANK, World, tokens

pytestmark = pytest.mark.slow
JOINER = Path(__file__).with_name("joiner.py")
DEADLINE_S = 120.0
BEATS = 3  # of a joiner, from which follows that its porter and the coordinator go on


class Court:
    """A `Borrowed` with a hub and one dedicated worker; `joiners` are processes."""

    def __init__(self, folder, config):
        self.run_dir, self.config = folder / "run", config
        self.run_dir.mkdir()
        self.world = World(folder)
        self.changes, self.joiners = [], []
        self.before = set(processes.children(recursive=True))
        notes = (lambda *w: self.world.faults.append(w), lambda *w: self.changes.append(w))
        self.borrowed = Borrowed(config, self.run_dir, 1, 100, lambda: self.world.hub, *notes)
        keep = self.world.hub._send
        self.world.hub._send = lambda to, m: self.borrowed.send(to, m) if to >= 100 else keep(to, m)
        self.world.hub.weights.publish(0, "v0/manifest.json")
        self.world.ready("rollout-0", sequences=1)

    def join(self, behaviour):
        mpi = self.config.cluster.mpi
        joiner = subprocess.Popen(
            [sys.executable, str(JOINER), str(self.run_dir), behaviour],
            text=True,
            env=mpi_process.environment(mpi.env | mpi.join_env),
            stdout=subprocess.PIPE,
        )
        self.joiners.append(joiner)
        return joiner

    def started(self):
        """Processes that live since this was made."""
        return set(processes.children(recursive=True)) - self.before

    async def until(self, condition, what):
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert time.monotonic() < end, f"waited for {what}: {self.world.faults} {self.changes}"
            await asyncio.sleep(0.02)
        return value

    def lost(self):
        return [detail for what, detail in self.world.faults if what == "borrowed rank lost"]

    def workers(self):
        return sorted(self.world.hub.workers)

    def run(self, story):
        """`story(self)` while the coordinator's half runs; ends everything that was started."""

        async def both():
            serving = asyncio.create_task(self.borrowed.run())
            await self.until(lambda: join.endpoint(self.run_dir), "the door")
            told = asyncio.create_task(story(self))
            await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
            assert told.done(), serving.exception()
            serving.cancel()
            await asyncio.wait({serving})
            told.result()

        try:
            asyncio.run(both())
        finally:
            for joiner in self.joiners:
                joiner.kill()
                joiner.wait()
                joiner.stdout.close()
            self.world.journal.close()
        assert not processes.left(self.started), "a porter stays"
        assert join.endpoint(self.run_dir) is None, "the door is open after the end"


@pytest.fixture
def court(tmp_path, make_config, monkeypatch):
    """A court in which no rank is silent for too long, and a porter has the time to say goodbye,
    however busy the machine is."""
    monkeypatch.setattr(Guest.close, "__defaults__", (60.0,))
    return Court(tmp_path, make_config("serving.lost_after_s=60"))


@pytest.fixture
def strict(tmp_path, make_config):
    """With little patience, for tests of silence, and enough for a busy machine's."""
    return Court(tmp_path, make_config("serving.lost_after_s=20"))


def occupy(court):
    """A turn for the dedicated worker, which has room for one, and one that waits."""
    court.world.request("g0.0.t0")
    court.world.request("g0.1.t0")


def test_turns_of_ranks_that_are_killed_or_hang_move_on_with_their_tokens(strict):
    async def story(c):
        occupy(c)
        turn = c.world.hub.ledger._turns["g0.1.t0"]
        killed = c.join("works")
        await c.until(lambda: turn.received == 3, "tokens of the borrowed rank")
        assert c.workers() == ["borrowed-1", "rollout-0"] and c.changes[0][0] == "joined"
        assert c.world.hub.workers["borrowed-1"].kind == "cooperative"
        hangs = c.join("works")  # one at a time: MPICH gives up a connection that has to wait
        await c.until(lambda: len(c.changes) == 2, "the second")
        stays = c.join("works")
        await c.until(lambda: len(c.changes) == 3, "the third")
        killed.kill()
        hangs.send_signal(signal.SIGSTOP)
        await c.until(lambda: len(c.lost()) == 2, "both losses")
        of_killed, of_hanging = sorted(c.lost())
        assert re.search("borrowed-1: .*(serving.lost_after_s|connection)", of_killed)
        assert "1 turns go elsewhere" in of_killed
        assert re.search("borrowed-2: .*silent for", of_hanging)
        hangs.send_signal(signal.SIGCONT)
        await c.until(lambda: hangs.poll() is not None, "its end")
        await c.until(lambda: turn.received == 6, "tokens of the rank that stays")
        assert stays.poll() is None and c.workers() == ["borrowed-3", "rollout-0"]

    strict.run(story)


def test_a_turn_that_a_rank_gives_back_goes_on_elsewhere_and_the_rank_stays(court):
    async def story(c):
        occupy(c)
        c.join("gives back")
        await c.until(lambda: c.world.hub.counts.returned, "the return")
        lent = c.world.scheduler.cluster.workers["borrowed-1"]
        await c.until(lambda: lent.revoked, "the word on its capacity")
        assert c.workers() == ["borrowed-1", "rollout-0"] and c.world.faults == []
        assert lent.expected_s == 2.0
        c.world.taken(p.GenerateTurn)
        c.world.finish([4])
        [(rank, again)] = c.world.taken(p.GenerateTurn)
        assert rank == RANK["rollout-0"] and tokens(again) == [1, 2, 3, 5, 5, 5, 6]

    court.run(story)


@pytest.mark.parametrize(
    "behaviour, words",
    [
        ("wrong token over MPI", "token is not the run's"),
        ("garbage over MPI", "invalid message"),
        ("garbage after hello", "invalid message"),
        ("old version over MPI", "protocol version 1"),
        ("speaks for another", "in the name of rollout-0"),
        ("tells the run to fail", "sent RankFailed"),
        ("impossible engine", "0 KV tokens"),
        ("impossible capacity", "-5 KV tokens"),
        ("wrong tokens", "1000 tokens, where 1 to 10"),
        ("says nothing", "sent no valid message|may not send"),
    ],
)
def test_what_is_wrong_is_logged_told_and_concerns_that_rank_alone(court, behaviour, words):
    async def story(c):
        occupy(c)
        joiner = c.join(behaviour)
        await c.until(c.lost, "the refusal")
        assert re.search(words, c.lost()[0])
        await c.until(lambda: joiner.poll() is not None, "its end")
        assert "disconnected: " in joiner.communicate()[0]
        assert c.workers() == ["rollout-0"] and c.world.actions == []
        assert c.world.hub.ledger._turns["g0.1.t0"].received == 0
        c.world.finish([4])
        assert c.world.taken(p.TurnResult)[0][0] == HOST

    court.run(story)


@pytest.mark.parametrize("behaviour", ["dies after announcing", "dies before connecting"])
def test_one_that_dies_on_the_way_in_holds_nobody_up(court, behaviour):
    async def story(c):
        c.join(behaviour)
        good = c.join("works")
        longest, seen = 0.0, time.monotonic()
        while "joined" not in [what for what, _ in c.changes]:
            await asyncio.sleep(0.01)
            longest, seen = max(longest, time.monotonic() - seen), time.monotonic()
            assert good.poll() is None
        assert longest < porter.ACCEPT_S  # the event loop did not wait for the dead one

    court.run(story)


def test_the_folder_is_private_and_asks_with_a_wrong_token_an_old_version_or_garbage_are_refused(
    court,
):
    async def story(c):
        folder, first = join.folder(c.run_dir), join.endpoint(c.run_dir)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        ask = join.Ask(protocol=p.PROTOCOL_VERSION, token="f" * 64, host="h", pid=1)
        (folder / "one.asks").write_bytes(msgspec.json.encode(ask))
        (folder / "two.asks").write_bytes(b'{"protocol": 1}')
        (folder / "three.asks").write_bytes(b"\x00\xff garbage")
        await c.until(lambda: len(list(folder.glob("*.answer"))) == 3, "answers")
        reasons = {"one": "token", "two": "protocol version 1", "three": "no request"}
        for name, words in reasons.items():
            data = (folder / f"{name}.answer").read_bytes()
            answer = msgspec.json.decode(data, type=join.Answer)
            assert words in answer.reason and not (answer.worker or answer.port)
        assert len(c.world.faults) == 3
        await c.until(lambda: join.endpoint(c.run_dir) != first, "a sign of life")

    court.run(story)


def test_garbage_on_every_port_that_is_open_stops_nobody(court):
    async def story(c):
        joiner = c.join("works")
        await c.until(lambda: c.changes, "the join")
        ports = {address for each in c.started() for address in processes.listens(each)}
        assert ports
        for address in ports:
            # some close when the one that they were for has come, or at the first wrong byte
            with contextlib.suppress(ConnectionError), socket.create_connection(address, 60) as end:
                end.sendall(os.urandom(4096))
        [rank] = c.borrowed._ranks.values()
        heard = {rank.guest.last_seen}
        while len(heard) <= BEATS:
            await c.until(lambda: rank.guest.last_seen not in heard, "beat of the rank")
            heard.add(rank.guest.last_seen)
        assert c.world.faults == [] and joiner.poll() is None
        assert c.workers() == ["borrowed-1", "rollout-0"]

    court.run(story)


def test_a_porter_that_cannot_start_is_a_refusal_for_now(court, monkeypatch):
    async def story(c):
        with monkeypatch.context() as during:
            during.setattr(guest.asyncio, "create_subprocess_exec", no_process)
            application = join.Application(c.run_dir)
            with pytest.raises(join.JoinError, match="temporarily unavailable") as raised:
                await asyncio.to_thread(application.ask, DEADLINE_S)
            await c.until(c.lost, "the loss")
        assert raised.value.temporary and "temporarily unavailable" in c.lost()[0]
        c.join("works")
        await c.until(lambda: c.changes, "the next")

    async def no_process(*_, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    court.run(story)


def test_a_long_path_of_tmpdir_keeps_nobody_out(court, tmp_path, monkeypatch):
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr(guest.tempfile, "tempdir", str(long))

    async def story(c):
        c.join("works")
        await c.until(lambda: c.changes, "the rank")

    court.run(story)


def test_no_more_ranks_come_than_allowed_and_one_that_asks_no_longer_leaves_its_place_to_another(
    tmp_path, make_config, monkeypatch
):
    monkeypatch.setattr(borrowed, "ASKS_S", 0.1)

    async def story(c):
        application = join.Application(c.run_dir)
        answer = await asyncio.to_thread(application.ask, DEADLINE_S)
        assert answer.worker == "borrowed-1"
        second = c.join("works")
        await c.until(lambda: second.poll() is not None, "the refusal")
        assert "serving.max_ranks" in second.communicate()[0]
        application.withdraw()
        await c.until(c.lost, "the loss")
        assert c.lost() == ["borrowed-1: before it had joined: it withdrew its request"]
        c.join("works")
        await c.until(lambda: c.workers() == ["borrowed-2", "rollout-0"], "the other")

    Court(tmp_path, make_config("serving.max_ranks=1")).run(story)
