"""The gates of `make lint` that scripts/house.py holds."""

import tomllib

import pytest

from scripts import house


def function(lines):
    return "def f():\n" + "    f()\n" * (lines - 1)


def attributes(number):
    body = "\n".join(f"    a{i}: int" for i in range(number - 1))
    return f"class C:\n{body}\n    def f(self): self.b = self.b = 1\n"


@pytest.mark.parametrize(
    "source, found",
    [
        (function(60) + "x = 1\n" * 390 + attributes(20), ["files"]),
        (function(61).replace("def", "async def"), ["functions"]),
        (attributes(21), ["classes"]),
        ('"""Return the mean."""\nx = 1  # seconds\n# of the last decision', []),
        ('"""Of each worker."""', ["prose"]),
        ('"""Start anew, in vain."""', ["prose", "prose"]),
        ("x = 'told'  # of the last decision\n# It was told so.", ["prose", "prose"]),
    ],
)
def test_each_kind_is_found_and_lines_are_counted(tmp_path, source, found):
    (tmp_path / "file.py").write_text(source, encoding="utf-8")
    lines, *others = house.of_file(tmp_path / "file.py", tmp_path)
    assert (lines.kind, lines.count) == ("lines", len(source.splitlines()))
    assert [each.kind for each in others] == found


def test_a_limit_is_lowered_and_never_raised_and_a_count_above_it_is_named():
    counts = {"rose": {"lines": 1010, "types": 5}, "closures": {"engine": 101}}
    limits = {"rose": {"lines": 2000, "types": 3}, "rose/gone": {"lines": 1}}
    new = house.lowered(counts, limits)
    assert new == {"rose": {"lines": 1050, "types": 3}, "closures": {"engine": 150}}
    assert tomllib.loads(house.written(new)) == new
    assert house.exceeded(counts, new) == [("rose", "types", 5, 3)]
    assert house.exceeded({"new": {"lines": 5}}, new) == [("new", "lines", 5, 0)]


TEXT = "open(p)|open(p, mode='a')|p.open('r+')|os.fdopen(f)|p.read_text()|p.write_text(t)"
OTHERS = (
    "open(p, 'rb')|open(p, encoding='utf-8')|p.read_text('utf-8')|os.open(p, flags)|gate.open()"
)


def test_text_files_are_opened_with_their_encoding():
    assert all(len(house.without_encoding(line)) == 1 for line in TEXT.split("|"))
    assert not any(house.without_encoding(line) for line in OTHERS.split("|"))
