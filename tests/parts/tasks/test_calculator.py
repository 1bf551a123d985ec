"""The calculator computes exactly, refuses all else, and rewards the right answer once."""

import asyncio
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.agent.envs.base import Action, ToolCall
from rose.agent.tool_calls import read
from rose.parts.tasks.envs import _arithmetic
from rose.parts.tasks.envs.calculator import Calculator, expression


def play(env, *calls):
    """Steps that these (tool, value) calls lead to, after reset(3)."""

    async def go():
        await env.reset(3)
        key = {"calculate": "expression", "answer": "value"}
        made = [ToolCall(name, {key[name]: value}) for name, value in calls]
        return [await env.step(Action("", call)) for call in made]

    return asyncio.run(go())


def question(env):
    asked = asyncio.run(env.reset(3)).messages[1]["content"]
    return asked.removeprefix("What is ").removesuffix("?")


def test_calculate_then_answer_solves_the_question():
    asked = question(Calculator())
    shown, answered = play(Calculator(), ("calculate", asked), ("answer", eval(asked)))
    assert shown.observation == str(eval(asked))
    assert (shown.reward, shown.done, shown.invalid) == (0.0, False, False)
    assert (answered.reward, answered.done, answered.success) == (1.0, True, True)
    (step,) = play(Calculator(), ("answer", eval(asked) + 1))
    assert (step.reward, step.done, step.success, step.invalid) == (0.0, True, False, False)


@pytest.mark.parametrize(
    "form", [str, float, lambda value: f"{value}.0", lambda value: f" {value} "]
)
def test_an_answer_counts_in_any_form_of_the_number(form):
    (step,) = play(Calculator(), ("answer", form(eval(question(Calculator())))))
    assert step.success


def test_shaping_pays_the_right_result_once_and_the_whole_is_one():
    asked = question(Calculator())
    calls = [("calculate", "1 + 0"), ("calculate", asked), ("calculate", asked)]
    calls += [("answer", eval(asked))]
    expected = [0.0, 0.25, 0.0, 0.75]
    assert [step.reward for step in play(Calculator(shaping=0.25), *calls)] == expected
    assert [step.reward for step in play(Calculator(shaping=0.25), calls[-1])] == [1.0]


def test_examples_are_solved_questions_in_the_form_that_is_read():
    start = asyncio.run(Calculator(examples=3).reset(3))
    assert start.messages[-1] == asyncio.run(Calculator().reset(3)).messages[-1]
    assert asyncio.run(Calculator(examples=3).reset(4)).messages[:-1] == start.messages[:-1]
    shown = [message["content"] for message in start.messages[1:-1]]
    for asked, calculate, response, answer in zip(*(shown[i::4] for i in range(4)), strict=True):
        expected = asked.removeprefix("What is ").removesuffix("?")
        (call,), (final,) = read("", calculate).calls, read("", answer).calls
        assert (call.name, call.arguments) == ("calculate", {"expression": expected})
        assert (final.name, final.arguments) == ("answer", {"value": eval(expected)})
        assert response == f"<tool_response>\n{eval(expected)}\n</tool_response>"


@pytest.mark.parametrize("bad", ["two plus two", "1 / 0", "2 ** 1000", "__import__('os')", ""])
def test_what_cannot_be_computed_is_said_and_the_episode_goes_on(bad):
    right = eval(question(Calculator()))
    first, _, last = play(Calculator(), ("calculate", bad), ("answer", bad), ("answer", right))
    assert first.invalid and first.observation.startswith("Error: ") and not first.done
    assert last.success


def test_the_question_copied_as_the_answer_is_no_answer():
    asked = question(Calculator())
    copied, answered = play(Calculator(), ("answer", asked), ("answer", eval(asked)))
    assert copied.invalid and not copied.done and "a number, not an expression" in str(copied)
    assert answered.success


EXACT = {"1 + 2 * 3": "7", "(1 + 2) * 3": "9", "-3 - -4": "1", "7 / 2": "3.5", "0.1 + 0.2": "0.3"}
EXACT |= {"1 / 3": "0.333333333333", "7 // 2": "3", "-7 % 3": "2", "2 ** 10": "1024"}
EXACT |= {"2 ** -1": "0.5", "2 ** 64 * 2 ** 64 - 2 ** 64 * 2 ** 64 + 5": "5"}


@pytest.mark.parametrize("text, value", EXACT.items())
def test_arithmetic_is_exact(text, value):
    assert _arithmetic.format_number(_arithmetic.evaluate(text)) == value


TEXTS = ["a", "f(1)", "1 if 1 else 2", "[1]", "'1'", "True", "1j", "1 < 2", "1; 2", "x := 1"]
TEXTS += ["().__class__", "1 @ 2", "~1", "1e999", "9 ** 9 ** 9", "2 ** 0.5", "0 ** -1", "1 % 0"]
TEXTS += ["1 // 0", "10 ** 64 * 10 ** 64 * 10 ** 64", "(" * 90 + "1" + ")" * 90 + "+" * 20]
TEXTS += ["1" * 201, "-" * 199 + "1", "\x00", "\ud800", "1\n2"]


@pytest.mark.parametrize("text", TEXTS)
def test_anything_else_is_refused(text):
    with pytest.raises(_arithmetic.ArithmeticRefused):
        _arithmetic.evaluate(text)


@settings(deadline=None)
@given(st.one_of(st.text(), st.text("0123456789+-*/%(). e_", max_size=250)))
def test_no_text_costs_much_or_raises_anything_else(text):
    began = time.process_time()
    try:
        value = _arithmetic.evaluate(text)
        assert isinstance(value, Fraction) and len(_arithmetic.format_number(value)) < 400
    except _arithmetic.ArithmeticRefused as error:
        assert 0 < len(str(error)) < 100
    assert time.process_time() - began < 5.0  # what is refused would take minutes


@settings(deadline=None)
@given(st.integers(0, 2**63), st.integers(1, 8), st.sampled_from(["+-*", "+*", "-"]))
def test_a_question_is_as_difficult_as_asked_and_has_pythons_value(seed, operations, operators):
    text = expression(random.Random(seed), operations, 99, operators)
    assert sum(map(text.count, operators)) == sum(map(text.count, "+-*")) == operations
    assert all(1 <= number <= 99 for number in _arithmetic.numbers(text))
    assert _arithmetic.evaluate(text) == eval(text)
