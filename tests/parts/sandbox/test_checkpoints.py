"""Faults of one sandbox or host cost no other anything: real sandboxes and stores."""

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from rose.parts.sandbox import Limits, checkpointer, engine
from rose.parts.sandbox.checkpointer import Checkpointer
from rose.parts.sandbox.engine import Engine
from rose.parts.sandbox.inspector import FILES
from rose.parts.sandbox.packs import StoreDamaged
from rose.parts.sandbox.store import Store

sys.path.insert(0, str(Path(__file__).parent))
import boxes
from raw_captures import Upper, check_loaded, sparse

LONG_S = 60.0
pytestmark = pytest.mark.usefixtures("loop")


@pytest.fixture
def host(loop, tmp_path):
    """An engine of a run whose shared store is `tmp_path/shared`; `said`: its words."""
    said = []
    made = Engine(tmp_path / "shared", tmp_path / "node", say=said.append)
    made.said = said
    loop.run(made.open())
    yield made
    loop.run(made.close())


@contextlib.asynccontextmanager
async def opened(shared, node, **more):
    """An engine of a run that resumes whatever there is."""
    host = await Engine(shared, node, **{"wanted": lambda name: True} | more).open()
    yield host
    await host.close()


async def died(shared, node, seed, life=0):
    """The local store of a host that has died with turn 1 of "t" only packed."""
    host = await Engine(shared, node).open()
    host.store.save("t", 1, raw(host, seed)[0], life=life)
    await host._packer.close()
    host._lock.close()
    return host.local


def raw(host, seed, size=1000):
    """A raw capture of one file, as `submit` takes it."""
    return sparse(host.place(), size, {0: random.Random(seed).randbytes(size)}), size


async def settled(future):
    return await asyncio.wait_for(asyncio.shield(future), LONG_S)


async def test_orders_that_take_too_long_are_no_deaths_of_the_packer(host, monkeypatch):
    for turn in range(engine.DEATHS + 2):
        os.kill((await host._running_packer())._process.pid, signal.SIGSTOP)
        with monkeypatch.context() as short:
            short.setattr(engine, "JOB_S", 0.05)
            slow = host.submit("slow", turn, *raw(host, turn))
            for _ in range(3):  # the order is on its way, with that deadline
                await asyncio.sleep(0)
        other = host.submit(f"other-{turn}", 0, *raw(host, turn))
        assert "not done within 0.05 s" in await settled(slow.packed)
        assert await settled(other.stored) == ""
    assert host.stopped == "" and host.counters.failed == engine.DEATHS + 2


async def test_a_packer_that_dies_too_often_stops_checkpoints(host):
    while not host.stopped:
        packer = await host._running_packer()
        os.kill(packer._process.pid, signal.SIGKILL)
        last = host.submit("t", 0, *raw(host, 0))
        await settled(last.stored)
    assert f"their packer died {engine.DEATHS + 1} times: exit code -9" in host.stopped


async def test_a_turn_stays_while_one_that_refers_to_it_is_on_its_way(host, tmp_path):
    upper = Upper(tmp_path / "upper", 3)
    upper.change()
    folder = host.place()
    upper.capture(folder, process=False)
    first = host.submit("parent", 1, folder, 1000)
    assert await settled(first.stored) == ""
    for i in range(engine.AT_ONCE["save"]):  # These are saved before it.
        host.submit(f"large-{i}", 1, *raw(host, i, 8 << 20))
    folder = host.place()
    made = upper.capture(folder, process=False)  # This leaves out what is unchanged.
    fork = host.submit("fork", 1, folder, 1000, ("parent", 1))
    host.forget("parent")
    assert await settled(fork.stored) == ""
    check_loaded(Store(tmp_path / "shared").load("fork", 1, tmp_path / "back"), made)
    await asyncio.wait_for(host._tidying, LONG_S)
    assert "parent" not in Store(tmp_path / "shared").names()


async def test_a_host_leaves_alone_what_one_of_another_run_left(tmp_path):
    one, other, node, said = tmp_path / "one", tmp_path / "other", tmp_path / "node", []
    left, old = await died(one, node, 1), await died(tmp_path / "third", node, 1)
    for path in (old, *old.rglob("*")):
        os.utime(path, (0, 0))
    async with opened(other, node, say=said.append):
        pass
    assert left.exists() and not old.exists() and Store(other).names() == []
    async with opened(one, node):
        pass
    assert not left.exists() and Store(one).turns("t") == [1] and said == []


