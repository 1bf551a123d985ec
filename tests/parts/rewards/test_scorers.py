"""Scorers on their own: what they answer, and how bad arguments are refused."""

import asyncio
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import msgspec
import printed
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose.comm import frames
from rose.config import ConfigError
from rose.parts.rewards import command, scorers, worker
from rose.parts.rewards.messages import Answer, Work
from rose.processes import run_to_its_end
from rose.reward.episode import Said, Score, ScoringFailed
from tests import made

FUNCTIONS = """
import asyncio
def length(episode, most=10): return min(len(episode.response), most) / most
async def both(episode):
    await asyncio.sleep(0)
    return episode.response == episode.task["answer"], True
def named(episode): return {"reward": 0.5, "success": None}
def exits(episode): raise SystemExit(3)
async def exits_later(episode): raise SystemExit(3)
def waits(episode): raise TimeoutError("the server is away")
def half(episode): raise ValueError("\\ud83d")
number = 3
"""


def episode(response="four", task=None, reward=0.25):
    said = [Said(False, "two and two? "), Said(True, "let me see"), Said(False, "go on")]
    ended = {"reward": reward, "success": True, "turns": 2}
    return made.episode(task=task or {}, transcript=[*said, Said(True, response)], **ended)


def scored(scorer, one=None, limit_s=60.0) -> Score:
    return asyncio.run(scorer.score(one or episode(), limit_s))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def test_a_function_may_be_plain_or_async_and_take_arguments(file):
    build = scorers.build
    plain = build("function", {"path": f"{file}:length", "args": {"most": 8}})
    assert scored(plain) == Score(reward=0.5)
    asks = build("function", {"path": f"{file}:both"})
    assert scored(asks, episode(task={"answer": "four"})) == Score(reward=1.0, success=True)
    assert scored(build("function", {"path": f"{file}:named"})) == Score(reward=0.5)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("exits", "SystemExit: 3"),
        ("exits_later", "SystemExit: 3"),
        ("waits", "TimeoutError: the server is away"),
        ("half", "ValueError: \\ud83d"),
    ],
)
@pytest.mark.parametrize("summed", [False, True])
def test_whatever_a_function_raises_its_worker_answers(file, name, error, summed):
    answers = []
    written = SimpleNamespace(write=answers.append)
    one = {"name": "function", "args": {"path": f"{file}:{name}"}}
    part = one | {"weight": 1.0}
    several = {"name": "sum", "args": {"parts": {"one": part, "other": part}}}
    scorer = scorers.build(**(several if summed else one))
    work = Work(1, 60.0, msgspec.json.encode(episode()))
    run_to_its_end(worker.answer(scorer, work, written))
    [answer] = answers
    found = msgspec.msgpack.decode(answer[len(frames.frame(b"")) :], type=Answer)
    assert (found.number, found.score, found.error) == (1, None, error)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{file}", "must be FILE.py:FUNCTION"),
        ("{file}:absent", "defines no absent"),
        ("{file}:number", "number is a int, not a function"),
        ("{folder}/none.py:f", "there is no file"),
        ("no.such.module:f", "importing no.such.module failed: ModuleNotFoundError"),
        ("{folder}/broken.py:f", "running .* failed: ZeroDivisionError"),
        ("{folder}/exits.py:f", r"exits.py ended the process \(SystemExit 0\); .* `if __name__"),
    ],
)
def test_a_function_that_is_not_there_is_refused(file, tmp_path, path, said):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("def f(episode): return 1\nraise SystemExit(0)\n")
    path = path.format(file=file, folder=tmp_path)
    with pytest.raises(ConfigError, match=rf"^reward.args.path='.*': .*{said}"):
        scorers.build("function", {"path": path})


