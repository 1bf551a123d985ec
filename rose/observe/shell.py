"""What every report page is around its sections: one HTML file that opens offline, in any browser,
in light and dark.

Text and tables come as HTML; the figures are drawn by the page's scripts from numbers embedded in
the file. A content security policy forbids the page every network access.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The file's content.

    `kind`: of report, such as "training". `title` and `facts` (name, value) are plain text;
    `subtitle` and `body` are HTML. `data`: what the scripts find as DATA. `scripts`: JavaScript
    sources, of which one defines drawAll(); they find what charts.js defines.
    """
    own = files("rose.observe") / "page"
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    return Template((own / "shell.html").read_text()).substitute(
        kind=escape(kind),
        title=escape(title),
        subtitle=subtitle,
        facts=listed,
        body=body,
        data=embed(data),
        style=(own / "report.css").read_text(),
        scripts="\n".join([(own / "charts.js").read_text(), *scripts]),
    )


def embed(data: Any) -> str:
    """JSON that can stand inside a <script> whatever strings are in it."""
    return (
        msgspec.json.encode(data)
        .decode()
        .replace("<", "\\u003c")
        .replace("\u2028", " ")
        .replace("\u2029", " ")
    )


def section(title: str, body: str) -> str:
    """HTML of one section, its heading `title`."""
    name = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{body}\n</section>'


def figures(*names: str) -> str:
    """Places of figures that stand side by side where the page is wide."""
    return '<div class="pair">\n' + "\n".join(map(figure, names)) + "\n</div>"


def figure(name: str) -> str:
    return f'<figure id="fig-{name}"></figure>'
