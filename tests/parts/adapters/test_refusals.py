"""Arguments that an environment of another package can't have, by its name."""

import sys

import pytest

from rose.agent import envs
from rose.config import ConfigError
from tests.made import environment

GIVEN = {
    "prompts": {"data": "sums.jsonl"},
    "mcp": {"data": "sums.jsonl", "reward": "rewards.py:length"},
    "verifiers": {"python": sys.executable, "id": "x"},
}


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("reasoning_gym", {"tasks": []}, "env.args.tasks=[]"),
        (
            "reasoning_gym",
            {"tasks": ["chain_sums"]},
            "tasks[0]='chain_sums': no such task; there are ab, ",
        ),
        ("reasoning_gym", {"tasks": ["composite"]}, "tasks[0]='composite': no such task"),
        (
            "reasoning_gym",
            {"tasks": [{"task": "chain_sum", "weight": 0}]},
            "tasks[0].weight=0: a number above 0",
        ),
        (
            "reasoning_gym",
            {"tasks": [{"task": "chain_sum", "level": 99}]},
            "has the levels 0 to 10",
        ),
        ("reasoning_gym", {"tasks": [{"task": "acre", "level": 1}]}, "acre has no levels"),
        (
            "reasoning_gym",
            {"tasks": [{"task": "chain_sum", "terms": 3}]},
            "tasks[0].terms=3: chain_sum takes min_terms",
        ),
        (
            "reasoning_gym",
            {"tasks": [{"task": "chain_sum", "min_terms": -1}]},
            "chain_sum refuses them",
        ),
        ("textarena", {"game": "TicTacTo-v0"}, "no such game; there are 2048-v0"),
        ("textarena", {"game": "Wordle-v0"}, "can't be played here with any number of players"),
        ("textarena", {"game": "PublicGoodsGame-v0"}, "no such game"),
        ("textarena", {"players": 3}, "can't be played here with 3 players"),
        ("textarena", {"seat": 2}, "env.args.seat=2: null, or from 0 to 1"),
        ("textarena", {"opponent": "randm"}, "env.args.opponent='randm': must be FILE.py:FUNCTION"),
        ("textarena", {"options": {"sise": 3}}, "unexpected keyword argument 'sise'"),
        (
            "prompts",
            {"data": "nowhere.jsonl"},
            "env.args.data='nowhere.jsonl': no such file or folder",
        ),
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
        (
            "prompts",
            {"reward": "rewards.py:wants"},
            "takes sentence; a reward function takes some of text",
        ),
        ("prompts", {"success_at": "1"}, "env.args.success_at='1': a number"),
        ("mcp", {}, "either it, a list as"),
        ("mcp", {"command": ["no-such-program"]}, "no program 'no-such-program' on PATH"),
        ("mcp", {"command": "python x.py"}, "a list of texts, or null"),
        ("mcp", {"command": [sys.executable, 3]}, "a list of texts, or null"),
        ("mcp", {"url": "localhost:80"}, "env.args.url='localhost:80'"),
        ("mcp", {"url": "http://h/mcp", "token_file": "none"}, "token_file='none': no such file"),
        ("openenv", {"url": "envs:8000"}, "env.args.url='envs:8000'"),
        ("openenv", {"url": "http://h:1", "token_file": "none"}, "token_file='none': no such file"),
        ("agent", {}, "one of them is needed"),
        ("agent", {"command": "a", "function": "b:c"}, "one of them is needed"),
        ("agent", {"command": "no-such-program-7f3a x"}, "no program 'no-such-program-7f3a'"),
        ("agent", {"command": "'"}, "env.args.command"),
        ("agent", {"command": []}, "a program and its arguments"),
        ("agent", {"function": "nothing"}, "package.module:function"),
        (
            "agent",
            {"function": "no_such_package_7f3a:run"},
            "no Python package 'no_such_package_7f3a'",
        ),
        ("agent", {"function": "/no/such.py:run"}, "no file /no/such.py"),
        ("agent", {"command": "true", "reward": "x"}, "env.args.reward='x'"),
        ("agent", {"command": "true", "tasks": "/no/such.jsonl"}, "env.args.tasks"),
        ("agent", {"command": "true", "environment": "PATH"}, "a list"),
        ("verifiers", {"python": "/no/python"}, "env.args.python='/no/python': no such program"),
        ("verifiers", {"id": ""}, "env.args.id='': the name"),
        ("verifiers", {"held_out": 1.5}, "env.args.held_out=1.5: a share"),
        ("verifiers", {"args": 3}, "env.args.args=3: a map"),
        ("verifiers", {"most_tasks": 0}, "env.args.most_tasks=0: an integer"),
        ("verifiers", {}, "No package metadata was found for verifiers"),
        (
            "verifiers",
            {"python": "./old"},
            "a Python from 3.11 with verifiers 0.4; it ended with code 2: unknown",
        ),
    ],
)
def test_what_an_environment_can_not_be_given_is_refused(folder, name, args, words):
    (folder / "broken.jsonl").write_text('{"prompt": "x", "answer": 1}\nnonsense\n')
    (folder / "lines.json").write_text('{"prompt": "x", "answer": 1}\n' * 2)
    (folder / "old").write_text("#!/bin/sh\necho 'unknown option -P' >&2; exit 2\n")
    (folder / "old").chmod(0o755)
    with pytest.raises(ConfigError) as error:
        envs.check(environment(name, **GIVEN.get(name, {}) | args))
    assert words in str(error.value)