CALLED = """
import functools
def judged(function):
    @functools.wraps(function)
    def call(episode): return function(episode, 0.5)
    return call
class Judge:
    def __call__(self, episode): return 0.5
class Draws:
    def __call__(self, episode): yield 0.5
@judged
def wrapped(episode, most): return most
def none(): return 0.5
def two(episode, answer): return 0.5
def generator(episode): yield 0.5
async def waits(episode): yield 0.5
def every(*args, **more): return 0.5
def by_position(episode, /): return 0.5
judge, draws, part = Judge(), Draws(), functools.partial(two, answer=3)
"""


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("none", {}, r": it takes \(\), and is called with \(episode\): too many positional"),
        ("two", {"nope": 1}, r" with args={'nope': 1}: it .* called with \(episode, nope=1\)"),
        ("two", {"episode": 1, "answer": 1}, "multiple values for argument 'episode'"),
        ("judge", {"nope": 1}, "unexpected keyword argument 'nope'"),
        ("Judge", {}, ": Judge is a class; name a function"),
        *((name, {}, ": it is a generator") for name in ("generator", "waits", "draws")),
        *((name, {}, "") for name in ("every", "by_position", "judge", "part", "wrapped")),
        ("every", {"found": 1, "where": 2}, ""),
    ],
)
def test_how_a_function_will_be_called_is_checked(tmp_path, name, args, said):
    (tmp_path / "called.py").write_text(CALLED)
    function = {"path": f"{tmp_path}/called.py:{name}", "args": args}
    if not said:
        assert scored(scorers.build("function", function)).reward == 0.5
        return
    with pytest.raises(ConfigError, match=f"^reward.args.path='.*:{name}'.*{said}"):
        scorers.build("function", function)
    with pytest.raises(ConfigError, match=r"^reward\.args\.parts\.one\.args\.path="):
        scorers.build("sum", {"parts": {"one": {"name": "function", "args": function}}})


def test_a_files_null_is_no_file_and_other_types_are_named():
    """Parquet gives every row the names of all rows' files."""
    one = scorers.build("command", {"argv": ["python3", "-c", ONE_FILE], "extract": "text"})
    for files in ({"a.txt": "1", "b.txt": None}, {"b.txt": "", "a.txt": None}):
        assert scored(one, episode("x", {"files": files})).success
    for files in (None, {}, {"a.txt": None}):
        assert not scored(one, episode("x", {"files": files})).success
    for files, said in (
        ('{"a.txt": "1"}', "the task's files are a str"),
        (["a.txt"], "the task's files are a list"),
        ({"a.txt": 1}, "the task's file 'a.txt' is 1; a text is needed"),
    ):
        with pytest.raises(ScoringFailed, match=said):
            scored(one, episode("x", {"files": files}))


ONE_FILE = "import os, sys; sys.exit(len(os.listdir('.')) != 2)"  # the answer's, and one more


def runs_answer(**args):
    """A command that runs the whole answer as a program of Python's."""
    plain = {"argv": ["python", "answer.py"], "extract": "text"}
    return scorers.build("command", plain | args)


def test_a_command_that_takes_too_long_is_a_result():
    loop = scorers.build("command", {"argv": ["python", "answer.py"]})
    ended = scored(loop, episode("```\nwhile True: pass\n```"), limit_s=1.0)
    assert ended == Score(reward=0.0, success=False, timed_out=True)


@pytest.mark.parametrize("isolated", [True, False])
def test_a_commands_children_end_with_it_and_its_folder_goes(tmp_path, monkeypatch, isolated):
    if not isolated:
        monkeypatch.setattr(command, "isolation", lambda: ())
    pipe, mark = tmp_path / "pipe", tmp_path / "alive"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    child = f"exec 3> {pipe}; pwd > {mark}.new; mv {mark}.new {mark}; sleep 1000"
    code = (
        f"import os, subprocess, time\nsubprocess.Popen(['sh', '-c', {child!r}])\n"
        f"while not os.path.exists({str(mark)!r}): time.sleep(0.01)\n"
    )
    assert scored(runs_answer(), episode(code)).success
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "its end, when nobody has it open for writing any more"
    os.close(reader)
    assert not Path(mark.read_text().strip()).exists()


