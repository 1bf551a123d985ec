"""Arguments that an environment of another package can't have, by its name."""

import json
import sys

import pytest

from rose import checks
from rose.agent import envs
from rose.config import ConfigError
from rose.parts.adapters.envs.agent import Agent
from tests.made import environment

GIVEN = {
    "prompts": {"data": "sums.jsonl"},
    "mcp": {"data": "sums.jsonl", "reward": "rewards.py:length"},
    "verifiers": {"python": sys.executable, "id": "x"},
}
SUM = {"task": "chain_sum"}

ODD = """
class Judge: pass
def placed(text, /): return 1.0
def tuple_of(*args): return 1.0
async def draws(text): yield 1.0
"""
# No line of a program is run here: its packages may be in another environment.
PROGRAM = """
from elsewhere import Agent as imported
def play(task):
    def inner(): global late; late = play
async def judge(conversations, task): return 1
if play(1): chosen = play
else:
    try: from fast import run
    except ImportError as run: pass
with open("x") as file, play as entered: (first, *others), each[0] = play, play
match play:
    case {"x": taken, **more} | [taken, *more]: pass
[x for x in range(3) if (walrus := play)]
"""
FILES = {"program.py": PROGRAM, "odd.py": ODD}
FILES["broken.jsonl"] = '{"prompt": "x", "answer": 1}\nnonsense\n'
FILES["broken.py"] = "import os\ndef play(task: return 1\n"
FILES["exits.py"] = "def f(text): return 1\nraise SystemExit(0)\n"
FILES["lines.json"] = '{"prompt": "x", "answer": 1}\n' * 2
FILES["old"] = "#!/bin/sh\necho 'unknown option -P' >&2; exit 2\n"
FILES["dynamic.py"] = "globals()['any'] = print\n"
FILES["starred.py"] = "if 1: from elsewhere import *\n"
FILES["lazy.py"] = "def __getattr__(name): return print\n"
NAMES = "play judge chosen run imported entered first others late taken more walrus"


