"""Safe, exact arithmetic on expressions that a model wrote: an `ast` walk, never `eval`.

Numbers are fractions, so there is no rounding and 0.1 + 0.2 is 0.3. Length, nodes, digits and
exponents are bounded, so that no expression costs more than some microseconds or kilobytes. Not
supported: names, functions, comparisons, roots.
"""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_NODES = 100
MAX_BITS = 512  # bits of a numerator or denominator
MAX_EXPONENT = 64

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ArithmeticRefused(ValueError):
    """The expression is malformed, too large or without a value. The policy may read the text."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value. Raises `ArithmeticRefused`."""
    return _value(parse(expression))


def number(text: str) -> Fraction:
    """Return the value of a number with or without a sign. Raises `ArithmeticRefused`."""
    node = parse(text)
    while isinstance(node, ast.UnaryOp):
        node = node.operand
    if not isinstance(node, ast.Constant):
        raise ArithmeticRefused("the value must be a number, not an expression")
    return evaluate(text)


def parse(expression: str) -> ast.expr:
    """Return the expression's syntax tree, of bounded size. Raises `ArithmeticRefused`."""
    if len(expression) > MAX_CHARACTERS:
        raise ArithmeticRefused(f"expression longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ArithmeticRefused("not an arithmetic expression") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ArithmeticRefused("expression too long")
    return tree


def numbers(expression: str) -> list[Fraction]:
    """Return the numbers in the expression, sorted. Raises `ArithmeticRefused`."""
    return sorted(
        _number(node) for node in ast.walk(parse(expression)) if isinstance(node, ast.Constant)
    )


def format_number(value: Fraction) -> str:
    """Write an integer with all its digits, and a fraction with 12 significant decimal digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        return f"{value.numerator}/{value.denominator}"


def _number(node: ast.Constant) -> Fraction:
    """Return the exact value of a literal."""
    if type(node.value) not in (int, float) or node.value != node.value or abs(node.value) > 1e100:
        raise ArithmeticRefused("only numbers, + - * / // % ** and parentheses")
    # str() of a float gives the number as written (up to 17 digits), so that 0.1 is one tenth.
    return Fraction(str(node.value)) if isinstance(node.value, float) else Fraction(node.value)


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of a syntax tree."""
    match node:
        case ast.Constant():
            return _number(node)
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            left, right = _value(node.left), _value(node.right)
            if isinstance(node.op, ast.Pow) and (
                right.denominator != 1 or abs(right) > MAX_EXPONENT
            ):
                raise ArithmeticRefused(
                    f"an exponent must be an integer from -{MAX_EXPONENT} to {MAX_EXPONENT}"
                )
            try:
                result = Fraction(_BINARY[type(node.op)](left, right))
            except ZeroDivisionError:
                raise ArithmeticRefused("division by zero") from None
            if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
                raise ArithmeticRefused("number too large")
            return result
    raise ArithmeticRefused("only numbers, + - * / // % ** and parentheses")
