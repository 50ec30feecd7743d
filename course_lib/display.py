"""What a notebook shows beside figures: tables, and numbers that the prose of the book repeats."""

from __future__ import annotations

import html
import inspect
from collections.abc import Sequence
from textwrap import dedent

#: Jupyter Book finds glued values under this prefix, which nothing renders, and drops what else comes with them.
_HIDDEN = "application/papermill.record/"


def glue(**values: object) -> None:
    """Hand computed values to the prose: ``glue(peak="28.95 GiB")`` is what ``{glue:text}`peak``` prints in the book.

    A notebook, where the prose has only the names, shows ``peak = 28.95 GiB``.

    Parameters
    ----------
    **values
        Name and value; the value is written as ``str`` gives it.
    """
    from IPython.display import display

    shown = {"text/plain": "\n".join(f"{name} = {value}" for name, value in values.items())}
    for name, value in values.items():
        metadata = {"scrapbook": {"name": name, "mime_prefix": _HIDDEN}}
        # Quoted, because the book evaluates what it can: a bare 1,480 would come out as the pair (1, 480).
        display({f"{_HIDDEN}text/plain": repr(str(value)), **shown}, raw=True, metadata=metadata)
        shown = {}  # once, for all of them


def table(headers: Sequence[object], rows: Sequence[Sequence[object]], *, caption: str = "") -> str:
    """Return an HTML table, its first column the rows' headings.

    Parameters
    ----------
    headers : sequence
        One per column, written as ``str`` gives it; so are the cells.
    rows : sequence of sequences
        Each as long as ``headers``.
    caption : str, optional
        What the table shows.

    Raises
    ------
    ValueError
        If a row is longer or shorter than the headers.
    """
    (names, *lines) = _cells(headers, rows)
    # Numbers stand flush right; a column that holds a sentence is set flush left.
    kinds = [
        ' class="words"' if any(len(cell.split()) > 3 for cell in column) else "" for column in zip(*lines, strict=True)
    ] or [""] * len(names)
    head = "".join(f'<th scope="col"{kind}>{html.escape(name)}</th>' for name, kind in zip(names, kinds, strict=True))
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in zip(rest, kinds[1:], strict=True))
        + "</tr>"
        for first, *rest in lines
    )
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f'<table class="course-table">{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def forms(headers: Sequence[object], rows: Sequence[Sequence[object]], *, caption: str = "") -> dict[str, str]:
    """Return a table (see :func:`table`) by media type: HTML, and plain text for terminals."""
    lines = [" | ".join(line) for line in _cells(headers, rows)]
    text = "\n".join([caption, *lines] if caption else lines)
    return {"text/html": table(headers, rows, caption=caption), "text/plain": text}


def show_table(headers: Sequence[object], rows: Sequence[Sequence[object]], *, caption: str = "") -> None:
    """Display a table (see :func:`table`) with a plain-text form for terminals."""
    from IPython.display import display

    display(forms(headers, rows, caption=caption), raw=True)


def excerpt(of: object, first: str = "", last: str = "") -> str:
    """Return lines of a definition's source, from the one that contains `first` to the next that contains `last`.

    Parameters
    ----------
    of : object
        A function, a class or a Triton kernel. It is read from its file, so a chapter shows what runs.
    first, last : str
        Part of the first and of the last line; empty for the definition's own first and last line.

    Raises
    ------
    ValueError
        If no line contains `first`, or none from there on `last`.
    """
    lines = inspect.getsource(getattr(of, "fn", of)).splitlines()  # type: ignore[arg-type]
    start = next((number for number, line in enumerate(lines) if first in line), None)
    if start is None:
        raise ValueError(f"first is {first!r}, which no line of the definition contains")
    stop = next((number for number, line in enumerate(lines[start:], start) if last in line), None)
    if stop is None:
        raise ValueError(f"last is {last!r}, which no line from {lines[start].strip()!r} on contains")
    return dedent("\n".join(lines[start : stop + 1] if last else lines[start:]))


def show_source(of: object, first: str = "", last: str = "") -> None:
    """Display lines of a definition's source as code; parameters and errors are those of :func:`excerpt`."""
    from IPython.display import display

    text = excerpt(of, first, last)
    display({"text/markdown": f"```python\n{text}\n```", "text/plain": text}, raw=True)


def _cells(headers: Sequence[object], rows: Sequence[Sequence[object]]) -> list[list[str]]:
    """Return headers and rows as text."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells, the table {len(headers)} columns: {list(row)!r}")
    return [[str(cell) for cell in row] for row in (headers, *rows)]
