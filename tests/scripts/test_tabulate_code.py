"""The docs have the tables of what the code has."""

import pytest

from scripts import tabulate_code


@pytest.mark.parametrize(("table", "page"), tabulate_code.TABLES.items())
def test_the_docs_have_the_tables_of_the_code(table, page):
    text = (tabulate_code.REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    assert table() in text
