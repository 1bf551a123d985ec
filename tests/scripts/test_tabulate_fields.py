"""docs/agents.md says of each field of a request what the code makes of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import tabulate_fields


def test_the_docs_have_the_tables_of_the_code():
    assert tabulate_fields.text() in tabulate_fields.PAGE.read_text(encoding="utf-8")
