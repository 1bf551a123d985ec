"""Programs that end well, crash, hang, flood or leave processes behind: what becomes of the
trajectory, and that nothing of them stays."""

import asyncio
import json
import os
import random
import sys
import tempfile
import textwrap

import numpy as np
import psutil
import pytest

from rose.agent.guard import EnvironmentFailure, ScoringFailure
from rose.agent.scoring import Scoring
from rose.parts.adapters.envs.agent import Agent
from rose.parts.adapters.gateway import program
from rose.parts.adapters.gateway.forks import Forks
from rose.parts.adapters.gateway.program import environment
from rose.processes import adopt_orphans
from rose.protocol import TrajectoryScored
from tests import processes
from tests.agent.scripted import Script

from .conftest import START, open_gateway, played

pytestmark = pytest.mark.slow
ASK = """
import json, os, shutil, socket, time, urllib.request
BASE, PLACE = os.environ["OPENAI_BASE_URL"], os.environ["ROSE_REWARD"]
KEY = "Bearer " + os.environ.get("OPENAI_API_KEY", "none, as of a judge")
def call(path, body=None):
    headers = {"Authorization": KEY, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(BASE + path, body, headers)) as got:
        return json.load(got)
def ask(*messages):
    body = {"model": "m", "messages": [{"role": "user", "content": m} for m in messages]}
    answer = call("/chat/completions", json.dumps(body).encode())
    return answer["choices"][0]["message"]["content"]
def write(text): open(PLACE, "w").write(text)
def reward(value): write(json.dumps(value))
"""


@pytest.fixture
def run(chats, tokenizer, tmp_path, make_config):
    """run(source, **limits) -> the trajectory of a program with this source, or of a `function` in
    it; `judge`: the source's own function of that name gives the reward."""

    async def played_to_its_end(agent, scorer, changed):
        adopt_orphans()
        scoring = None
        if scorer is not None:  # a reward rank that answers at once
            settings = make_config("reward=function", "reward.args.path=judge.py:f").reward
            scoring = Scoring(settings, [3], lambda rank, m: scoring.handle(scorer(m)))
        given = (chats["tiny"], Script(tokenizer, "one", "two"))
        async with open_gateway() as gateway:
            return await played(gateway, agent, *given, scoring=scoring, **changed)

    def go(source, function=None, judge=False, scorer=None, **changed):
        path = tmp_path / "agent.py"
        path.write_text(ASK + textwrap.dedent(source))
        command = {"command": [sys.executable, str(path)]}
        what = {"function": f"{path}:{function}"} if function else command
        agent = Agent(**what, reward=f"{path}:judge" if judge else None)
        return asyncio.run(played_to_its_end(agent, scorer, changed))

    return go


def test_a_program_calls_and_leaves_its_reward_in_a_file(run, monkeypatch):
    """The agent's program finds nothing of the run's environment."""
    for name in ("HF_TOKEN", "PMI_RANK", "MINE"):
        monkeypatch.setenv(name, "3")
    got = run("""
        assert not {"HF_TOKEN", "PMI_RANK", "MINE"} & os.environ.keys(), os.environ
        task = json.load(open(os.environ["ROSE_TASK"]))
        assert task == {"seed": 8, "phase": "train"} and os.environ["ROSE_SEED"] == "8"
        assert oct(os.stat(os.environ["ROSE_TASK"]).st_mode)[-3:] == "600"
        assert ask("a") == "one" and ask("b") == "two"
        reward({"reward": 0.25, "success": True})
    """)
    assert (got.reward, got.success, got.turns, len(got.branches)) == (0.25, True, 2, 1)
    assert got.response_tokens == sum(s.response_tokens for s in got.samples()) > 0
    assert (got.id, got.group, got.domain) == (START.id, START.group, START.domain)


def test_an_agent_whose_last_answer_was_cut_is_truncated_and_a_crash_after_it_is_one(run):
    source = """
        ask("a")
        reward(1.0)
    """
    assert not run(source).truncated
    cut = run(source, max_new_tokens=1)
    assert cut.truncated and cut.limit == "answer"
    with pytest.raises(EnvironmentFailure, match="ended with code 3"):
        run(f"{source}    raise SystemExit(3)", max_new_tokens=1)


