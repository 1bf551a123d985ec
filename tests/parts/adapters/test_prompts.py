"""Prompts from files, and functions that reward their answers."""

import asyncio
import datetime
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rose import checks
from rose.agent import envs
from rose.agent.envs import _workers
from rose.agent.envs.base import Action
from rose.agent.guard import EnvironmentFailure, Guard
from rose.config import ConfigError
from rose.reward.episode import ScoringFailed
from tests import processes
from tests.made import environment as env_of

from .conftest import DEADLINE_S, play, prompts_env, question

REPOSITORY = Path(__file__).resolve().parents[3]


def test_every_kind_of_file_has_the_same_rows_and_odd_seeds_are_held_out(folder):
    import datasets
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    (folder / "sums.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "sums.parquet")
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(folder / "one")
    datasets.DatasetDict(train=made, test=made.select(range(3))).save_to_disk(folder / "two")

    def asked(data, seeds, **args):
        return [question(play(prompts_env(data=data, **args), seed)[0]) for seed in seeds]

    train = asked("sums.jsonl", range(0, 40, 2), held_out=0.3)
    for data in ("sums.json", "sums.parquet", "one", "two#train"):
        assert asked(data, range(0, 40, 2), held_out=0.3) == train
    assert not set(train) & set(asked("sums.jsonl", range(1, 41, 2), held_out=0.3))
    held_out = set(asked("two#train", range(1, 41, 2), held_out="two#test"))
    assert held_out == {f"What is {n} / 2?" for n in range(3)}


def test_math_takes_any_form_of_the_answer(folder):
    (folder / "one.jsonl").write_text('{"prompt": "a half?", "answer": "1/2"}\n')
    texts = [r"so \boxed{\frac{1}{2}}", "it is 0.5", r"<think>\boxed{1/2}</think> 3", "no idea", ""]
    steps = play(prompts_env(data="one.jsonl", held_out="one.jsonl"), 0, *map(Action, texts))[1:]
    found = [(step.reward, step.success) for step in steps]
    assert found == [(1.0, True)] * 2 + [(0.0, False)] * 3


@pytest.mark.slow
def test_a_function_of_the_users_rewards_async_or_not(folder):
    def step(reward, text="yes", **args):
        return play(prompts_env(f"rewards.py:{reward}", **args), 2, Action(text))[1]

    row = json.loads((folder / "sums.jsonl").read_text().splitlines()[0])
    assert step("length").reward >= 3 + row["answer"]
    assert step("slow_judge").reward == 1.0 and not step("slow_judge", "no").success
    assert not step("length", success_at=1000).success


KEYWORDS = """
import functools
def trl(text, **kwargs): return sorted(kwargs) == ["episode", "messages", "row"]
def judged(function):
    return functools.wraps(function)(lambda text: function(text, 1.0))
def passed_on(function):
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
def given(function):
    return functools.wraps(function)(lambda *a, **k: function(*a, client=1.0, **k))
@given
def asks(text, row, client): return client
@judged
def wrapped(text, judge): return judge
@passed_on
def decorated(text): return bool(text)
"""


@pytest.mark.slow
def test_a_reward_function_may_take_any_keywords(folder):
    """A function with **kwargs gets all four values, a decorated one those of what it wraps."""
    (folder / "keywords.py").write_text(KEYWORDS)
    for name in ("trl", "asks", "wrapped", "decorated"):
        assert play(prompts_env(f"keywords.py:{name}"), 2, Action("x"))[1].reward == 1.0, name


EPISODES = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass  # which looks for the module of its annotations
class Told:
    prompt: str

def score(episode):
    told = Told("Be brief.\\n\\n" + episode.task["prompt"])
    assert (episode.prompt, episode.seed, episode.turns) == (told.prompt, 2, 1), episode
    assert not episode.transcript[0].policy
    return {"reward": len(episode.response), "success": episode.response == "yes"}

async def judge(episode):
    return score(episode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["score", "judge"])
def test_one_function_serves_the_environment_and_reward_function(folder, function):
    """The function runs in its own process, in the host's, and as the group `reward` calls it."""
    from rose.parts.rewards import scorers

    (folder / "mine.py").write_text(EPISODES)
    spec = f"{folder}/mine.py:{function}"
    env = prompts_env(spec, success_at=0.0, system="Be brief.")
    start, good, bad = play(env, 2, Action("yes"), Action("no"))
    assert [(step.reward, step.success) for step in (good, bad)] == [(3.0, True), (2.0, False)]
    said = [*start.messages, {"role": "assistant", "content": "yes"}]
    made = envs.build(env).source._episode(start.task, 2, said, truncated=True)
    assert made.truncated
    found = asyncio.run(scorers.build("function", {"path": spec}).score(made, DEADLINE_S))
    assert (found.reward, found.success) == (3.0, True)


def test_scorers_see_the_row_and_null_leaves_the_scoring_to_them(folder):
    start, step = play(prompts_env(None, answer_field="none of them"), 2, Action("20"))
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    assert start.task in rows and start.task["prompt"] == question(start)
    assert (step.reward, step.success, step.done) == (0.0, False, True)


@pytest.mark.slow
async def test_a_reward_that_queues_is_not_late_and_one_that_hangs_is(folder):
    async def step(reward, seconds):
        made = envs.build(prompts_env(f"rewards.py:{reward}"))
        await made.reset(2)
        return await Guard(made, "g1.1", seconds, "env").step(Action("x"))

    busy = [_workers.call("rewards.py:waits", text=f"{folder}/go") for _ in range(_workers.MOST)]
    busy = [asyncio.create_task(each) for each in busy]
    await asyncio.sleep(0)  # Their requests enter the queue first.
    queues = asyncio.create_task(step("length", 3.0))
    await asyncio.wait({queues}, timeout=3.5)
    assert not queues.done()
    (folder / "go").touch()
    assert (await queues).reward > 0
    await asyncio.gather(*busy)
    with pytest.raises(EnvironmentFailure, match="did not return within env.step_timeout_s=1"):
        await step("hangs", 1.0)


@pytest.mark.slow
def test_a_reward_that_raises_ends_or_hangs_is_no_reward(folder):
    for reward, words in (
        ("raises", "OSError: the judge is away"),
        ("nothing", "returned None: .*; a number, "),
        ("ends", "its process ended with code 7"),
    ):
        with pytest.raises((_workers.FunctionFailed, ScoringFailed), match=words):
            play(prompts_env(f"rewards.py:{reward}"), 2, Action("x"))
    with pytest.raises(_workers.FunctionTooSlow, match=r"did not return within 0.5 s"):
        asyncio.run(_workers.call("rewards.py:hangs", 0.5, text="x"))
    for _ in range(_workers.MOST + 1):  # the next calls have processes again
        assert play(prompts_env("rewards.py:length"), 2, Action("x"))[1].reward > 0


def chat(*said, answer="3"):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return {"prompt": [{"role": roles.get(r, r), "content": "x"} for r in said], "answer": answer}


@pytest.mark.parametrize(
    "row, args, words",
    [
        (chat("u", "a"), {}, "row 2 of rows.jsonl ends with the assistant's answer"),
        (chat("s", "u", "s", "u"), {}, "row 2 of rows.jsonl has a system message that is not its"),
        (chat("human"), {}, "row 2 of rows.jsonl has the role 'human'"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, {}, "message 1 there is {'role'"),
        (chat("s", "u"), {"system": "Be brief."}, "env.args.system: row 2 of rows.jsonl has a"),
        (chat("u", answer=["3", "4"]), {}, "row 2 of rows.jsonl has a list there, ['3', '4']; "),
        (chat("u", answer={"value": 3}), {}, "has a dict there, {'value': 3}"),
        (chat("u", answer=None), {}, "row 2 of rows.jsonl has no answer there"),
        (chat("u", answer=" "), {}, "row 2 of rows.jsonl has no answer there"),
        (chat("u", answer=math.nan), {}, "row 2 of rows.jsonl has no answer there"),
    ],
)
@pytest.mark.parametrize("key", ["data", "held_out"])
def test_rows_that_teach_something_else_are_refused_in_every_file(folder, key, row, args, words):
    good = {"prompt": "1 + 2?", "answer": "3"}
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in (good, row)))
    with pytest.raises(ConfigError) as error:
        envs.check(prompts_env(**{"held_out": "sums.jsonl", key: "rows.jsonl"} | args))
    assert words in str(error.value)


