"""Write the tables of the docs that list what the code has.

    python scripts/tabulate_code.py

docs/configuration.md gets the features that exclude each other, docs/agents.md the fields of
requests, with the gateway's treatment of each field.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.launch.exclusions import EXCLUSIONS
from rose.parts.adapters.gateway.server import ROUTES
from scripts.csv_tables import REPOSITORY, markdown, put


def exclusions() -> str:
    """Return a table with a row for each feature: which are impossible, or not tried, with it."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for row in EXCLUSIONS:
        impossible, untried = found.setdefault(row.other.name, ([], []))
        (impossible if row.because else untried).append(row.feature.name)
    rows = [(name, ", ".join(a), ", ".join(b)) for name, (a, b) in found.items()]
    return markdown(("feature", "impossible with it", "not tried with it"), rows)


def fields() -> str:
    """Return a table for each API, with a row for all fields that the gateway treats alike."""
    tables = []
    for path, api in ROUTES.items():
        found: dict[str, list[str]] = {}
        for field, becomes in api.FIELDS.items():
            found.setdefault(becomes, []).append(f"`{field}`")
        rows = [(", ".join(names), becomes) for becomes, names in found.items()]
        tables.append(f"`POST {path}`:\n\n{markdown(('field', 'what becomes of it'), rows)}")
    return "\n\n".join(tables)


TABLES = {exclusions: "configuration.md", fields: "agents.md"}

if __name__ == "__main__":
    for table, page in TABLES.items():
        put(REPOSITORY / "docs" / page, table.__name__, table())
