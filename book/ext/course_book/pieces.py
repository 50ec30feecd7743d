"""Small pieces that the generated parts of a page are built from."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from docutils import nodes


def badge(verdict: str, text: str | None = None) -> nodes.inline:
    """Return a verdict as a coloured label that says it in words too."""
    return nodes.inline(text=text or verdict, classes=["course-verdict", f"course-verdict-{verdict.replace(' ', '-')}"])


def fields(*rows: tuple[str, list[nodes.Node]]) -> nodes.field_list:
    """Return named values as a description list."""
    listed = nodes.field_list(classes=["course-fields"])
    for name, content in rows:
        listed += nodes.field("", nodes.field_name(text=name), nodes.field_body("", nodes.paragraph("", "", *content)))
    return listed


def table(head: Sequence[str], rows: Iterable[Sequence[str | list[nodes.Node]]], name: str) -> nodes.table:
    """Return a table of texts or nodes, with a class of its own.

    Every cell but a row's first carries its column's name, which the style sheet shows where there is no room for columns.
    """

    def line(cells: Iterable[str | list[nodes.Node]], names: Sequence[str] = ()) -> nodes.row:
        shown = [[nodes.Text(cell)] if isinstance(cell, str) else cell for cell in cells]
        for cell, label in zip(shown[1:], names[1:], strict=False):
            cell.insert(0, nodes.inline(text=f"{label}: ", classes=["course-label"]))
        return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in shown))

    columns = (nodes.colspec(colwidth=1) for _ in head)
    parts = (nodes.thead("", line(head)), nodes.tbody("", *(line(row, head) for row in rows)))
    return nodes.table("", nodes.tgroup("", *columns, *parts, cols=len(head)), classes=["colwidths-auto", name])


def collapsed(summary: str, *content: nodes.Node, anchor: str = "") -> list[nodes.Node]:
    """Return content that a reader opens: the browser's own element, which needs no script and obeys the keyboard."""
    opened = (
        f'<details class="course-details" id="{html.escape(anchor)}">' if anchor else '<details class="course-details">'
    )
    return [
        nodes.raw("", f"{opened}<summary>{html.escape(summary)}</summary>", format="html"),
        *content,
        nodes.raw("", "</details>", format="html"),
    ]
