"""docs/agents.md says of each field of a request what the code makes of it."""

from scripts.adapters import tabulate_fields


def test_the_docs_have_the_tables_of_the_code():
    assert tabulate_fields.text() in tabulate_fields.PAGE.read_text(encoding="utf-8")