def test_a_functions_reward_is_what_it_returns_and_its_random_numbers_are_its_seeds(run):
    source = f"""
        import random
        import numpy

        async def solve(task):
            assert os.getpid() != {os.getpid()}
            return len(ask("a")) + random.random() + float(numpy.random.rand())
    """
    expected = 3 + random.Random(START.env_seed).random()
    expected += float(np.random.RandomState(START.env_seed).rand())
    assert run(source, "solve").reward == expected


FOLDER = "import tempfile\nfolder = tempfile.TemporaryDirectory()\n"
IDLE = """
import os
from concurrent.futures import ThreadPoolExecutor
from folder_of_imports import folder

def solve(task):
    ThreadPoolExecutor(1).submit(os.getpid).result()
    assert os.path.isdir(folder.name)
"""


async def test_functions_are_forked_by_one_process_and_one_that_fails_at_once_ends_alone(tmp_path):
    """A function that ends leaves the folder that an import created, and needs no thread shutdown.
    The function that fails has no folder for its log: its trajectory was given up during the
    fork."""
    (tmp_path / "folder_of_imports.py").write_text(FOLDER)
    (tmp_path / "agent.py").write_text(IDLE)
    (tmp_path / "task.json").write_text("{}")
    forks, function = Forks(), f"{tmp_path}/agent.py:solve"
    variables = environment({"ROSE_TASK": str(tmp_path / "task.json"), "ROSE_SEED": "1"}, ())

    async def ran(name):
        started = await forks.start(name, function, (), (), variables, tmp_path / name)
        return await asyncio.wait_for(started.code, 60), started.last_words()

    try:
        ends = await asyncio.gather(ran("a"), ran("b"))
        ends.append(await ran("gone/log"))
        ends += await asyncio.gather(ran("c"), ran("d"))
        assert [code for code, _ in ends] == [0, 0, 1, 0, 0], ends
        servers = [processes.words(each) for each in processes.children()]
        assert sum("rose.parts.adapters.gateway.call" in words for words in servers) == 1
    finally:
        await forks.close()


def test_a_reward_is_a_function_of_the_conversations(run):
    source = """
        def solve(task):
            ask("a"), ask("b", "c")
            reward(99)

        def judge(conversations, task):
            assert task["seed"] == 8 and "OPENAI_API_KEY" not in os.environ
            ends = sorted(c[-1]["content"] for c in conversations)
            return {"reward": float(ends == ["one", "two"]), "success": False}
    """
    got = run(source, "solve", judge=True)
    assert (got.reward, got.success) == (1.0, False)


def test_the_runs_own_reward_scores_what_was_said(run):
    asked = []

    def scorer(message):
        asked.append(json.loads(message.episode))
        return TrajectoryScored(START.id, reward=0.75, success=True)

    got = run('ask("a")', scorer=scorer)
    assert (got.reward, got.success) == (0.75, True) and "reward_wait_s" in got.stats
    assert "one" in asked[0]["transcript"][-1]["text"] and asked[0]["reward"] == 0.0
    with pytest.raises(ScoringFailure, match="the judge is away"):
        run('ask("a")', scorer=lambda m: TrajectoryScored(START.id, error="the judge is away"))


LONG = 'ask("left right " * 4000)'
FLOODS = """
while True:
    try: ask("a", str(os.urandom(4)))
    except OSError: pass
"""
SENDS_HALF = """
ask("a")
host, port = os.environ["ROSE_GATEWAY_URL"].removeprefix("http://").split(":")
half = socket.create_connection((host, int(port)))
half.sendall(f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: {KEY}\\r\\n"
             "Content-Length: 1000\\r\\n\\r\\n{".encode())
time.sleep(600)
"""
LISTS_MODELS = 'ask("a")\nwhile True: time.sleep(0.1 * len(call("/models")))'
JUDGES = 'def judge(conversations, task): return 1\nask("a"); '
FOLDER_OF = "the program's temporary folder:"
SHORT = {"step_timeout_s": 3.0}
IDLES = "neither called nor ended within env.step_timeout_s=3 s"


