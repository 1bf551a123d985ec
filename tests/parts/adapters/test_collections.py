"""Environments that come with other packages: the real packages, as a run uses them."""

import asyncio
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import psutil
import pytest

from rose.agent import envs
from rose.agent.envs import _workers
from rose.agent.envs.base import Action, ToolCall
from rose.agent.guard import EnvironmentFailure, Guard
from rose.config import ConfigError
from rose.reward.episode import ScoringFailed
from tests import processes
from tests.made import environment as env_of

from .conftest import served

REPOSITORY = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).parent / "servers" / "mcp_server.py"
STDIO = {"command": [sys.executable, str(SERVER)]}
DEADLINE_S = 120.0


def prompts_env(reward="math", **args):
    return env_of("prompts", **{"data": "sums.jsonl", "reward": reward} | args)


def play(env, seed, *actions):
    """What `reset` and these actions give, then the environment is closed."""

    async def go():
        made = envs.build(env)
        try:
            return [await made.reset(seed), *[await made.step(action) for action in actions]]
        finally:
            await made.close()

    return asyncio.run(asyncio.wait_for(go(), DEADLINE_S))


def question(start):
    return start.messages[-1]["content"]


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    for name, package in (("reasoning_gym", "reasoning-gym"), ("textarena", "textarena")):
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.delitem(sys.modules, f"rose.parts.adapters.envs.{name}", raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=f"env.name='{name}': .*pip install '{package}>="):
            envs.check(env_of(name))


def test_the_extras_are_what_the_messages_name():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {r for e in ("reasoning_gym", "textarena", "math", "mcp", "prompts") for r in extras[e]}
    assert named == set(envs.PACKAGES.values())


def test_a_question_of_reasoning_gym_is_the_librarys_and_so_is_the_score():
    import reasoning_gym

    env = env_of("reasoning_gym", tasks=[{"task": "chain_sum", "min_terms": 3, "max_terms": 3}])
    made = reasoning_gym.create_dataset("chain_sum", size=1, seed=8, min_terms=3, max_terms=3)[0]
    right = Action(f"<think><answer>0</answer></think> so <answer>{made['answer']}</answer>")
    start, wrong, done = play(env, 8, Action("<answer>\ud800</answer>"), right)
    assert question(start) == made["question"]
    assert (wrong.reward, wrong.done, wrong.success) == (0.0, True, False)
    assert (done.reward, done.success) == (1.0, True)


LISTS_AND_TIMES = [
    {"task": "basic_arithmetic", "level": 0},
    {"task": "basic_arithmetic", "operators": ["+"]},
    {"task": "time_intervals", "level": 1},
]


def test_all_of_its_tasks_ask_and_score_and_none_raises():
    """Those that take seconds to make are left to the users; prime_factorization's scorer raises,
    isomorphic_strings depends on the order of a set. Arguments may be lists or times."""
    from rose.parts.adapters.envs import reasoning_gym as ours

    assert len(ours.ReasoningGym(tasks=["all"]).tasks) == 105
    names = ["prime_factorization", "isomorphic_strings", "graph_color", "rubiks_cube"]
    for task in names + LISTS_AND_TIMES:
        env = env_of("reasoning_gym", tasks=[task])
        first, step = play(env, 4, Action("<answer>none of it</answer>"))
        assert question(first) and step.done and step.reward < 0.5
        assert play(env, 4)[0] == first != play(env, 6)[0]


def test_tasks_are_mixed_by_their_weights_and_levels_make_them_harder():
    env = env_of("reasoning_gym", tasks=[{"task": "chain_sum", "weight": 3}, "letter_counting"])
    sums = sum(question(play(env, 2 * n)[0]).startswith("State") for n in range(40))
    assert 20 < sums < 40

    def terms(level):
        env = env_of("reasoning_gym", tasks=[{"task": "chain_sum", "level": level}])
        return max(question(play(env, 2 * n)[0]).count(" ") for n in range(6))

    assert terms(0) < terms(8) and terms(0) < terms([0, 8])


