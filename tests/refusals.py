"""Tables in text, mostly of refusals: what is given, and what must be said about it."""

import contextlib
import re
from collections.abc import Iterator

import pytest

from rose.config import ConfigError


def table(text: str) -> list[tuple[str, list[str]]]:
    """Rows `GIVEN -> WORDS | MORE WORDS`, a line each; one that begins with a blank continues the
    line above."""
    lines = re.sub(r"\n +", " ", text.strip()).splitlines()
    pairs = [re.split(" +-> +", line) for line in lines]
    return [(given, re.split(r" +\| +", words)) for given, words in pairs]


@contextlib.contextmanager
def refused(words: list[str]) -> Iterator[None]:
    """A `ConfigError` must be raised within, whose message has all of `words`."""
    with pytest.raises(ConfigError) as error:
        yield
    assert all(word in str(error.value) for word in words), error.value
