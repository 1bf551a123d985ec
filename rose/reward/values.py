"""The one definition of a reward, a number and a truth value, for all sources.

All code that receives a reward (of an environment's step, env.args.reward, reward=function, an
agent's function, file or call, verifiers) converts it here. A reward is a number or bool of Python
or NumPy, or an array or tensor of one element. A text is no reward.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any

import msgspec

# Largest magnitude of a reward. The trainer holds rewards and sums of squared gradients in float32,
# whose largest value is 3e38. These sums grow with the square of the rewards in algorithms that
# don't divide by the standard deviation.
MOST_REWARD = 1e15

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
_repr.maxlevel = 3


def shown(value: Any) -> str:
    """Return a short text of `value` for a message, even where its own repr raises."""
    return _repr.repr(value)


def number(value: Any) -> float:
    """Return `value` as a float. Raises `ValueError` if it is no number."""
    if type(value) is float:
        return value
    if callable(getattr(value, "item", None)):  # values of NumPy and torch
        try:
            value = _item(value)
        except Exception:  # Each library has its own error for several elements.
            raise ValueError("not one number") from None
    if isinstance(value, str | bytes | bytearray) or not (
        hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    ):
        raise ValueError("not a number")
    try:
        return float(value)
    except OverflowError:  # an integer of 400 digits
        return math.inf if value > 0 else -math.inf
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"not a number: {error}") from None


def reward(value: Any) -> float:
    """Return `value` as a reward. Raises `ValueError` if it isn't finite or is too large."""
    try:
        found = number(value)
    except ValueError:
        raise ValueError(f"the reward {shown(value)}, which is no number") from None
    if not math.isfinite(found):
        raise ValueError(f"the reward {shown(value)}, which is not finite")
    if abs(found) > MOST_REWARD:
        raise ValueError(
            f"the reward {shown(value)}; rewards lie between -{MOST_REWARD:g} and {MOST_REWARD:g}"
        )
    return found


def flag(value: Any) -> bool:
    """Return a bool, or a number that is 0 or 1, as a bool. Raises `ValueError` for others."""
    if type(value) is bool:
        return value
    found = number(value)
    if found not in (0.0, 1.0):
        raise ValueError("neither true nor false")
    return bool(found)


def to_json(value: Any) -> Any:
    """Convert a value for JSON, as the `default` of `json.dumps`: NumPy's and torch's values to
    Python's, structs to objects. Raises `TypeError` for a value that JSON can't express."""
    if callable(getattr(value, "item", None)):
        try:
            value = _item(value)
        except Exception:
            raise TypeError(f"{shown(value)} is not one value") from None
        if isinstance(value, bool | int | float | str):
            return value
    if hasattr(type(value), "__float__"):  # such as decimal.Decimal
        return number(value)
    return msgspec.to_builtins(value, enc_hook=_unknown)


def _item(value: Any) -> Any:
    """Return the one element of an array or tensor. Raises `ValueError` for a masked NumPy value,
    whose `item` is 0, and passes on the library's own errors."""
    if type(value).__module__.startswith("numpy.ma") and value.mask.any():
        raise ValueError("masked")
    return value.item()


def _unknown(value: Any) -> Any:
    """Convert a value that msgspec can't convert itself."""
    if callable(getattr(value, "item", None)) or hasattr(type(value), "__float__"):
        return to_json(value)
    raise TypeError(f"{shown(value)} is no JSON")
