"""Which outputs the book shows: those of the last run where its code is current, else the stored ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from course_lib import claims

LOGGER = logging.getLogger(__name__)
WIDGET = "application/vnd.jupyter.widget-view+json"


def read(path: Path) -> dict[str, Any]:
    """Return a notebook's JSON."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a notebook's code cells in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed_path(env: BuildEnvironment, docname: str) -> Path:
    """Return where the last run left the executed copy of a notebook, whether or not it is there."""
    return Path(env.srcdir, "_build", "executed", f"{docname}.ipynb")


def outputs_path(env: BuildEnvironment, docname: str) -> Path:
    """Return the file whose outputs this build shows: the executed copy if its code is current, else the notebook."""
    source, executed = Path(env.doc2path(docname)), executed_path(env, docname)
    if os.environ.get("COURSE_OUTPUTS") == "stored" or not executed.exists():
        return source
    old, new = ([str("".join(cell["source"])) for cell in code_cells(read(path))] for path in (executed, source))
    return executed if old == new else source


def notebooks(env: BuildEnvironment) -> dict[str, Path]:
    """Return each notebook of the book, by page name, with the file whose outputs are shown."""
    pages = (page for page in sorted(env.found_docs) if env.doc2path(page).endswith(".ipynb"))
    return {page: outputs_path(env, page) for page in pages}


def page_output(output: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a page shows of an output: no claim record, and of a widget only its static form, if it has one."""
    data = output.get("data", {})
    kept = {mime: value for mime, value in data.items() if mime not in (claims.MIME, WIDGET)}
    if WIDGET in data and kept.keys() <= {"text/plain"}:
        return None
    return output | {"data": kept} if data else output


def fingerprint(path: Path) -> tuple[str, int]:
    """Return what tells one state of a file from another."""
    return str(path), path.stat().st_mtime_ns


def use_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the chosen outputs into a notebook's text as Sphinx reads it; its prose stays the repository's."""
    if not app.env.doc2path(docname).endswith(".ipynb"):
        return
    page, path = json.loads(source[0]), outputs_path(app.env, docname)
    stored, executed = Path(app.env.doc2path(docname)), executed_path(app.env, docname)
    if path == stored and executed.exists() and os.environ.get("COURSE_OUTPUTS") != "stored":
        LOGGER.warning("the code changed after the last run; run the notebook again", location=docname, type="course")
    page["metadata"].pop("widgets", None)
    for cell, run in zip(code_cells(page), code_cells(read(path)), strict=True):
        cell["outputs"] = [shown for output in run["outputs"] if (shown := page_output(output))]
    source[0] = json.dumps(page)
    vars(app.env).setdefault("course_outputs", {})[docname] = fingerprint(path)


def changed_outputs(app: Sphinx, env: BuildEnvironment, added: Any, changed: Any, removed: Any) -> list[str]:
    """Name the pages whose outputs changed although their notebook did not."""
    known: dict[str, tuple[str, int]] = getattr(env, "course_outputs", {})
    return [page for page, path in notebooks(env).items() if known.get(page, ()) != fingerprint(path)]