def test_only_a_line_feed_ends_a_line_and_files_are_utf_8(folder):
    odd = ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "é"]
    rows = [{"prompt": f"{character}?", "answer": "1"} for character in odd]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    for name, text in (
        ("unix.jsonl", "\n".join(lines)),
        ("windows.jsonl", "\ufeff" + "\r\n".join(lines) + "\r\n"),
        ("list.json", "\ufeff" + json.dumps(rows, ensure_ascii=False)),
    ):
        escaped = text.replace("\x0b", "\\u000b").replace("\x1c", "\\u001c")
        (folder / name).write_bytes(escaped.encode())
        assert envs.build(prompts_env(data=name, held_out="sums.jsonl")).source.train == rows
    (folder / "map.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(ConfigError, match="must be a list of rows, and is a dict"):
        envs.check(prompts_env(data="map.json"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_files_that_are_something_else_are_refused_with_the_remedy(folder, name):
    def refusal(data):
        (folder / name).write_bytes(data)
        with pytest.raises(ConfigError) as error:
            envs.check(prompts_env(data=name))
        assert str(error.value).startswith(f"env.args.data='{name}': ")
        return str(error.value)

    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    assert "run git lfs pull" in refusal(pointer)
    if not name.endswith("parquet"):
        row = '{"prompt": "Größe?", "answer": "1"}'
        assert "iconv -f UTF-16 -t UTF-8" in refusal(row.encode("utf-16"))
        if name == "rows.json":
            assert "on each line is named .jsonl" in refusal(f"{row}\n{row}".encode())
        assert "not UTF-8 (invalid start byte at byte" in refusal(row.encode("latin-1"))


def test_held_out_prompts_that_are_trained_are_a_doubt(folder):
    rows = (folder / "sums.jsonl").read_text().splitlines()
    (folder / "test.jsonl").write_text("\n".join([*rows[:2], json.dumps(chat("u"))]))
    (words,) = envs.doubts(prompts_env(held_out="test.jsonl"))
    expected = "env.args.held_out='test.jsonl': 2 of its 3 prompts are in env.args.data"
    assert words.startswith(expected) and envs.doubts(prompts_env(held_out=0.3)) == ()
    (folder / "overlap.jsonl").write_text("1\n2\n2\n3\n")  # odd lines: 1, 2; even: 2, 3
    (words,) = envs.doubts(env_of("agent", command=["true"], tasks="overlap.jsonl"))
    assert "1 of the held-out tasks" in words


def test_the_launcher_gives_ranks_whole_paths(folder, make_config):
    def whole(name, **args):
        return envs.with_whole_paths(env_of(name, **args)).args

    for name in ("math", "random"):  # keywords, no files that lie here
        (folder / name).mkdir()
    given = "env.args.data=sums.jsonl env.args.reward=rewards.py:length"
    c = make_config("env=prompts env.max_new_tokens=8", given)
    args = checks.with_whole_paths(c).env.args
    assert args["data"] == f"{folder}/sums.jsonl" and args["held_out"] == 0.1
    assert args["reward"] == f"{folder}/rewards.py:length"
    assert whole("prompts", data="sums.jsonl", reward="math")["reward"] == "math"
    assert whole("textarena")["opponent"] == "random"
    (folder / "sums.jsonl").rename(folder / "c#.jsonl")  # no split of a folder
    envs.check(prompts_env(data="c#.jsonl"))
    (folder / "python").symlink_to(sys.executable)
    found = whole("verifiers", python="./python", id="x")["python"]
    assert found == f"{folder}/python", "not what it links to"
    (folder / "package").mkdir()
    found = whole("agent", function="rewards.py:roles", reward="package:judge", tasks="c#.jsonl")
    assert found["function"] == f"{folder}/rewards.py:roles"
    assert (found["reward"], found["tasks"]) == ("package:judge", f"{folder}/c#.jsonl")


def test_rows_that_no_function_could_get_are_refused(folder):
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": "When?", "answer": "1", "day": datetime.date(2026, 1, 2)}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "days.parquet")
    with pytest.raises(ConfigError, match="days.parquet': row 1 can't be given .* date is not"):
        envs.check(prompts_env(data="days.parquet", held_out="sums.jsonl"))


@pytest.mark.slow
def test_worker_processes_end_with_whoever_started_them():
    words = "import asyncio, time\nfrom rose.agent.envs import _workers\n"
    words += "print(asyncio.run(_workers.call('os:getpid')), flush=True)\ntime.sleep(3600)\n"
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", words]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    worker = psutil.Process(int(host.stdout.readline()))
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert not processes.left(lambda: filter(processes.alive, [worker]))