@pytest.fixture
def among_files(folder):
    for path, content in FILES.items():
        (folder / path).write_text(content)
    (folder / "old").chmod(0o755)


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("reasoning_gym", {"tasks": []}, "env.args.tasks=[]"),
        ("reasoning_gym", {"tasks": ["chain_sums"]}, "'chain_sums': no such task; there are ab, "),
        ("reasoning_gym", {"tasks": ["composite"]}, "tasks[0]='composite': no such task"),
        ("reasoning_gym", {"tasks": [SUM | {"weight": 0}]}, "tasks[0].weight=0: a number above 0"),
        ("reasoning_gym", {"tasks": [SUM | {"level": 99}]}, "has the levels 0 to 10"),
        ("reasoning_gym", {"tasks": [{"task": "acre", "level": 1}]}, "acre has no levels"),
        (
            "reasoning_gym",
            {"tasks": [SUM | {"terms": 3}]},
            "[0].terms=3: chain_sum takes min_terms",
        ),
        ("reasoning_gym", {"tasks": [SUM | {"min_terms": -1}]}, "chain_sum refuses them"),
        ("textarena", {"game": "TicTacTo-v0"}, "no such game; there are 2048-v0"),
        ("textarena", {"game": "Wordle-v0"}, "can't be played here with any number of players"),
        ("textarena", {"game": "PublicGoodsGame-v0"}, "no such game"),
        ("textarena", {"players": 3}, "can't be played here with 3 players"),
        ("textarena", {"seat": 2}, "env.args.seat=2: null, or from 0 to 1"),
        ("textarena", {"opponent": "randm"}, "env.args.opponent='randm': must be FILE.py:FUNCTION"),
        ("textarena", {"options": {"sise": 3}}, "unexpected keyword argument 'sise'"),
        ("prompts", {"data": "nowhere.jsonl"}, "data='nowhere.jsonl': no such file or"),
        ("prompts", {"data": "broken.jsonl"}, "broken.jsonl': line 2 is no JSON"),
        ("prompts", {"data": "lines.json"}, "a file with a row on each line is named .jsonl"),
        ("prompts", {"data": "rewards.py"}, "must be a .jsonl, .json or .parquet file"),
        ("prompts", {"prompt_field": "question"}, "row 1 of sums.jsonl has no text there"),
        ("prompts", {"answer_field": "gold"}, "env.args.answer_field='gold': row 1 of sums.jsonl"),
        ("prompts", {"held_out": 1.5}, "env.args.held_out=1.5"),
        ("prompts", {"held_out": 1e-9}, "both sides need some"),
        ("prompts", {"reward": "rewards.py:nope"}, "rewards.py defines no nope"),
        ("prompts", {"reward": "nope.py:f"}, "there is no file"),
        ("prompts", {"reward": "maths"}, "must be FILE.py:FUNCTION"),
        ("prompts", {"reward": "rewards.py:wants"}, "takes sentence; a reward function takes some"),
        ("prompts", {"reward": "odd.py:tuple_of"}, "it takes *args; a reward function takes some"),
        ("prompts", {"reward": "odd.py:placed"}, "takes text only by position (before"),
        ("prompts", {"reward": "odd.py:draws"}, "it is a generator function (it has `yield`)"),
        ("prompts", {"reward": "odd.py:Judge"}, "odd.py:Judge': Judge is a class; name a"),
        ("prompts", {"reward": "builtins:max"}, "'builtins:max': it shows Python no parameters"),
        ("prompts", {"reward": "exits.py:f"}, "reward='exits.py:f': running exits.py ended"),
        ("textarena", {"opponent": "odd.py:placed"}, "odd.py:placed': it takes (text, /)"),
        ("prompts", {"success_at": "1"}, "env.args.success_at='1': a number"),
        ("mcp", {}, "either it, a list as"),
        ("mcp", {"command": ["no-such-program"]}, "no program 'no-such-program' on PATH"),
        ("mcp", {"command": "python x.py"}, "a list of texts, or null"),
        ("mcp", {"command": [sys.executable, 3]}, "a list of texts, or null"),
        ("mcp", {"env": {"PORT": 8080}}, "{'PORT': 8080}: a map of texts, as {PORT: '8080'}, or"),
        ("mcp", {"url": "localhost:80"}, "env.args.url='localhost:80'"),
        ("mcp", {"url": "http://h/mcp", "token_file": "none"}, "token_file='none': no such file"),
        ("openenv", {"url": "envs:8000"}, "env.args.url='envs:8000'"),
        ("openenv", {"url": "http://h:1/a b"}, "no OpenEnv server answers GET http://h:1/a b/sch"),
        ("openenv", {"url": "http://h:1", "token_file": "none"}, "token_file='none': no such file"),
        ("agent", {}, "one of them is needed"),
        ("agent", {"command": "a", "function": "b:c"}, "one of them is needed"),
        ("agent", {"command": "no-such-program-7f3a x"}, "no program 'no-such-program-7f3a'"),
        ("agent", {"command": "'"}, "env.args.command"),
        ("agent", {"command": []}, "a program and its arguments"),
        ("agent", {"function": "nothing"}, "package.module:function"),
        ("agent", {"function": "no_such_7f3a:run"}, "no Python package 'no_such_7f3a'"),
        ("agent", {"function": "/no/such.py:run"}, "no file /no/such.py"),
        ("agent", {"function": "./program:play"}, "is no module; a file is named as ./prog"),
        ("agent", {"function": "agents/lake:play"}, "as agents/lake.py:play"),
        ("agent", {"function": "/home/me/agent:play"}, "'/home/me/agent' is no module"),
        ("agent", {"command": "true", "reward": "x"}, "env.args.reward='x'"),
        ("agent", {"command": "true", "tasks": "/no/such.jsonl"}, "env.args.tasks"),
        ("agent", {"command": "true", "environment": "PATH"}, "a list"),
        ("agent", {"command": "true", "environment": ["KEY=1"]}, "names, without values"),
        ("agent", {"function": "broken.py:play"}, "broken.py, line 2 is no Python 3."),
        ("agent", {"function": "broken:play"}, "broken.py, line 2 is no Python 3."),
        ("agent", {"function": "program.py:inner"}, "program.py defines no inner at its top"),
        ("agent", {"function": "program:paly"}, "its functions are play, judge"),
        ("agent", {"function": "json:lods"}, "defines no lods"),
        ("agent", {"command": "true", "reward": "program.py:no"}, "env.args.reward='program"),
        ("agent", {"command": "python3 no.py"}, "env.args.command='python3 no.py': there"),
        ("agent", {"command": "python -u -W error -Xdev no.py x"}, "there is no file no.py in /"),
        ("agent", {"command": [sys.executable, "/usr/no.py"]}, "there is no file /usr/no.py"),
        ("mcp", {"command": ["python3", "no.py"]}, "there is no file no.py in /"),
        ("verifiers", {"python": "/no/python"}, "env.args.python='/no/python': no such program"),
        ("verifiers", {"id": ""}, "env.args.id='': the name"),
        ("verifiers", {"held_out": 1.5}, "env.args.held_out=1.5: a share"),
        ("verifiers", {"args": 3}, "env.args.args=3: a map"),
        ("verifiers", {"most_tasks": 0}, "env.args.most_tasks=0: an integer"),
        ("verifiers", {}, "No package metadata was found for verifiers"),
        ("verifiers", {"python": "./old"}, "with verifiers 0.4; it ended with code 2: unknown"),
    ],
)
def test_what_an_environment_can_not_be_given_is_refused(among_files, name, args, words):
    with pytest.raises(ConfigError) as error:
        envs.check(environment(name, **GIVEN.get(name, {}) | args))
    assert words in str(error.value)


FUNCTIONS = [f"program.py:{name}" for name in NAMES.split()]
FUNCTIONS += ["dynamic.py:any", "starred.py:any", "lazy.py:any", "json:loads"]
COMMANDS = ["python3 program.py no.py", "python3 -m no.py", "python3 -c no.py", "sh no.py"]


def test_programs_that_can_not_be_judged_here_are_accepted(among_files):
    for function in FUNCTIONS:
        envs.check(environment("agent", function=function))
    for command in COMMANDS:
        envs.check(environment("agent", command=command, reward="program.py:judge"))


def test_a_task_is_a_line_of_its_file_and_held_out_ones_are_others(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(i)}\n" for i in range(5)))
    agent = Agent(command="true", tasks=str(path))
    assert {agent.task(seed)["task"] for seed in range(0, 40, 2)} == {0, 2, 4}
    assert {agent.task(seed)["task"] for seed in range(1, 40, 2)} == {1, 3}
    torn = tmp_path / "torn.jsonl"
    torn.write_text("1\n\n{\n")
    with pytest.raises(ConfigError, match=r"torn.jsonl': line 3 is no JSON"):
        Agent(command="true", tasks=str(torn))


def test_a_run_without_a_program_is_refused_before_it_starts(tree, tmp_path):
    with pytest.raises(ConfigError, match="env.args.command=None, env.args.function=None"):
        checks.check(tree("env=agent", f"output_dir={tmp_path}"))
    made = checks.check(tree("env=agent", "env.args.command=cat x", f"output_dir={tmp_path}"))
    assert made.config.env.args["listen"] == "127.0.0.1"
