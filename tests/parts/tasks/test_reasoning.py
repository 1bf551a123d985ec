"""A written answer is found in the text and checked by rule."""

import asyncio
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.agent.envs.base import Action
from rose.parts.tasks.envs.reasoning import NUMBER, Reasoning, final_answer


def ask(task, seed=3, **args):
    env = Reasoning(task, **args)
    return env, asyncio.run(env.reset(seed)).messages[1]["content"]


def answer(env, text):
    return asyncio.run(env.step(Action(text)))


FOUND = {r"so \boxed{42}": "42", r"\boxed{1} no, \boxed{ 2 }.": "2", r"\boxed{7} or \boxed{8": "7"}
FOUND |= {
    r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"\boxed{$7$}": "7",
    "3 + 4 = 7.": "7",
    "none": "",
}
FOUND |= {"it is -1,234.5": "-1,234.5", r"<think>\boxed{1}</think> 5": "5"}
FOUND |= {r"\boxed{5} <think>or \boxed{6}": "5", r"\boxed{\boxed{5}} \boxed{}": "5"}
FOUND |= {r"\boxed{\left\{1\right.}": r"\left\{1\right."}


@pytest.mark.parametrize("text, found", FOUND.items())
def test_the_last_box_counts_else_the_last_number(text, found):
    assert final_answer(text, NUMBER) == found


@pytest.mark.parametrize(
    "form", [r"\boxed{{{}}}", "The answer is {}.", "{}", "1 + 1 = 2, then {:,}", r"\boxed{{{}.0}}"]
)
def test_arithmetic_takes_the_right_number_in_any_form_and_no_copy_of_the_question(form):
    env, text = ask("arithmetic", seed=8, largest=999)
    asked = re.fullmatch(r"What is (.*)\?", text)[1]
    step = answer(env, form.format(eval(asked)))
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert not answer(env, form.format(eval(asked) + 1)).success
    for copied in (asked, f"-(-({asked}))"):
        assert answer(env, rf"\boxed{{{copied}}}").reward == 0.0


def countdown_parts(text):
    given, target = re.search(r"numbers ([\d, ]+) exactly.*equals (-?\d+)\.", text, re.S).groups()
    return [int(number) for number in given.split(", ")], int(target)


def brute_force(numbers, target):
    """Some expression that uses each number once, found without the environment."""

    def combine(items):
        if len(items) == 1:
            return items[0][1] if items[0][0] == target else None
        for i, j in itertools.permutations(range(len(items)), 2):
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            (a, left), (b, right) = items[i], items[j]
            for value, sign in ((a + b, "+"), (a - b, "-"), (a * b, "*")):
                if found := combine([*rest, (value, f"({left} {sign} {right})")]):
                    return found
        return None

    return combine([(number, str(number)) for number in numbers])


@pytest.mark.parametrize("seed", range(4))
def test_every_countdown_has_a_solution_that_is_accepted(seed):
    env, text = ask("countdown", seed)
    numbers, target = countdown_parts(text)
    solution = brute_force(numbers, target)
    assert answer(env, rf"Trying... \boxed{{{solution}}}").success
    assert answer(env, f"Trying...\n{solution} = {target}\n").success


def test_countdown_needs_each_number_once_and_the_target():
    env, text = ask("countdown")
    numbers, target = countdown_parts(text)
    cases = (str(target), f"{target} + 0 * {numbers[0]}")
    cases += (" + ".join(map(str, [*numbers, numbers[0]])) + " - 1",)
    cases += ("-".join(["0", *map(str, numbers)]), "")
    for cheat in cases:
        step = answer(env, rf"\boxed{{{cheat}}}")
        assert (step.reward, step.done, step.success) == (0.0, True, False)


@settings(deadline=None)
@given(st.text(), st.sampled_from(["countdown", "arithmetic"]), st.booleans())
def test_no_text_raises(text, task, boxed):
    env, _ = ask(task)
    assert answer(env, rf"\boxed{{{text}}}" if boxed else text).done
