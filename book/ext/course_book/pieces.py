"""Small pieces that the generated parts of a page are built from."""

from __future__ import annotations

import html

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