KILLED = """
import asyncio, json, sys
from pathlib import Path
from rose.parts.sandbox.engine import Engine
async def go(folder, *names):
    host = await Engine(folder / "shared", folder / "node").open()
    for name in names:
        raw = host.place()
        raw.mkdir()
        (raw / "listing.json").write_text("[]")
        assert await host.submit(name, 1, raw, 1000).stored == ""
    print("stored", flush=True)
    await asyncio.sleep(3600)
asyncio.run(go(Path(sys.argv[1]), *sys.argv[2:]))
"""


async def test_what_a_killed_run_left_is_swept_unless_a_trajectory_wants_it(tmp_path):
    """Those whose snapshots are there may be resumed, or run on another host."""
    argv = [sys.executable, "-c", KILLED, str(tmp_path), "g0.0", "g0.1", "g0.2"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout.readline() == "stored\n"
        killed.kill()
    snapshots = tmp_path / "snapshots"
    (snapshots / "g0.1").mkdir(parents=True)

    def wanted(name):
        found = (snapshots / name).exists()
        if name == "g0.2":  # which begins on another host while this one sweeps
            (snapshots / name).mkdir(exist_ok=True)
        return found

    said = []
    host = await Engine(tmp_path / "shared", tmp_path / "node", wanted=wanted).open()
    host.say = said.append
    shared = Store(tmp_path / "shared")
    assert shared.names() == ["g0.0", "g0.1", "g0.2"]
    await asyncio.wait_for(host.sweep(), LONG_S)
    assert shared.names() == ["g0.1", "g0.2"] and said == []
    assert (host.store.load("g0.1", 1, tmp_path / "back") / "listing.json").is_file()
    await host.close()
    assert shared.names() == ["g0.1", "g0.2"], "an orderly end leaves them, too"


@pytest.mark.parametrize("full", ["shared", "node"])
async def test_a_disk_that_fills_up_is_named_once_and_ends_checkpoints(tmp_path, small_disk, full):
    said, places = (
        [],
        [small_disk if name == full else tmp_path / name for name in ("shared", "node")],
    )
    async with opened(*places, say=said.append) as host, await boxes.start(Limits()) as box:
        keeper = Checkpointer(box, host, "t")
        await keeper.begin()
        for number in range(1, 4):
            await turn(keeper, number, "head -c 700000 /dev/urandom > $RANDOM")
            await keeper.settled(number)
        assert (await box.run("ls | wc -l", LONG_S)).output == "3\n", "it goes on"
        assert len(said) == 1 and said[0] == host.stopped
        assert said[0].startswith(f"checkpoints of sandboxes stop here: {small_disk}: ")
        assert said[0].endswith("free some space there; the run goes on without")


async def test_what_dead_hosts_left_keeps_no_host_from_its_work(tmp_path, monkeypatch):
    said, full = [], Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(engine.left, "take_over", full)
    async with opened(tmp_path / "shared", tmp_path / "node", say=said.append) as host:
        assert "captures of dead hosts can't be taken over: [Errno 28]" in said[0]
        assert await settled(host.submit("t", 1, *raw(host, 1)).stored) == ""


async def test_a_turn_of_an_earlier_episode_of_this_name_is_not_taken_for_a_later_ones(tmp_path):
    """The later life's first turn is packed on this node by a host that died, not stored yet."""
    shared, node = tmp_path / "shared", tmp_path / "node"
    async with opened(shared, tmp_path / "elsewhere") as first:
        assert await settled(first.submit("t", 1, *raw(first, 1), life=1).stored) == ""
    await died(shared, node, 2, life=2)
    async with opened(shared, tmp_path / "node2") as host:
        await host.packed("t", 1, 2)
        assert not host.store.has("t", 1, 2)
        with pytest.raises(StoreDamaged, match="turn 1 of t is that of another episode"):
            host.store.load("t", 1, tmp_path / "into", life=2)
    async with opened(shared, node) as host:
        assert host.store.has("t", 1, 2)  # The new engine has what the dead one had.
    old = Store(tmp_path / "old")
    old.save("t", 1, Store(shared).load("t", 1, tmp_path / "again"), life=1)
    assert old.copy("t", 1, Store(shared), lambda n: None) is None
    assert Store(shared).has("t", 1, 2)


async def test_a_clock_that_stepped_back_costs_no_checkpoint(host):
    """An earlier episode of the name was stored when the clock was ahead."""
    assert await settled(host.submit("t", 1, *raw(host, 1), life=2**62).stored) == ""
    late = host.submit("t", 1, *raw(host, 2), life=5)
    assert "a later episode of this name is stored" in await settled(late.stored)
    async with await boxes.start() as box:
        kept = Checkpointer(box, host, "t", FILES)
        await kept.begin()
        await turn(kept, 1, "echo new > file")
        assert await kept.settled(1)
        back = await checkpointer.restore(kept.saved(1), host, "namespaces", exact=True)
        async with back.box:
            assert (await back.box.run("cat file", LONG_S)).output == "new\n"


@contextlib.asynccontextmanager
async def sandboxes(host, count=1):
    """Checkpointers, "t0" and so on, of fresh sandboxes."""
    async with contextlib.AsyncExitStack() as stack:
        kept = []
        for i in range(count):
            box = await stack.enter_async_context(await boxes.start())
            kept.append(Checkpointer(box, host, f"t{i}"))
            await kept[-1].begin()
        yield kept


async def turn(kept, number, command):
    result = await kept.box.run(command, LONG_S)
    assert result.code == 0, result
    await kept.after_turn(number)


def content(host, name, number, path):
    """What turn `number` of `name` in the shared store has at `path`, or at what is the same."""
    with tempfile.TemporaryDirectory() as into:
        folder = host.store.behind.load(name, number, Path(into) / "back")
        entries = {e["path"]: e for e in json.loads((folder / "listing.json").read_text())}
        return (folder / entries[entries[path].get("same", path)]["data"]).read_text()


async def test_a_write_through_memory_to_a_file_of_two_names_is_kept(host):
    """Its content is listed at the first name, it is written to at the second one."""
    program = "import mmap\nwith open('second', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:\n"
    program += "    m[:1] = bytes([m[0] + 1])\n"
    async with sandboxes(host) as (kept,):
        await kept.box.write_file("/tmp/in_place.py", program.encode())
        await turn(kept, 1, "echo x > first; ln first second; sleep .1")  # past TICK_NS
        await turn(kept, 2, "python3 /tmp/in_place.py; sleep .1")
        await turn(kept, 3, "python3 /tmp/in_place.py")
        assert await kept.settled(3)
        found = [content(host, "t0", number, "app/first") for number in (1, 2, 3)]
        assert found == ["x\n", "y\n", "z\n"]


async def test_a_turn_that_was_not_stored_is_made_up_for_though_nothing_changes(host, tmp_path):
    packs, away = tmp_path / "shared/packs", tmp_path / "away"
    async with sandboxes(host) as (kept,):
        await turn(kept, 1, "echo x > f")
        assert await kept.settled(1)
        packs.rename(away)
        packs.write_text("in the way")
        await turn(kept, 2, "echo y > f")
        assert not await kept.settled(2) and "Not a directory" in host.said[-1]
        packs.unlink()
        away.rename(packs)
        await turn(kept, 3, "true")
        assert await kept.settled(3)
        assert content(host, "t0", 3, "app/f") == "y\n"


async def test_a_capture_that_is_too_large_costs_its_own_sandbox_only(host, monkeypatch):
    strewn = "import os\nfor i in range(64): os.pwrite(1, b'x', i << 16)"
    monkeypatch.setattr(checkpointer, "MOST_BYTES", 2 << 20)
    async with sandboxes(host, 2) as (large, other):
        await turn(large, 1, "truncate -s 100G f")  # a hole costs nothing
        assert await large.settled(1)
        for number in (2, 3):
            await turn(large, number, f'python3 -c "{strewn}" > f')
            await turn(other, number, f"echo {number} > f")
        assert not await large.settled(3) and await other.settled(3)
        (words,) = host.said
        assert words.startswith("sandbox t0: no checkpoints from turn 2 on: 3 MiB of files")
        assert words.endswith("to read, of 2 at most")
        assert large.stats["skipped"] == 2 and other.stats["skipped"] == 0
        await turn(large, 4, "echo small > f")
        assert await large.settled(4)
        assert content(host, "t0", 4, "app/f") == "small\n"


async def test_the_listing_of_the_capture_before_is_written_beside_the_event_loop(host, tmp_path):
    class Watched(list):
        def __iter__(self):
            threads.add(threading.current_thread())
            return super().__iter__()

    threads = set()
    async with sandboxes(host) as (kept,):
        await kept.box.run("echo x > f", LONG_S)
        before = await kept.box.capture(FILES, tmp_path / "one")
        await kept.box.capture(FILES, tmp_path / "two", Watched(before.listing))
        assert threads and threading.main_thread() not in threads
