"""Build a report page around its sections: one HTML file that opens offline, light and dark.

Text and tables are HTML. The page's scripts draw the figures from numbers embedded in the file. A
content security policy forbids the page every network access.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import msgspec


def page(
    kind: str,
    title: str,
    subtitle: str,
    facts: Sequence[tuple[str, str]],
    body: str,
    data: Any,
    scripts: Sequence[str],
) -> str:
    """Return the file's content.

    `kind`: kind of report, such as "training". `title` and `facts` (name, value) are plain text;
    `subtitle` and `body` are HTML. `data`: the scripts' constant DATA. `scripts`: JavaScript
    sources, one of which defines drawAll(). They may use the functions of charts.js.
    """
    own = files("rose.parts.report") / "page"
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    return Template((own / "shell.html").read_text(encoding="utf-8")).substitute(
        kind=escape(kind),
        title=escape(title),
        subtitle=subtitle,
        facts=listed,
        body=body,
        data=embed(data),
        style=(own / "report.css").read_text(encoding="utf-8"),
        scripts="\n".join([(own / "charts.js").read_text(encoding="utf-8"), *scripts]),
    )


def embed(data: Any) -> str:
    """Return the data as JSON that is safe inside a <script>, whatever strings it has."""
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return text.replace("\u2028", " ").replace("\u2029", " ")


def section(title: str, body: str) -> str:
    """Return the HTML of one section with the heading `title`."""
    name = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{body}\n</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], listed: bool = False) -> str:
    """Return a table that scrolls by itself; cells are HTML. "" without rows. The first cell of a
    row is its title, except in a list of events (`listed`), whose last cells are long text."""
    body = "".join(f"<tr>{_cells(row, listed)}</tr>" for row in rows)
    titles = "".join(f"<th scope=col>{title}</th>" for title in head)
    kind = " class=list" if listed else ""
    content = f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return f"<div class=scroll><table{kind}>{content}</table></div>" if body else ""


def _cells(row: Sequence[str], listed: bool) -> str:
    if listed:
        return "".join(f"<td>{cell}</td>" for cell in row[:-1]) + f"<td class=text>{row[-1]}</td>"
    return f"<th scope=row>{row[0]}</th>" + "".join(f"<td>{cell}</td>" for cell in row[1:])


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def figures(*names: str) -> str:
    """Return empty figures, which the scripts draw, side by side if the page is wide enough."""
    return '<div class="pair">\n' + "\n".join(map(figure, names)) + "\n</div>"


def figure(name: str) -> str:
    return f'<figure id="fig-{name}"></figure>'
