r"""Judge whether a text's final answer is the right one in mathematics: by math-verify, within what
a strict reader would take for an answer.

1/2, 0.5 and \frac{1}{2} are one answer. Words, dates, times and ratios are compared as texts, since
SymPy reads east and seat as one product of letters, and 2021-03-04 as 2014. Runs in a worker
process with a limit: SymPy can compute for ever. Package: math-verify (Kydlíček, 2025).
"""

from __future__ import annotations

import re
from typing import Any

from math_verify import parse, verify

from rose.agent.envs.base import outside_thoughts
from rose.agent.envs.reasoning import last_boxed

# \text{B}, \mathrm{B} and the like are B
STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|operatorname)\s*\{([^{}]*)\}"
)
SPACING = re.compile(r"\\[,;:! ]|\\(?:quad|qquad|left|right)(?![A-Za-z])|[\s$~]+|&nbsp;")
# of a multiple-choice question, with the option's text or not; (B) or (C) is no choice
CHOICE = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?[(\[]?([A-J])"
    r"(?![)\].:]*\s*(?:or|and|,|/)\s*[(\[]?[A-J]\b)(?:[)\].:]+(?:\s.*)?)?",
    re.S,
)
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
# 12\,000 and 12 000, which math-verify takes for a product
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;:! ]|~|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
FORMULA = re.compile(r"(?<!\\)\$.+?(?<!\\)\$", re.S)
SAID = re.compile(r"(?:answer|result|option|choice)(?:\s+is\b|\s*:)[\s:]*", re.I)
# words that are no unit of the number before them
FUNCTIONS = "sin|cos|tan|cot|sec|csc|log|exp|mod|sqrt|max|min|gcd|lcm|and|or"
# the number of $18, 18 dollars, 18 cm^2, 60\% and 18.
QUANTITY = re.compile(
    r"(?:US|USD)?\s*\\?[$£€¥₹]?\s*(?P<number>(?:\\[dt]?frac|[^A-Za-z\\$£€¥₹%])*[\d}])\s*"
    rf"(?P<unit>[£€¥₹°]|\\?\s?%|(?:(?:\s|\s*/\s*)(?!(?:{FUNCTIONS})\b)"
    r"(?:[A-Za-z]{3,}|cm|mm|km|kg|mg|ml|mL|ft|lb|oz|hr|mi|yd|of|(?<=/)[hs])"
    r"(?:\s*\^\s*\{?\d\}?)?)*)\s*\.?"
)
SCALES = {"%": -2, "percent": -2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE = re.compile("|".join(SCALES))
BASE = re.compile(r"([0-9A-Za-z]+)_\{?(\d+)\}?")  # 101_2, of which math-verify drops the base


def reward(text: str, row: dict) -> float:
    r"""Return 1 if the last complete answer of `text`, thoughts left out, equals row["answer"],
    else 0. It stands in \boxed{}, or behind ####, or is else the last formula or number."""
    said, gold = outside_thoughts(text), str(row["answer"]).strip()
    boxed = _marked(gold)
    right = _numbers((gold if boxed is None else boxed).strip().removesuffix("."))
    answer = None if (marked := _marked(said)) is None else _numbers(marked)
    if _textual(right):
        given = [answer] if answer is not None else _last_said(said)
        return float(_normal(right) in map(_normal, given))
    formula = parse(gold) if boxed is None and FORMULA.search(gold) else None
    if answer is None:
        return float(_equal(right, said, formula))
    if _textual(answer) or _other_base(right, answer):
        return 0.0
    pairs = [(right, answer), *_quantities(right, answer)]
    return float(any(_equal(gold, rf"\boxed{{{given}}}", formula) for gold, given in pairs))


def _equal(gold: str, given: str, formula: list[Any] | None) -> bool:
    """True if math-verify reads `given` as `gold`, or as `formula` where that is not None."""
    if not (found := parse(given)):
        return False
    # Bare LaTeX is no formula to `parse`, which takes a number out of it: 2 of 2\sqrt{3}.
    return verify(formula or parse(rf"\boxed{{{gold}}}") or parse(gold) or [gold], found)


def _numbers(text: str) -> str:
    """Write numbers as math-verify reads them."""
    text = text.replace(r"\varnothing", r"\emptyset")
    return SCIENTIFIC.sub(POWER, THOUSANDS.sub("", text))


def _quantities(right: str, answer: str) -> list[tuple[str, str]]:
    """Return the numbers of both without their units, if they have some. Where the units have
    different scales, as 60\\% and 0.6 or 5 million and 5, the values are returned, too."""
    texts = right, answer
    found = [QUANTITY.fullmatch(_plain(text.replace(r"\$", ""))) for text in texts]
    numbers = [m["number"] if m else text for m, text in zip(found, texts, strict=True)]
    if numbers == [*texts]:
        return []
    powers = [m and SCALE.search(m["unit"]) for m in found]
    powers = [SCALES[m[0]] if m else 0 for m in powers]
    if powers[0] == powers[1]:
        return [(numbers[0], numbers[1])]
    gold, given = (rf"{n} \times 10^{{{p}}}" for n, p in zip(numbers, powers, strict=True))
    return [(gold, given)] if all(powers) else [(gold, given), (numbers[0], numbers[1])]


def _other_base(right: str, answer: str) -> bool:
    """True for two numbers that name two bases."""
    bases = [BASE.fullmatch(re.sub(r"\s", "", _plain(text))) for text in (right, answer)]
    return all(bases) and bases[0][2] != bases[1][2]


def _marked(text: str) -> str | None:
    """Return what is marked as the answer: the last box, or what stands behind the last ####."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip(" \t\r*") or None if mark else None


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


def _last_said(text: str) -> list[str]:
    """Return what follows "the answer is" last, else the last line: whole, and its first
    sentence."""
    text = re.sub(r"[*`]+", "", text).strip()
    lines = text.splitlines() or [""]
    marks = [mark for mark in SAID.finditer(text) if text[mark.end() :].strip()]
    said = text[marks[-1].end() :].partition("\n")[0] if marks else lines[-1]
    return [said, re.split(r"[.!](?:\s|$)", said)[0]]