def test_every_task_with_levels_is_asked_at_its_lowest():
    from rose.parts.adapters.envs import reasoning_gym as ours

    for name in sorted(ours.CURRICULA.keys() - {*ours.EXCEPT}):
        made, usual = ours._at(name, 0), vars(ours.DATASETS[name][1]())
        assert not {f for f, value in made.items() if value == usual[f]}, name
        json.dumps(made)


def test_a_game_alone_is_played_to_its_end():
    async def bisect():
        env = envs.build(env_of("textarena", game="GuessTheNumber-v0"))
        start, low, high = await env.reset(4), 1, 20
        while True:
            guess = (low + high) // 2
            step = await env.step(Action(f"<think>[1]</think>[{guess}]"))
            if step.done:
                return start, step
            low, high = (low, guess - 1) if "lower" in step.observation else (guess + 1, high)

    start, step = asyncio.run(bisect())
    assert "between 1 and 20" in question(start)
    assert (step.reward, step.success, step.invalid) == (1.0, True, False)


def test_against_the_random_opponent_both_seats_are_played_and_seeds_repeat():
    async def game(seed, **args):
        env, told = envs.build(env_of("textarena", **args)), []
        start = await env.reset(seed)
        text = question(start)
        while True:
            moves = [m for m in "012345678" if f"'[{m}]'" in text.rpartition("Moves")[2]]
            step = await env.step(Action(f"[{moves[0]}]"))
            told.append(step.observation)
            assert not step.invalid
            if step.done:
                return env.seat, start, told, step.reward
            text = step.observation

    async def both():
        one, other = game(6), game(6)  # at the same time: neither draws from the other's generator
        return await asyncio.gather(one, other, *[game(2 * n) for n in range(10)])

    first, again, *games = asyncio.run(both())
    assert first == again
    assert {seat for seat, *_ in games} == {0, 1}
    assert {reward for *_, reward in games} <= {-1.0, 0.0, 1.0} and len(games) == 10
    assert asyncio.run(game(6, seat=1))[0] == 1


async def test_a_game_that_computes_leaves_the_loop_to_others():
    computes, free = threading.Event(), threading.Event()
    env = envs.build(env_of("textarena", game="GuessTheNumber-v0"))
    await env.reset(4)
    step = env._game.step
    env._game.step = lambda move: (computes.set(), free.wait(DEADLINE_S))[1] and step(move)
    playing = asyncio.create_task(env.step(Action("[1]")))
    while not computes.is_set():
        await asyncio.sleep(0.001)
    assert not playing.done()
    free.set()
    assert (await playing).observation


def test_a_move_against_the_rules_is_told_and_then_loses():
    start, first, second = play(env_of("textarena"), 6, Action("no move"), Action("[99]"))
    assert first.invalid and "invalid move" in first.observation and not first.done
    assert (second.done, second.invalid, second.reward) == (True, True, -1.0)


def test_the_opponent_may_be_a_function_of_the_users(tmp_path):
    last = "return re.findall(r\"'(\\[\\d\\])'\", observation)[-1]"
    (tmp_path / "first.py").write_text(f"import re\ndef move(observation, player, seed): {last}\n")
    env = env_of("textarena", opponent=f"{tmp_path}/first.py:move", seat=0)
    start, step = play(env, 2, Action("[0]"))
    assert "cell 8" in step.observation


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
def score(episode):
    said = "Be brief.\\n\\n" + episode.task["prompt"]
    assert (episode.prompt, episode.seed, episode.turns) == (said, 2, 1), episode
    assert not episode.transcript[0].policy
    return {"reward": len(episode.response), "success": episode.response == "yes"}

async def judge(episode):
    return score(episode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["score", "judge"])
