"""A pool with its real worker processes: scores come once, whatever happens to the workers."""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from rose import config as configuration
from rose.comm import frames
from rose.comm.tasks import Tasks
from rose.launch import local
from rose.parts.rewards import messages, worker
from rose.parts.rewards import pool as pools
from rose.parts.rewards.anchors import Anchors
from rose.parts.rewards.pool import Answer, Pool
from rose.parts.rewards.reward_rank import start_worker
from rose.reward.episode import Said, ScoringFailed
from tests import processes
from tests.conftest import compose_tree
from tests.made import episode

DEADLINE_S = 300.0
FUNCTIONS = """
import os, signal, time
from pathlib import Path

def score(episode):
    folder, name, kind = Path(episode.task["folder"]), episode.trajectory, episode.response
    with (folder / f"{name}.begun").open("a") as file:
        file.write(f"{os.getpid()} ")
    first = len((folder / f"{name}.begun").read_text().split()) == 1
    if kind == "dies" or kind == "dies once" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raises":
        raise ValueError("cannot say")
    gates = {"hangs": "never", "waits": "go", "holds": name}
    while kind in gates and not (folder / gates[kind]).exists():
        time.sleep(0.02)
    return float(os.getpid()), True
"""


class World:
    """A run's folder with its configuration, and pools of it."""

    def __init__(self, folder: Path, *settings: str):
        self.folder = folder
        (folder / "mine.py").write_text(FUNCTIONS)
        own = ("reward=function", f"reward.args.path={folder / 'mine.py'}:score")
        tree = compose_tree(*([] if "reward=command" in settings else own), *settings)
        self.config = configuration.from_dict(tree)
        local.write_config(self.config, folder)
        self.home = messages.folder(folder, 0)

    @contextlib.asynccontextmanager
    async def pool(self, start=None, hosts=()):
        """An open pool; `start` instead of processes."""
        tasks = Tasks()
        start = start or functools.partial(start_worker, self.folder, self.home)
        made = Pool(self.config.reward, self.home, start, tasks.spawn, hosts)
        try:
            await made.open()
            yield made
        finally:
            await made.close()
            await tasks.close(5.0)

    def score(self, pool, name: str, kind: str = "fine", prompt: str = "p"):
        said = [Said(False, "q"), Said(True, kind)]
        ended = episode(trajectory=name, task={"folder": str(self.folder)}, transcript=said)
        return asyncio.create_task(pool.score(name, prompt, msgspec.json.encode(ended)))

    def tries(self, name: str) -> list[int]:
        path = self.folder / f"{name}.begun"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def known(self) -> messages.PoolFile:
        return msgspec.json.decode((self.home / "pool.json").read_bytes(), type=messages.PoolFile)


@pytest.fixture
def world(tmp_path):
    return functools.partial(World, tmp_path)


async def until(ready) -> None:
    while not ready():
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_workers_come_by_demand_within_the_bounds_and_leave(world):
    w = world("reward.max_workers=2", "reward.idle_s=0.5")
    async with w.pool() as pool:
        assert pool.workers == 0
        waiting = [w.score(pool, f"t{i}", "waits") for i in range(5)]
        await until(lambda: w.tries("t0") and w.tries("t1"))
        assert pool.workers == 2 and pool.waiting == 3
        (w.folder / "go").touch()
        found = await asyncio.gather(*waiting)
        assert len({each.score.reward for each in found}) == 2  # processes
        assert max(each.queue_s for each in found) > 0
        await until(lambda: pool.workers == 0)
        await w.score(pool, "later")


@pytest.mark.slow
async def test_a_worker_computes_as_many_plain_scores_at_once_as_it_is_given(world):
    w, names = world("reward.max_workers=1", "reward.per_worker=40"), range(40)
    async with w.pool() as pool:
        scores = [w.score(pool, f"t{name}", "waits") for name in names]
        await until(lambda: all(w.tries(f"t{name}") for name in names))
        (w.folder / "go").touch()
        await asyncio.gather(*scores)


