r"""Judge whether a text's final answer is the right one in mathematics: by math-verify, within what
a strict reader would take for an answer.

1/2, 0.5 and \frac{1}{2} are one answer. Words, dates, times and ratios are compared as texts, since
SymPy reads east and seat as one product of letters, and 2021-03-04 as 2014. Runs in a worker
process with a limit: SymPy can compute for ever. Package: math-verify (Kydlíček, 2025).
"""

from __future__ import annotations

import re

from math_verify import parse, verify

from rose.agent.envs.base import outside_thoughts
from rose.agent.envs.reasoning import last_boxed

# \text{B}, \mathrm{B} and the like are B
STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|operatorname)\s*\{([^{}]*)\}"
)
SPACING = re.compile(r"\\[,;:! ]|\\(?:quad|qquad|left|right)(?![A-Za-z])|[\s$~]+|&nbsp;")
# of a multiple-choice question, with the option's text or not
CHOICE = re.compile(r"[(\[]?([A-J])(?:[)\].:]+(?:\s.*)?)?", re.S)
WORDS = re.compile(r"[^\W\d_]+(?:[\s,;'’.-]+[^\W\d_]+)*[.!]?")
VARIABLES = re.compile(r"[a-df-hjkmnp-z]{2}")  # two letters that are a product, as ab and xy
NAMES = re.compile(r"\\?(?:infty|inf|infinity|pi|oo)")  # words that SymPy has a value for
MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}-\d{1,2}-\d{4}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}\.\d{1,2}\.\d{4}"
    rf"|(?=.*\d)[\w\s,.]*\b{MONTH}\b[\w\s,.]*",
    re.I,
)
COLON = re.compile(r"[^:]*\d\s*:\s*\d.*")  # a time or a ratio
# 1e-05, as JSON's numbers are written; math-verify takes its e for Euler's number
SCIENTIFIC, POWER = (
    re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)"),
    r"\1 \\times 10^{\2}",
)
FORMULA = re.compile(r"(?<!\\)\$.+?(?<!\\)\$", re.S)
SAID = re.compile(r"(?:answer|result)(?:\s+is|\s*:)\s*(.+)", re.I)


def reward(text: str, row: dict) -> float:
    r"""Return 1 if the last complete answer of `text`, thoughts left out, equals row["answer"],
    else 0. It stands in \boxed{}, or behind ####, or is else the last formula or number."""
    said, gold = outside_thoughts(text), str(row["answer"]).strip()
    boxed = _marked(gold)
    right = SCIENTIFIC.sub(POWER, (gold if boxed is None else boxed).strip().removesuffix("."))
    answer = None if (marked := _marked(said)) is None else SCIENTIFIC.sub(POWER, marked)
    if _textual(right):
        given = _last_sentence(said) if answer is None else answer
        return float(_normal(given) == _normal(right))
    if answer is not None and _textual(answer):
        return 0.0
    given = parse(said if answer is None else rf"\boxed{{{answer}}}")
    if boxed is None and FORMULA.search(gold):
        right = parse(gold)
    else:  # bare LaTeX is no formula to `parse`, which takes a number out of it: 2 of 2\sqrt{3}
        right = parse(rf"\boxed{{{right}}}") or parse(right) or [right]
    return float(bool(given) and verify(right, given))


def _marked(text: str) -> str | None:
    """Return what is marked as the answer: the last box, or what stands behind the last ####."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip() or None if mark else None


def _plain(text: str) -> str:
    """Return `text` without commands that only say how it looks."""
    previous = None
    while previous != text:
        previous, text = text, STYLE.sub(r" \1 ", text)
    return SPACING.sub(" ", text).strip()


def _textual(text: str) -> bool:
    """True for what no formula is: a choice, words, a date, a time or a ratio."""
    plain = _plain(text)
    if NAMES.fullmatch(plain):
        return False
    if WORDS.fullmatch(plain) and len(plain) > 1:
        return VARIABLES.fullmatch(plain) is None
    return any(form.fullmatch(plain) for form in (CHOICE, DATE, COLON))


def _normal(text: str) -> str:
    """Return one form for texts that a reader takes for the same: a choice's letter, or words in
    lower case without what separates them."""
    plain = _plain(text)
    if (choice := CHOICE.fullmatch(plain)) is not None:
        return choice[1]
    plain = re.sub(r"\s*([:/,-])\s*", r"\1", plain.casefold())
    return re.sub(r"[\s,;.!]+", " ", plain).strip(" '\"")


def _last_sentence(text: str) -> str:
    """Return what follows "the answer is" last, else the last line."""
    lines = text.strip().splitlines() or [""]
    found = SAID.findall(text)
    return (found[-1] if found else lines[-1]).strip().strip("*").removesuffix(".")
