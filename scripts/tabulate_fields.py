"""Write the tables of request fields in docs/agents.md: what the gateway makes of each.

python scripts/tabulate_fields.py
"""

from __future__ import annotations

from types import ModuleType

from csv_tables import REPOSITORY, put

from rose.agent.gateway.server import ROUTES

PAGE = REPOSITORY / "docs" / "agents.md"


def table(api: ModuleType) -> str:
    """Return rows of fields that share what becomes of them."""
    fields: dict[str, list[str]] = {}
    for field, becomes in api.FIELDS.items():
        fields.setdefault(becomes, []).append(f"`{field}`")
    rows = [f"| {', '.join(names)} | {becomes} |" for becomes, names in fields.items()]
    return "\n".join(["| field | what becomes of it |", "|---|---|", *rows])


def text() -> str:
    return "\n\n".join(f"`POST {path}`:\n\n{table(api)}" for path, api in ROUTES.items())


if __name__ == "__main__":
    put(PAGE, "fields", text())
