"""Write the tables of request fields in docs/agents.md, with the gateway's treatment of each field.

python scripts/adapters/tabulate_fields.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.parts.adapters.gateway.server import ROUTES
from scripts.csv_tables import REPOSITORY, put

PAGE = REPOSITORY / "docs" / "agents.md"


def table(api: ModuleType) -> str:
    """Return a table with a row for all fields that the gateway treats alike."""
    fields: dict[str, list[str]] = {}
    for field, becomes in api.FIELDS.items():
        fields.setdefault(becomes, []).append(f"`{field}`")
    rows = [f"| {', '.join(names)} | {becomes} |" for becomes, names in fields.items()]
    return "\n".join(["| field | what becomes of it |", "|---|---|", *rows])


def text() -> str:
    return "\n\n".join(f"`POST {path}`:\n\n{table(api)}" for path, api in ROUTES.items())


if __name__ == "__main__":
    put(PAGE, "fields", text())
