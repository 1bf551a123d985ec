"""The rule of `make lint` on text files: each is opened with its encoding."""

import pytest

from scripts import house


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
    assert len(house.without_encoding(line)) == found