@pytest.mark.slow
async def test_an_episode_that_was_played_otherwise_again_has_a_score_of_its_own(world):
    w = world("reward.max_workers=1", "reward.per_worker=2")
    async with w.pool() as pool:
        first = w.score(pool, "a", "waits")
        await until(lambda: w.tries("a"))
        again = w.score(pool, "a", "holds")  # its host died meanwhile
        await until(lambda: len(w.tries("a")) == 2)
        with pytest.raises(asyncio.CancelledError):
            await first
        (w.folder / "go").touch()  # the first one's answer, which is for nobody
        await w.score(pool, "b")
        assert not again.done()
        (w.folder / "a").touch()
        await again


@pytest.mark.slow
async def test_an_answer_is_scored_once_and_survives_its_worker(world):
    w = world("reward.max_workers=2", "reward.timeout_s=250")
    async with w.pool() as pool:
        same = [w.score(pool, "a", "waits") for _ in range(3)]
        await until(lambda: w.tries("a"))
        dies = w.score(pool, "b", "dies once")
        await until(lambda: len(w.tries("b")) == 2)
        os.kill(w.tries("a")[0], signal.SIGKILL)
        (w.folder / "go").touch()
        found = await asyncio.gather(*same)
        assert len({id(each) for each in found}) == 1 and len(w.tries("a")) == 2
        assert (await dies).score.reward == w.tries("b")[1] != w.tries("b")[0]
        assert (pool.retries, pool.failures) == (2, 0)


@pytest.mark.slow
async def test_what_two_workers_cannot_score_has_failed_and_the_others_go_on(world):
    w = world("reward.max_workers=2", "reward.timeout_s=2", "reward.deadline_s=60")
    async with w.pool() as pool:
        bad = {kind: w.score(pool, kind, kind) for kind in ("dies", "raises", "hangs")}
        good = [w.score(pool, f"good{i}") for i in range(4)]
        await asyncio.gather(*good)
        said = {"dies": "worker .* is gone", "raises": "ValueError: cannot say"}
        said["hangs"] = "gave no score within its limit of 2 s"
        for kind, words in said.items():
            with pytest.raises(ScoringFailed, match=words):
                await bad[kind]
            assert len(w.tries(kind)) == 2
        assert pool.failures == 3


