"""A game as the terminal shows it, with a policy that says what the test wants."""

import asyncio
import sys

import pytest

from rose.agent.guard import EnvironmentFailure
from rose.parts.play import game, session, source, typed
from rose.parts.play.screen import screen_for
from rose.parts.play.talk import Talk, system_of
from tests.parts.play.conftest import Scripted

# a lake of 3 by 3 whose free way is down, down, right, right
SMALL = ("env.args.size=3", "model.max_context=512")
WAY = ["down", "down", "right", "right"]


def move(direction: str) -> str:
    return f'<tool_call>{{"name": "move", "arguments": {{"direction": "{direction}"}}}}</tool_call>'


@pytest.fixture
def play(console, chat):
    """play(config, task, *texts) -> the outcome of the scripted policy's game."""

    async def ready():
        pass

    def play(config, task, *texts):
        screen = screen_for(task.env, console)
        policy = Scripted(chat, *texts)
        outcome = asyncio.run(game.by_policy(task, config, chat, policy, screen, ready))
        screen.ended(session.verdict(outcome))
        return outcome

    return play


def solvable(config, way):
    """The first held-out task that `way` solves."""

    async def solves(task):
        env = game.envs.build(task.env)
        await env.reset(task.seed)
        calls = [typed.ToolCall("move", {"direction": each}) for each in way]
        steps = [await env.step(game.Action("", call)) for call in calls]
        return steps[-1].success and not any(step.done for step in steps[:-1])

    tasks = (source.held_out(config, number, None) for number in range(200))
    return next(task for task in tasks if asyncio.run(solves(task)))


def test_each_turn_is_a_frame_with_words_and_the_end_says_how(make_config, play, printed):
    config = make_config(*SMALL)
    task = solvable(config, WAY)
    outcome = play(config, task, *map(move, WAY))
    assert outcome == game.Outcome(True, 1.0, 4)
    lines = printed().splitlines()
    assert lines[0].startswith("You are P on a frozen lake.")
    turns = [line for line in lines if "turn " in line and "move(" in line]
    assert turns[0].startswith(" P ") and 'turn 1: move(direction="down")' in turns[0]
    assert 'turn 4: move(direction="right")' in turns[3] and len(turns) == 4
    assert "Success after 4 turns, reward 1" in printed()
    assert lines[-2].endswith(" P"), "the last frame shows where the game ended"
    assert lines == [line.rstrip() for line in lines]


def test_a_call_that_cannot_be_read_is_shown_as_it_was_said(make_config, play, printed):
    config = make_config(*SMALL, "env.max_turns=2")
    outcome = play(config, source.held_out(config, 0, None), "I go\x1b[2J <tool_call>left")
    assert outcome == game.Outcome(False, 0.0, 2, "env.max_turns allows no more")
    assert "turn 2: I go\u241b[2J <tool_call>left" in printed(), "no escape sequence is obeyed"
    assert "Failure after 2 turns, reward 0: env.max_turns allows no more" in printed()


def test_an_environment_without_a_map_is_a_conversation(make_config, play, printed):
    config = make_config("env=calculator", "model.max_context=512")
    task = source.held_out(config, 0, None)
    answer = '{"name": "answer", "arguments": {"value": 1e9}}'
    outcome = play(config, task, f"<tool_call>{answer}</tool_call>")
    assert not outcome.success and outcome.turns == 1
    said = printed()
    assert "\nuser:\nWhat is " in said and "\npolicy, turn 1:\n<tool_call>" in said
    assert "\nenvironment:\nWrong.\n" in said


def test_a_broken_environment_is_named(make_config, play, monkeypatch):
    config = make_config(*SMALL)

    async def broken(self, action):
        raise RuntimeError("the ice melted")

    monkeypatch.setattr("rose.agent.envs.frozen_lake.FrozenLake.step", broken)
    with pytest.raises(EnvironmentFailure, match="FrozenLake.step raised .*the ice melted"):
        play(config, source.held_out(config, 0, None), move("left"))


def test_a_game_is_scored_as_the_run_scores_it(make_config, play, tmp_path):
    (tmp_path / "mine.py").write_text("def half(episode):\n    return 0.5, True\n")
    config = make_config(*SMALL, "reward=function", f"reward.args.path={tmp_path / 'mine.py'}:half")
    outcome = play(config, source.held_out(config, 0, None), move("left"))
    assert outcome.success and outcome.reward == 0.5
    (tmp_path / "mine.py").write_text("def half(episode):\n    raise OSError('no judge')\n")
    with pytest.raises(EnvironmentFailure, match="its reward: OSError: no judge"):
        play(config, source.held_out(config, 0, None), move("left"))


@pytest.fixture
def types(monkeypatch):
    """types("left", ...) are the lines that the user types before the input ends."""

    def types(*lines):
        left = iter(lines)
        monkeypatch.setattr(typed, "ask", lambda prompt: next(left, None))

    return types


def test_the_user_plays_has_as_many_turns_as_the_policy_and_may_leave(
    make_config, console, printed, types
):
    def outcome(task, *lines):
        types(*lines)
        return asyncio.run(game.by_user(task, screen_for(task.env, console, human=True)))

    task = solvable(make_config(*SMALL), WAY)
    won = outcome(task, "down", "sideways", "d", "move right", "r")
    assert won == game.Outcome(True, 1.0, 4), "nonsense is no turn"
    assert "'sideways' is none of left, down, right, up" in printed()
    task = solvable(make_config(*SMALL, "env.max_turns=1"), WAY)
    assert outcome(task) is None
    lost = game.Outcome(False, 0.0, 1, "env.max_turns allows no more")
    assert outcome(task, "down", "down") == lost


def test_one_question_and_one_answer_is_a_conversation(
    tmp_path, make_config, chat, console, printed, types
):
    data, reward = tmp_path / "data.jsonl", tmp_path / "mine.py"
    reward.write_text("def right(text):\n    return 1.0\n")
    rows = [f'{{"prompt": "left or right {n}", "answer": "{n}"}}\n' for n in range(20)]
    data.write_text("".join(rows))
    args = {"data": data, "reward": f"{reward}:right", "system": "Be brief"}
    given = [f"env.args.{name}={value}" for name, value in args.items()]
    questions = make_config("env=prompts", *given, "env.max_new_tokens=16")
    task = source.held_out(questions, 0, None)
    system = asyncio.run(system_of(task))
    assert system == [{"role": "system", "content": "Be brief"}]
    policy, played = Scripted(chat, "down", "up", "left"), []

    async def play(number):
        played.append(number)

    def talk(task):
        new = lambda: screen_for(task.env, console)  # noqa: E731
        asyncio.run(Talk(task, system, questions, chat, policy, new, play).go())

    types("what now", "and then", "", "again")
    talk(task)
    first, second, third = (chat.decode(_tokens(each)) for each in policy.asked)
    assert "Be brief" in first and "what now" in first
    assert second.startswith(first) and "down" in second and "and then" in second
    assert "what now" not in third and "again" in third, "a task in between begins a new one"
    assert played == [0]
    assert printed().count("policy, turn") == 3
    types()  # Without input a held-out question is asked.
    talk(source.held_out(questions, 5, None))
    assert played == [0, 5]


def test_games_and_programs_are_no_conversation(make_config):
    assert asyncio.run(system_of(source.held_out(make_config(), 0, None))) is None
    agent = make_config("env=agent", f"env.args.command={sys.executable}")
    assert asyncio.run(system_of(source.held_out(agent, 0, None))) is None


def _tokens(request):
    return game.p.unpack_tokens(request.tokens)