def test_a_command_does_not_begin_once_nobody_waits_for_it(tmp_path):
    """As where its worker was killed before the namespaces were there."""
    argv = [*command.isolation(), *command.BEGIN, "touch", str(tmp_path / "begun")]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, b"\n") and not list(tmp_path.iterdir())


def test_a_program_that_cannot_be_executed_is_no_score():
    with pytest.raises(OSError, match="answer.py: Permission denied"):
        asyncio.run(command.run(["./answer.py"], {"answer.py": "print(1)"}, 120.0, 1.0))


def test_a_command_finds_neither_secrets_nor_a_network(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    code = (
        "import os, socket\nassert 'SECRET_TOKEN' not in os.environ\n"
        "assert os.getcwd() == os.environ['HOME']\n"
        "try:\n    socket.create_connection(('127.0.0.1', PORT), 1)\n"
        "except OSError: pass\nelse: raise SystemExit(3)\n"
    )

    async def main():
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await runs_answer().score(episode(code.replace("PORT", str(port))), 120.0)

    assert command.isolation(), "unshare(1) gives no namespaces on this machine"
    assert asyncio.run(main()).success


def test_a_commands_memory_has_a_limit():
    code = episode("x = bytearray(2**28)")
    assert scored(runs_answer(), code).success
    assert not scored(runs_answer(memory_gib=0.125), code).success


def test_a_file_that_leads_out_of_the_folder_is_no_score():
    with pytest.raises(ScoringFailed, match="outside"):
        scored(runs_answer(), episode(task={"files": {"../x": ""}}))


def asked(answers, one, **args):
    """(the score of `one` by a judge at a real server that gives these answers, the requests'
    authorizations and bodies)."""
    seen, answers = [], iter(answers)

    async def handle(request):
        seen.append((request.headers.get("Authorization"), await request.json()))
        answer = next(answers)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        return web.json_response({"choices": [{"message": {"content": answer}}]})

    async def main():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        async with TestServer(app) as server:
            given = JUDGE | {"url": str(server.make_url("/v1"))} | args
            return await scorers.build("judge", given).score(one, 120.0)

    return asyncio.run(main()), seen


JUDGE = {"url": "http://127.0.0.1:1/v1", "model": "m", "low": 0.0, "high": 10.0}
JUDGE |= {"prompt": "{prompt}|{response}|{task.answer}|{other}"}
JUDGE |= {"pattern": r"Rating: *(-?[0-9.]+)"}


def test_a_judge_is_asked_with_the_episodes_texts_and_its_last_number_counts(tmp_path):
    key = tmp_path / "key"
    key.write_text("sesame\n")
    one = episode("4", {"answer": "four {prompt}"})
    score, seen = asked(["Rating: 2 no: Rating: 7.5"], one, api_key_file=str(key))
    assert score == Score(reward=0.75)
    [(authorization, body)] = seen
    assert authorization == "Bearer sesame"
    assert body["messages"][0]["content"] == "two and two? |4|four {prompt}|{other}"
    assert asked(["Rating: 12"], one)[0] == Score(reward=1.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(503, "answered 503: no"), ("fine", "gave no number"), ("Rating: .", "gave no number")],
)
def test_a_judge_that_fails_is_no_score(answer, said):
    with pytest.raises(ScoringFailed, match=said):
        asked([answer], episode(task={"answer": "4"}))


def test_a_judge_that_is_not_there_and_a_task_without_the_key_are_no_score():
    judge = scorers.build("judge", JUDGE)
    with pytest.raises(ScoringFailed, match=r"asks for \{task.answer\}.*nothing"):
        scored(judge)
    with pytest.raises(ScoringFailed, match="127.0.0.1:1"):
        scored(judge, episode(task={"answer": "4"}))


