r"""Judge by math-verify if a text's final answer to a question of mathematics is right, as a strict
reader would.

1/2, 0.5 and \frac{1}{2} are equal answers. Words, dates, times and ratios are compared as texts,
since SymPy reads east and seat as the same product of letters, and 2021-03-04 as 2014. `reward`
runs in a worker process with a time limit, as SymPy may never end. Package: math-verify (Kydlíček,
2025).
"""

from __future__ import annotations

import re
from typing import Any

from math_verify import parse, verify

from rose.agent.envs.base import outside_thoughts
from rose.parts.tasks.envs.reasoning import last_boxed

# \text{B}, \mathrm{B} and other commands that only style the letter B
STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|operatorname)\s*\{([^{}]*)\}"
)
SPACING = re.compile(r"\\[,;:! ]|\\(?:quad|qquad|left|right)(?![A-Za-z])|[\s$~]+|&nbsp;")
# One option of a multiple-choice question, with or without its text. "(B) or (C)" is no choice.
CHOICE = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?[(\[]?([A-J])"
    r"(?![)\].:]*\s*(?:or|and|,|/)\s*[(\[]?[A-J]\b)(?:[)\].:]+(?:\s.*)?)?",
    re.S,
)
WORDS = re.compile(r"[^\W\d_]+(?:[\s,;'’.-]+[^\W\d_]+)*[.!]?")
VARIABLES = re.compile(r"[a-df-hjkmnp-z]{2}")  # a product of two variables, as ab and xy
NAMES = re.compile(r"\\?(?:infty|inf|infinity|pi|oo)")  # words for which SymPy has a value
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
# 1e-05, as JSON writes numbers. math-verify would read the e as Euler's number.
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
POWER = r"\1 \\times 10^{\2}"
# The separator in 12\,000 and 12 000, which math-verify would read as a product.
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;:! ]|~|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
FORMULA = re.compile(r"(?<!\\)\$.+?(?<!\\)\$", re.S)
SAID = re.compile(r"(?:answer|result|option|choice)(?:\s+is\b|\s*:)[\s:]*", re.I)
# Words that are never a unit: they change the number before them, or are symbols.
NO_UNITS = (
    "sin|cos|tan|cot|sec|csc|log|exp|mod|sqrt|max|min|gcd|lcm|and|or|plus|minus|times|over|divided"
    "|half|halves|thirds?|quarters?|fourths?|fifths?|tenths?|hundred|dozen|gross|score|squared"
    "|cubed|factorial|choose|infinity|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa"
    "|lambda|mu|nu|xi|omicron|rho|sigma|tau|upsilon|phi|chi|psi|omega"
)
# The number and the unit of $18, 18 dollars, 18 cm^2, 60\% and 18.
QUANTITY = re.compile(
    r"(?:US)?\s*(?P<coin>USD|\\?[£€¥₹])?\s*"
    r"(?P<number>(?:\\[dt]?frac|[^A-Za-z\\$£€¥₹%])*[\d}])\s*"
    rf"(?P<unit>[£€¥₹°]|\\?\s?%|(?:(?:\s|\s*/\s*)(?!(?:{NO_UNITS})\b)"
    r"(?:[A-Za-z]{4,}|days?|men|cup|hrs|lbs|yrs|mph|kph|cm|mm|km|kg|mg|ml|mL|ft|lb|oz|hr|mi|yd|of"
    r"|(?:(?<=/)|(?<=/\s))[hs])(?:\s*\^\s*\{?\d\}?)?)*)\s*\.?"
)
SCALES = {"%": -2, "percent": -2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE = re.compile("|".join(SCALES))
DOLLARS = re.compile(r"\\\$|\$(?=\d[^$]*$)")  # elsewhere $ delimits a formula
COINS = {"USD": "dollar", "£": "pound", "€": "euro", "¥": "yen", "₹": "rupee", "°": "degree"}
BASE = re.compile(r"([0-9A-Za-z]+)_\{?(\d+)\}?")  # 101_2, whose base math-verify ignores


def reward(text: str, row: dict) -> float:
    r"""Return 1 if the last complete answer of `text`, outside of thoughts, equals row["answer"],
    else 0. The answer is in \boxed{}, or after ####, or else it is the last formula or number."""
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
    quantities = _quantities(right, answer)
    if _textual(answer) or _other_base(right, answer) or quantities is None:
        return 0.0
    pairs = [(right, answer), *quantities]
    return float(any(_equal(gold, rf"\boxed{{{given}}}", formula) for gold, given in pairs))


def _equal(gold: str, given: str, formula: list[Any] | None) -> bool:
    """True if math-verify reads `given` as `gold`, or as `formula` where that is not None."""
    if not (found := parse(given)):
        return False
    # `parse` finds no formula in bare LaTeX and takes a number from it, as 2 of 2\sqrt{3}.
    return verify(formula or parse(rf"\boxed{{{gold}}}") or parse(gold) or [gold], found)


def _numbers(text: str) -> str:
    """Rewrite the text's numbers so that math-verify reads them correctly."""
    text = text.replace(r"\varnothing", r"\emptyset")
    return SCIENTIFIC.sub(POWER, THOUSANDS.sub("", text))


def _quantities(right: str, answer: str) -> list[tuple[str, str]] | None:
    """Return pairs of numbers to compare, without units; one equal pair suffices. The list is empty
    if neither number has a unit, and None stands for different units. If scales differ, as in 5
    million and 5000000, the values are a pair. 60 and 0.6 both equal 60 percent."""
    texts = right, answer
    found = [QUANTITY.fullmatch(_plain(DOLLARS.sub(" USD ", text))) for text in texts]
    numbers = [m["number"] if m else text for m, text in zip(found, texts, strict=True)]
    units = [_unit(m) if m else "" for m in found]
    if all(units) and units[0] != units[1]:
        return None
    if numbers == [*texts]:
        return []
    scales = [SCALE.search(m["unit"]) if m else None for m in found]
    powers = [SCALES[m[0]] if m else 0 for m in scales]
    if powers[0] == powers[1]:
        return [(numbers[0], numbers[1])]
    gold, given = (rf"{n} \times 10^{{{p}}}" for n, p in zip(numbers, powers, strict=True))
    bare = [(numbers[0], numbers[1])] if min(powers) < 0 and max(powers) == 0 else []
    return [(gold, given), *bare]


def _unit(quantity: re.Match[str]) -> str:
    """Return the unit of a quantity, without scales, spaces, braces and plural endings."""
    text = f"{quantity['coin'] or ''} {SCALE.sub('', quantity['unit'])}".replace("\\", "")
    for sign, name in COINS.items():
        text = text.replace(sign, f" {name} ")
    words = re.sub(r"[\s{}]+", " ", text.casefold()).split()
    return "".join(re.sub(r"(?<=\w\w)s$", "", word) for word in words)


def _other_base(right: str, answer: str) -> bool:
    """True if the numbers are written in two different bases."""
    bases = [BASE.fullmatch(re.sub(r"\s", "", _plain(text))) for text in (right, answer)]
    return all(bases) and bases[0][2] != bases[1][2]


def _marked(text: str) -> str | None:
    """Return the text marked as the answer: in the last box, else after the last ####."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip(" \t\r*") or None if mark else None


def _plain(text: str) -> str:
    """Return `text` without LaTeX commands that only change its appearance."""
    previous = None
    while previous != text:
        previous, text = text, STYLE.sub(r" \1 ", text)
    return SPACING.sub(" ", text).strip()


def _textual(text: str) -> bool:
    """True for a text that is no formula: a choice, words, a date, a time or a ratio."""
    plain = _plain(text)
    if NAMES.fullmatch(plain):
        return False
    if WORDS.fullmatch(plain) and len(plain) > 1:
        return VARIABLES.fullmatch(plain) is None
    return any(form.fullmatch(plain) for form in (CHOICE, DATE, COLON))


def _normal(text: str) -> str:
    """Return a form that is equal for texts of the same meaning: a choice's letter, or words in
    lower case without separators."""
    plain = _plain(text)
    if (choice := CHOICE.fullmatch(plain)) is not None:
        return choice[1]
    plain = re.sub(r"\s*([:/,-])\s*", r"\1", plain.casefold())
    return re.sub(r"[\s,;.!]+", " ", plain).strip(" '\"")


def _last_said(text: str) -> list[str]:
    """Return two candidates for an unmarked answer: the text after the last "the answer is" (or
    else the last line), and the first sentence of this text."""
    text = re.sub(r"[*`]+", "", text).strip()
    lines = text.splitlines() or [""]
    marks = [mark for mark in SAID.finditer(text) if text[mark.end() :].strip()]
    said = text[marks[-1].end() :].partition("\n")[0] if marks else lines[-1]
    return [said, re.split(r"[.!](?:\s|$)", said)[0]]