@pytest.mark.parametrize(
    "source, words, changed",
    [
        ('ask("a"); raise SystemExit("I give up")', "ended with code 1; it said: I give up", {}),
        ('ask("a"); os.kill(os.getpid(), 9)', "ended with code 137", {}),
        ('ask("a")', "ended without a reward", {}),
        ('ask("a"); reward("high")', "which is no number", {}),
        ('ask("a"); reward(10**400)', "which is not finite", {}),
        ('ask("a"); write("[" * 4096)', "the file ROSE_REWARD: ", {}),  # Python 3.13 reads so deep
        ('ask("a"); os.mkdir(PLACE)', "is no file", {}),
        ('ask("a"); os.mkfifo(PLACE)', "is no file", {}),
        ('ask("a"); write(""); os.truncate(PLACE, 1 << 40)', "has 1,099,511,627,776 bytes", {}),
        ('ask("a"); write("True")', "ROSE_REWARD: it holds b'True', which is no JSON", {}),
        (LONG, "the agent's first call was refused: the messages have", {}),
        (f"try: {LONG}\nexcept OSError: reward(0.0)", "first call was refused: the messages", {}),
        ('while ask("a") != "two": pass', "256 calls of the agent were the same", {}),
        ("reward(1)", "ended without a call", {}),
        ("time.sleep(600)", IDLES, SHORT),
        ('ask("a"); time.sleep(600)', IDLES, SHORT),
        (FLOODS, "256 calls of the agent were refused", {"max_turns": 2}),
        (SENDS_HALF, IDLES, SHORT),
        (LISTS_MODELS, IDLES, SHORT),
        (f"{JUDGES}os.mkdir(PLACE)", f"{FOLDER_OF} [Errno 21]", {"judge": True}),
        (f"{JUDGES}shutil.rmtree(os.path.dirname(PLACE))", f"{FOLDER_OF} [E", {"judge": True}),
    ],
)
def test_a_program_that_does_not_end_well_fails_its_trajectory(run, source, words, changed):
    with pytest.raises(EnvironmentFailure) as error:
        run("\n" + source, **changed)
    assert words in str(error.value) and error.value.trajectory == START.id
    assert FOLDER_OF not in words or error.value.made.turns == 1


def test_without_room_for_its_folder_a_trajectory_fails(run, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EnvironmentFailure, match=f"{FOLDER_OF} .*No such file"):
        run('ask("a")')


def test_a_pipe_in_the_place_of_its_log_holds_nobody_up(run):
    replaces = 'log = os.readlink("/proc/self/fd/1")\nos.unlink(log)\nos.mkfifo(log)'
    with pytest.raises(EnvironmentFailure, match="without a reward") as error:
        run(f'ask("a")\n{replaces}')
    assert error.value.output == "" and error.value.made.turns == 1


def test_what_a_failed_program_said_and_printed_is_kept(run):
    with pytest.raises(EnvironmentFailure) as error:
        run('print("first words")\nask("a")\nprint("x" * 5000)\nos.write(2, b"last words")')
    failure = error.value
    assert "without a reward" in failure.cause
    assert failure.output.startswith("first words\nxxx") and failure.output.endswith("last words")
    assert failure.made.turns == 1 and failure.made.reward == 0.0
    assert failure.made.response_tokens == sum(failure.made.mask) > 0


@pytest.mark.parametrize(
    "then, most, reward", [("", 2, 0.0), ("reward(0.5)", 2, 0.5), (LONG, 8, 0.0)]
)
def test_an_agent_that_raises_at_a_limit_is_truncated_not_replaced(run, then, most, reward):
    source = f'ask("a"), ask("b")\n{then}\nask("c")\nraise SystemExit("not reached")'
    got = run(source, max_turns=most)
    assert (got.reward, got.success, got.truncated, got.turns) == (reward, False, True, 2)
    assert got.limit == ("turns" if most == 2 else "context")


def test_a_function_that_judges_a_truncated_agent_must_not_fail_itself(run):
    source = """
        def solve(task):
            ask("a"), ask("b")

        def judge(conversations, task):
            raise ValueError("no verdict")
    """
    with pytest.raises(EnvironmentFailure, match=r"(?s)env\.args\.reward ended with code 1.*no"):
        run(source, "solve", judge=True, max_turns=1)
    with pytest.raises(EnvironmentFailure, match=r"env\.members\.a\.args\.function ended with"):
        run("def solve(task): raise ValueError", "solve", key="env.members.a")


def test_what_a_program_prints_does_not_fill_the_disk(run, monkeypatch):
    monkeypatch.setattr(program, "MOST_LOG", 100_000)
    source = """
        ask("a")
        log = os.readlink("/proc/self/fd/1")
        print("x" * 200_000)
        while not 0 < os.stat(log).st_size < 50_000:  # until the host has cut it
            pass
        print("the end")
        raise SystemExit(os.stat(log).st_size < 50_000)
    """
    with pytest.raises(EnvironmentFailure, match="code 1; it said: x+\\s*the end$"):
        run(source)