def test_a_judge_outside_is_asked_through_the_sites_proxy_and_one_of_the_cluster_is_not(
    monkeypatch,
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    one = episode(task={"answer": "4"})
    assert asked(["Rating: 5"], one)[0] == Score(reward=0.5)
    heard = []

    async def proxy(reader, writer):
        heard.append(await reader.readline())
        writer.close()

    async def main():
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        judge = scorers.build("judge", JUDGE | {"url": "https://judge.invalid/v1"})
        async with server:
            with pytest.raises(ScoringFailed, match="the judge at https://judge.invalid"):
                await judge.score(one, 60.0)

    asyncio.run(main())
    assert heard[0].startswith(b"CONNECT judge.invalid:443 ")


def test_parts_add_up_by_their_weights(file):
    form = {"name": "function", "args": {"path": f"{file}:length"}, "weight": -1.0}
    parts = {"own": {"name": "environment", "weight": 2.0}, "form": form}
    total = scored(scorers.build("sum", {"parts": parts}))
    assert total == Score(reward=2 * 0.25 - 0.4, success=True)


def test_the_home_folder_is_written_out_in_every_part(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "check.sh").write_text("#!/bin/sh")
    (tmp_path / "check.sh").chmod(0o700)
    form = {"name": "function", "args": {"path": "~/mine.py:length"}}
    program = {"name": "command", "args": {"argv": ["~/check.sh", "-v"]}}
    parts = scorers.whole_paths({"parts": {"form": form, "program": program}})["parts"]
    assert parts["form"]["args"] == {"path": f"{tmp_path}/mine.py:length"}
    assert parts["program"]["args"] == {"argv": [f"{tmp_path}/check.sh", "-v"]}
    scorers.build(**parts["program"])


def part(**of):
    return {"parts": {"a": of}}


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("magic", {}, "reward.name='magic': no such reward; there are environment, function"),
        ("function", {}, "reward.args: .*path"),
        ("function", {"path": 3}, "reward.args.path: expected `str`"),
        ("command", {"argv": []}, r"reward.args.argv=\[\]"),
        ("command", {"argv": ["sh"], "memory": 3}, "reward.args.memory=3: command has no such"),
        ("judge", JUDGE | {"url": "localhost"}, "reward.args.url='localhost'"),
        ("judge", JUDGE | {"pattern": "("}, "reward.args.pattern"),
        ("judge", JUDGE | {"pattern": "x"}, "must have one group"),
        ("command", {"argv": ["no-such-program"]}, "there is no program no-such-program"),
        ("command", {"argv": ["./check.sh"]}, "give its absolute path .*/check.sh.*, as .sh, ./ch"),
        ("command", {"argv": ["sh"], "answer_file": "../x"}, r"answer_file='../x'"),
        ("judge", JUDGE | {"high": float("nan")}, "reward.args.high=nan: must be above"),
        ("sum", part(name="environment", args=None), "reward.args.parts.a="),
        ("sum", part(name="environment", weight=float("inf")), "reward.args.parts.a.weight=inf"),
        ("judge", JUDGE | {"high": 0.0}, "reward.args.high=0.0: must be above"),
        ("judge", JUDGE | {"api_key_file": "/no/file"}, "api_key_file='/no/file'"),
        ("sum", {"parts": {}}, "at least one part"),
        ("sum", part(name="sum"), "reward.args.parts.a=.*a name of environment"),
        ("sum", part(name="command", args={"argv": []}), r"reward.args.parts.a.args.argv=\[\]"),
    ],
)
def test_bad_arguments_are_refused_by_their_key(name, args, said):
    with pytest.raises(ConfigError, match=said):
        scorers.build(name, args)


def test_the_function_tells_good_episodes_of_its_own_command_from_bad_ones(make_config, tmp_path):
    printed.write("rewards.md", tmp_path)
    overrides = printed.overrides("rewards.md", "short")
    c = make_config(*(word.replace("mine.py", f"{tmp_path}/mine.py") for word in overrides))
    scorer = scorers.build(c.reward.name, c.reward.args)

    def scored(success: bool, turns: int):
        ended = made.episode(reward=float(success), success=success, turns=turns)
        return asyncio.run(scorer.score(ended, 60.0))

    assert list(c.environments) == ["frozen_lake"]
    assert scored(True, 4).reward > scored(True, 9).reward > scored(False, 3).reward == 0
    assert scored(True, 4).success is True and scored(False, 3).success is False