@pytest.mark.slow
async def test_one_worker_at_most_tries_twice_by_itself_and_a_cancelled_answer_is_forgotten(world):
    w = world("reward.max_workers=1")
    async with w.pool() as pool:
        with pytest.raises(ScoringFailed):
            await w.score(pool, "a", "raises")
        running, waiting = w.score(pool, "b", "waits"), w.score(pool, "c")
        await until(lambda: w.tries("b"))
        pool.cancel("c")
        pool.cancel("b")
        (w.folder / "go").touch()
        for task in (running, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task
        await w.score(pool, "d")
        assert not w.tries("c")


JOB = """
import sys
from pathlib import Path
from rose.parts.rewards.job import Help
print(Help(Path(sys.argv[1]), 0)())
"""


@pytest.mark.slow
async def test_workers_of_jobs_join_and_what_they_held_when_killed_is_scored_elsewhere(world):
    """A job is ended, another's rank killed. Neither is a try of the answer, which has two."""
    own = ("reward.max_workers=1", "reward.max_jobs=2", "reward.timeout_s=250")
    # no rank may be idle for too long before the pool has missed the killed one
    w = world("cluster=dev", "reward.idle_s=1000", *own)
    async with w.pool() as pool:

        async def job():
            return await asyncio.create_subprocess_exec(sys.executable, "-c", JOB, str(w.folder))

        busy = w.score(pool, "own", "holds")
        await until(lambda: w.tries("own"))
        held = w.score(pool, "held", "holds")
        await until(lambda: pool.unmet()[0] == 1)
        first = await job()
        await until(lambda: w.tries("held"))
        assert (pool.joined, pool.workers, pool.unmet()[0]) == (1, 1, 0)
        first.terminate()
        assert await first.wait() == 0
        await until(lambda: pool.unmet()[0] == 1 and not pool.joined)
        second = await job()
        await until(lambda: len(w.tries("held")) == 2)
        os.kill(w.tries("held")[1], signal.SIGKILL)
        await until(lambda: len(w.tries("held")) == 3)
        (w.folder / "held").touch()
        assert (await held).joined
        pool._settings = msgspec.structs.replace(pool._settings, idle_s=0.5)
        assert await second.wait() == 0  # idle for reward.idle_s
        (w.folder / "own").touch()
        assert not (await busy).joined
        assert pool.retries >= 2 and not pool.failures and len(w.tries("own")) == 1


# A worker that reports the end of a score's time also if the machine needs long to kill a program.
PATIENT = f"from rose.parts.rewards import worker; worker.MARGIN_S = {DEADLINE_S}; worker.main()"
LOOP = "import time, pathlib\nwhile True: time.sleep(0.05)  # rose-reward-test-{}"


@pytest.mark.slow
async def test_a_program_that_takes_too_long_scores_zero_and_ends_with_its_worker(
    world, tmp_path, monkeypatch
):
    def programs():
        return {each.pid for each in processes.bearing(mark)}

    def start(number, pool):
        given = ["--run", w.folder, "--pool", pool, "--number", str(number)]
        return subprocess.Popen([sys.executable, "-c", PATIENT, *given])

    monkeypatch.setattr(pools, "GRACE_S", 2 * DEADLINE_S)
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    own = ("reward.max_workers=1", "reward.timeout_s=1")
    w = world("reward=command", f"reward.args.argv=[python,answer.py,{mark}]", *own)
    async with w.pool(start) as pool:
        found = await w.score(pool, "a", LOOP)
        assert found.score == pools.Score(reward=0.0, success=False, timed_out=True)
        assert (pool.timeouts, pool.retries) == (1, 0)
        await until(
            lambda: not programs()
        )  # the program was killed with the first in its namespaces
    patient = msgspec.structs.replace(w.config.reward, timeout_s=100.0)
    w.config = msgspec.structs.replace(w.config, reward=patient)
    configuration.save(w.config, w.folder / "config.json")
    async with w.pool() as pool:
        asked = w.score(pool, "b", LOOP)
        await until(lambda: programs())
        (worker,) = [process.process for process in pool._workers.values()]
        before = programs()
        worker.kill()
        await until(lambda: not before & programs())
        await until(lambda: programs())  # the second try
        pool.cancel("b")
        with pytest.raises(asyncio.CancelledError):
            await asked
    await until(lambda: not programs())


@pytest.mark.slow
async def test_workers_that_cannot_start_fail_what_waits(world):
    w = world("reward.min_workers=0", "reward.max_workers=1")
    async with w.pool() as pool:
        (w.folder / "mine.py").write_text(FUNCTIONS + "# changed")  # after the run began
        with pytest.raises(ScoringFailed, match="3 reward workers in a row ended"):
            await w.score(pool, "a")
    said = (w.home / "worker-0.log").read_text()
    assert "has changed since this attempt of the run began" in said


async def test_a_stranger_on_the_socket_gets_no_work(world):
    w = world("reward.max_workers=1")
    async with w.pool() as pool:
        file = w.home / "pool.json"
        assert file.stat().st_mode & 0o777 == 0o600
        guess = msgspec.structs.replace(w.known(), token="guess")
        (w.folder / "guess").write_bytes(msgspec.json.encode(guess))
        assert await worker.connect(w.folder / "guess", None) is None and not pool.joined
        _, writer = await worker.connect(file, None)
        assert pool.joined == 1
        writer.close()


async def test_a_worker_shows_its_token_to_no_other_process(tmp_path):
    """Another service may listen at an address of the pool's host."""
    seen = []

    async def stranger(reader, writer):
        writer.write(frames.frame(b"n" * messages.NONCE_BYTES))
        seen.append(await frames.read(reader, messages.HELLO_BYTES))
        writer.write(frames.frame(b"p" * 32))

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    known = messages.PoolFile(socket.gethostname(), [address], "the token")
    (tmp_path / "pool.json").write_bytes(msgspec.json.encode(known))
    assert await worker.connect(tmp_path / "pool.json", None) is None
    server.close()
    assert len(seen) == 1 and b"the token" not in seen[0]


async def test_a_pool_listens_at_the_addresses_that_it_is_given(world):
    w = world("reward.max_workers=1")
    async with w.pool(hosts=["127.0.0.2"]) as pool:
        file, known = w.home / "pool.json", w.known()
        assert [address for address, _ in known.addresses] == ["127.0.0.1", "127.0.0.2"]
        far = msgspec.structs.replace(known, addresses=known.addresses[1:])
        file.write_bytes(msgspec.json.encode(far))
        reader, writer = await worker.connect(file, None)
        await pool.close()
        assert await frames.read(reader, messages.FRAME_BYTES) == messages.STOP
        writer.close()


class Puppet:
    """A worker in this process, which says what a test wants; the pool sees no difference."""

    def __init__(self, number, file):
        self.task = asyncio.ensure_future(self.connect(number, file))

    async def connect(self, number, file):
        self.reader, self.writer = await worker.connect(file, number)

    def say(self, message):
        self.writer.write(frames.frame(msgspec.msgpack.encode(message)))

    async def work(self):
        await self.task
        data = await frames.read(self.reader, pools.FRAME_BYTES)
        return msgspec.msgpack.decode(data, type=pools.Work)

    def poll(self):
        return None

    def kill(self):
        self.task.cancel()


async def test_limits_follow_the_slowest_right_answer_of_the_prompt(world):
    w = world("reward.max_workers=1", "reward.adaptive=true", "reward.timeout_s=30")
    puppets, numbers = [], itertools.count()

    async def one(pool, prompt, success, seconds):
        asked = w.score(pool, f"t{next(numbers)}", prompt=prompt)
        await until(lambda: puppets)
        work = await puppets[0].work()
        score = pools.Score(reward=float(success), success=success)
        puppets[0].say(Answer(work.number, score, "", seconds))
        await asked
        return work.limit_s

    async with w.pool(lambda *given: puppets.append(Puppet(*given)) or puppets[-1]) as pool:
        for prompt, success, seconds, limit_s in (
            *(("p", False, 20.0, 30.0), ("p", True, 4.0, 30.0), ("p", True, 3.0, 6.0)),
            *(("q", True, 0.1, 30.0), ("q", True, 0.1, 2.0)),
            *(("p", True, 29.0, 6.0), ("p", True, 1.0, 30.0)),
        ):
            assert await one(pool, prompt, success, seconds) == limit_s
    kept = Anchors(w.home / "anchors.json", 30.0, adaptive=True)
    assert kept.limit_s("q") == 2.0 and kept.limit_s("p") == 30.0 and kept.limit_s("new") == 30.0
    assert json.loads((w.home / "anchors.json").read_text()) == {"p": 29.0, "q": 0.1}


@pytest.mark.parametrize("text", ["", '{"p": 2', "[1]", '{"p": null}', '{"p": "x"}'])
def test_without_the_times_of_a_damaged_file_limits_are_learned_again(tmp_path, capsys, text):
    (tmp_path / "anchors.json").write_text(text)
    kept = Anchors(tmp_path / "anchors.json", 30.0, adaptive=True)
    assert kept.limit_s("p") == 30.0 and "anchors.json can't be read" in capsys.readouterr().out
    kept.correct("p", 4.0)
    kept.save()
    assert json.loads((tmp_path / "anchors.json").read_text()) == {"p": 4.0}


async def test_a_worker_that_does_not_answer_in_time_is_killed_and_its_work_goes_on(
    world, monkeypatch
):
    monkeypatch.setattr(pools, "GRACE_S", 0.0)
    w = world("reward.max_workers=2", "reward.timeout_s=0.3", "reward.deadline_s=60")
    puppets = []

    def start(*given):
        if puppets:
            monkeypatch.setattr(pools, "GRACE_S", DEADLINE_S)  # The second one answers.
        puppets.append(Puppet(*given))
        return puppets[-1]

    async with w.pool(start) as pool:
        began = time.monotonic()
        asked = w.score(pool, "a")
        await until(lambda: puppets)
        await puppets[0].work()  # This one says nothing more.
        await until(lambda: len(puppets) == 2)
        work = await puppets[1].work()
        puppets[1].say(Answer(work.number, pools.Score(reward=1.0), "", 0.1))
        assert (await asked).score.reward == 1.0
        assert time.monotonic() - began > 0.3