BEGINS = """
import glob, time
open(f"FOLDER/begun-{os.getpid()}", "w")
beginning = lambda: len(glob.glob("FOLDER/begun-*")) - len(glob.glob("FOLDER/calls-*"))
seen = []
while len(seen) < 20 or not os.path.exists("FOLDER/two"):  # The first two wait for each other.
    seen.append(beginning())
    if seen[-1] > 1:
        open("FOLDER/two", "w")
    time.sleep(0.01)
open(f"FOLDER/calls-{os.getpid()}", "w")
ask("a")
reward(max(seen))
"""


async def test_commands_begin_a_few_at_a_time(chats, tokenizer, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(ASK + BEGINS.replace("FOLDER", str(tmp_path)))
    agent, chat = Agent(command=[sys.executable, str(path)]), chats["tiny"]
    async with open_gateway(beginning=asyncio.Semaphore(2)) as gateway:
        scripts = [Script(tokenizer, "one") for _ in range(6)]
        played_at_once = (played(gateway, agent, chat, s, f"g0.{n}") for n, s in enumerate(scripts))
        made = await asyncio.gather(*played_at_once)
    assert max(trajectory.reward for trajectory in made) == 2


# Ways in which a process may get away from the program that started it; each gives its pid.
AWAY = {
    "its group": "Popen(sleep).pid",
    "a session": "Popen(sleep, start_new_session=True).pid",
    "a session without variables": "Popen(sleep, start_new_session=True, env={}).pid",
    "a daemon": "daemon(lambda: None)",
    "a daemon without variables": "daemon(lambda: os.execve(sleep[0], sleep, {}))",
    "one that hears no signals": "Popen(deaf, start_new_session=True, env={}).pid",
}
START_AWAY = """
import subprocess, sys, time
from subprocess import Popen
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
deaf = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
def daemon(become):
    told, tells = os.pipe()
    if child := os.fork():
        os.waitpid(child, 0)
        return int(os.read(told, 20))
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(tells, b"%d" % os.getpid())
    become()
    time.sleep(600)
def start(): open(PIDS, "w").write(str(WAY))
"""


def away(way: str, pids: os.PathLike, then: str) -> str:
    return START_AWAY.replace("PIDS", repr(str(pids))).replace("WAY", AWAY[way]) + then


@pytest.mark.parametrize("way", AWAY)
@pytest.mark.parametrize("function", [None, "solve"], ids=["program", "function"])
def test_nothing_of_a_program_or_a_function_stays_behind(run, tmp_path, way, function):
    solves = 'def solve(task):\n    start()\n    ask("a")\n    reward(1)\n'
    source = away(way, tmp_path / "pids", solves + "solve(None)\n" * (function is None))
    before = {child.pid for child in psutil.Process().children()}
    assert run(source, function).reward == 1.0
    assert not processes.alive(int((tmp_path / "pids").read_text()))
    assert function or {child.pid for child in psutil.Process().children()} <= before


BARE = "a daemon without variables"


@pytest.mark.parametrize(
    "way, then, words, limits_s",
    [
        (BARE, "time.sleep(600)", "neither called nor ended", (1.5, 6.0, 24.0, 96.0)),
        (BARE, "os._exit(3)", "ended with code 3", (120.0,)),
        (BARE, "os.kill(os.getpid(), 9)", "ended with code 137", (120.0,)),
        (BARE, "os.killpg(0, 9)", "ended with code 137", (120.0,)),
        # What a killed reaper leaves behind is found by its name.
        ("a daemon", "os.kill(os.getppid(), 9)\ntime.sleep(600)", "with code -9", (120.0,)),
    ],
)
def test_nothing_of_a_program_that_fails_stays_behind(run, tmp_path, way, then, words, limits_s):
    pids = tmp_path / "pids"
    source = away(way, pids, f'start()\nask("a")\n{then}')
    for limit_s in limits_s:  # The first one by which the program has begun, also if that is slow.
        with pytest.raises(EnvironmentFailure, match=words):
            run(source, step_timeout_s=limit_s)
        if pids.exists() and pids.read_text():
            break
    assert not processes.alive(int(pids.read_text()))
