"""The gates of `make lint` that scripts/house.py holds."""

import ast
import tomllib

import pytest

from scripts import house
from scripts import house_kinds as kinds


def kinds_in(tmp_path, source: str) -> list[str]:
    """The kinds of findings in a file with this source, apart from its lines."""
    path = tmp_path / "file.py"
    path.write_text(source, encoding="utf-8")
    return [each.kind for each in kinds.of_file(path, tmp_path) if each.kind != "lines"]


def function(lines: int) -> str:
    return "def f():\n" + "    f()\n" * (lines - 1)


def attributes(number: int) -> str:
    body = [f"    a{i}: int" for i in range(number - 1)] + ["    def f(self): self.b = self.b = 1"]
    return "class C:\n" + "\n".join(body) + "\n"


@pytest.mark.parametrize(
    "source, found",
    [
        (function(60), []),
        (function(61), ["functions"]),
        (function(61).replace("def", "async def"), ["functions"]),
        ("x = 1\n" * 450, []),
        ("x = 1\n" * 451, ["files"]),
        (attributes(20), []),
        (attributes(21), ["classes"]),
        ('"""Return the mean."""', []),
        ('"""Of each worker."""', ["prose"]),
        ('def f():\n    """Whether it is."""', ["prose"]),
        ('"""Often right."""', []),
        ('"""Start anew, in vain."""', ["prose", "prose"]),
        ("x = 1  # seconds", []),
        ("x = 1  # of the last decision", ["prose"]),
        ("# of the last decision", []),
        ("# It was told so.", ["prose"]),
        ("x = 'told'", []),
        ("import x  # noqa: F401", []),
    ],
)
def test_each_kind_is_found(tmp_path, source, found):
    ast.parse(source)
    assert kinds_in(tmp_path, source) == found


def test_lines_are_counted(tmp_path):
    (tmp_path / "file.py").write_text("x = 1\n\n", encoding="utf-8")
    [found] = kinds.of_file(tmp_path / "file.py", tmp_path)
    assert (found.kind, found.count) == ("lines", 2)


def test_a_count_above_its_limit_or_without_one_is_exceeded():
    counts = {"rose/comm": {"lines": 11, "types": 0}, "rose/new": {"lines": 5}}
    limits = {"rose/comm": {"lines": 10, "types": 0}}
    assert house.exceeded(counts, limits) == [
        ("rose/comm", "lines", 11, 10),
        ("rose/new", "lines", 5, 0),
    ]
    assert house.exceeded(counts, house.lowered(counts, {})) == []


def test_limits_are_lowered_and_never_raised():
    counts = {"rose": {"lines": 1010, "types": 5}, "closures": {"engine": 101}}
    limits = {"rose": {"lines": 2000, "types": 3}, "rose/gone": {"lines": 1}}
    new = house.lowered(counts, limits)
    assert new == {"rose": {"lines": 1050, "types": 3}, "closures": {"engine": 150}}
    assert tomllib.loads(house.written(new)) == new


@pytest.mark.parametrize(
    "line, found",
    [
        ("open(path)", 1),
        ("open(path, 'w')", 1),
        ("open(path, mode='a')", 1),
        ("path.open('r+')", 1),
        ("os.fdopen(file)", 1),
        ("path.read_text()", 1),
        ("path.write_text(text)", 1),
        ("path.read_text(errors='replace')", 1),
        ("open(path, 'rb')", 0),
        ("open(path, encoding='utf-8')", 0),
        ("path.read_text('utf-8')", 0),
        ("path.write_text(text, 'utf-8')", 0),
        ("path.open('wb')", 0),
        ("os.open(path, flags)", 0),
        ("gateway.open()", 0),
    ],
)
def test_text_files_are_opened_with_their_encoding(line, found):
    assert len(kinds.without_encoding(line)) == found
