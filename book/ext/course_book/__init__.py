"""The book's Sphinx extension: outputs of the last run, claims ledger, status page, compiled kernels, advice,
links into the library.

The book never executes a notebook. ``book/scripts/build.py`` leaves executed copies under ``_build/executed``; where
such a copy has the same code as the notebook in the repository, the book shows the copy's outputs, else the stored
ones. With ``COURSE_OUTPUTS=stored`` in the environment it shows the stored ones always.
"""

from __future__ import annotations

import os
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from .advice import CourseAdvice
from .compiled import CompileReport
from .library import CourseCode, CourseSource
from .outputs import changed_outputs, use_outputs
from .pages import ClaimsLedger, ExecutionStatus
from .serving import ServingSizes


def repair_roles(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Make a bibliography the list of list items that screen readers expect; docutils gives its entries a retired role."""
    context["body"] = context.get("body", "").replace('role="doc-biblioentry"', 'role="listitem"')


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    wanted = os.environ.get("COURSE_OUTPUTS", "executed")
    if wanted not in ("executed", "stored"):
        raise ExtensionError(f"COURSE_OUTPUTS is {wanted!r}; accepted are 'executed' (the default) and 'stored'")
    app.add_directive("claims-ledger", ClaimsLedger)
    app.add_directive("execution-status", ExecutionStatus)
    app.add_directive("compile-report", CompileReport)
    app.add_directive("course-advice", CourseAdvice)
    app.add_directive("serving-sizes", ServingSizes)
    app.add_directive("course-code", CourseCode)
    app.add_role("course-source", CourseSource())
    app.connect("source-read", use_outputs)
    app.connect("env-get-outdated", changed_outputs)
    app.connect("html-page-context", repair_roles)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