def test_one_function_serves_the_environment_and_reward_function(folder, function):
    """In a process of its own, and in the host's; and as the group `reward` calls it."""
    from rose.reward import scorers

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
    for _ in range(_workers.MOST + 1):  # and the next calls have processes again
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


def test_the_launcher_gives_ranks_whole_paths(folder):
    def whole(name, **args):
        return envs.with_whole_paths(env_of(name, **args)).args

    for name in ("math", "random"):  # keywords, no files that lie here
        (folder / name).mkdir()
    args = whole("prompts", data="sums.jsonl", reward="rewards.py:length")
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


@pytest.fixture
def http_server():
    """The URL of an MCP server that runs."""
    with served(sys.executable, SERVER) as port:
        yield f"http://127.0.0.1:{port}/mcp"


def mcp(reward="length", **args):
    return env_of("mcp", data="sums.jsonl", reward=f"rewards.py:{reward}", **args)


ADDS = [ToolCall("add", {"number": number}) for number in (3, 4, "\ud800", 1)]
FLY = ToolCall("fly", {})
CALLS = [Action("", call) for call in (*ADDS[:3], ToolCall("divide", {"by": 0}), FLY)]
CALLS += [Action("7")]


@pytest.mark.slow
@pytest.mark.parametrize("http", [False, True])
def test_tools_of_a_server_are_called_and_their_errors_told(folder, request, http):
    place = {"url": request.getfixturevalue("http_server")} if http else STDIO
    start, *steps = play(mcp(**place, tools=["add", "divide"]), 2, *CALLS)
    assert [tool["function"]["name"] for tool in start.tools] == ["add", "divide"]
    assert start.tools[0]["function"]["parameters"]["required"] == ["number"]
    assert [step.observation for step in steps[:2]] == ["3", "7"]
    assert [step.invalid for step in steps] == [False, False, True, True, True, False]
    assert "there are add, divide" in steps[4].observation
    assert steps[5].done and steps[5].reward > 1 and not steps[4].done
    assert http or not processes.left(
        lambda: [p for p in processes.children() if str(SERVER) in processes.words(p)]
    )


@pytest.mark.slow
def test_several_calls_of_a_turn_are_one_message_of_the_conversation(folder):
    two, bad = Action("", calls=tuple(ADDS[:2])), Action("", calls=(FLY, ADDS[3]))
    _, first, second, last = play(mcp("roles", **STDIO), 2, two, bad, Action("8"))
    assert first.observations == ("3", "7") and not first.invalid
    assert second.observations[1] == "8" and second.invalid
    assert last.reward == 1221221


@pytest.mark.slow
async def test_closing_does_not_fail_while_the_server_still_ends(folder, monkeypatch):
    from rose.parts.adapters.envs import mcp as ours

    made = envs.build(mcp(**STDIO))
    await made.reset(2)
    monkeypatch.setattr(ours, "CLOSE_S", 0.0)
    await made.close()
    await asyncio.wait({made._session})


@pytest.mark.slow
async def test_every_trajectory_has_a_server_of_its_own(folder):
    made = [envs.build(mcp(**STDIO)) for _ in range(2)]
    try:
        await asyncio.gather(*[env.reset(2) for env in made])
        found = [(await env.step(CALLS[0])).observation for env in made]
    finally:
        await asyncio.gather(*[env.close() for env in made])
    assert found == ["3", "3"]


@pytest.mark.slow
def test_a_server_that_ends_fails_the_trajectory_and_not_the_host(folder):
    with pytest.raises(Exception, match="[Cc]onnection|ended"):
        play(mcp(**STDIO), 2, Action("", ToolCall("crash", {})))
    with pytest.raises(Exception, match="ended|[Cc]onnection"):
        play(mcp(command=[sys.executable, "-c", "raise SystemExit(3)"]), 2)
    with pytest.raises(Exception, match="has no fly; it has add, divide, crash"):
        play(mcp(**STDIO, tools=["fly"]), 2)


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
