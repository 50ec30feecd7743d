"""Worked examples of the decision guide, computed while the book is built."""

from __future__ import annotations

import shlex

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from course_lib.memory import Advice, advise

from .pieces import collapsed, fields, table


class CourseAdvice(SphinxDirective):  # type: ignore[misc]
    """``{course-advice} MODEL``: what ``course advise`` says, with the options of the same names."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012 - docutils' own form
        "gpu": directives.unchanged_required,
        "context": directives.positive_int,
        "batch": directives.positive_int,
        "goal": directives.unchanged_required,
        "new-tokens": directives.nonnegative_int,
        "prefill-chunk": directives.positive_int,
    }

    def run(self) -> list[nodes.Node]:
        """Compute the advice anew in every build, since any part of the library may have changed."""
        self.env.note_reread()
        model = self.arguments[0]
        given = {name.replace("-", "_"): value for name, value in self.options.items()}
        given["batch_size"] = given.pop("batch", 1)
        try:
            found = advise(model, **given)
        except (TypeError, ValueError, OSError) as error:
            raise self.error(f"course-advice: {error}") from None
        options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in self.options.items())
        command = nodes.literal_block("", f"course advise {model} {options}", language="bash")
        return [command, nodes.paragraph(text=f"{found.model} on {found.card.name}: {found.summary}"), *shown(found)]


def shown(found: Advice) -> list[nodes.Node]:
    """Return the steps as a table, the rows with their reasons, and the arithmetic, collapsed."""
    headers, rows = found.table()
    reasons = fields(*((f"Row {row.number}: {row.verdict}", [nodes.Text(row.reason)]) for row in found.rows))
    others = [f"{step.name}: {step.told}" for row in found.rows for step in row.what_if]
    listed = (
        [nodes.bullet_list("", *(nodes.list_item("", nodes.paragraph(text=told)) for told in others))] if others else []
    )
    lines = "\n".join(
        "\n".join([f"{name}:", *(f"  {line}" for line in told)]) for name, told in found.arithmetic.items()
    )
    arithmetic = nodes.literal_block("", lines, language="text")
    return [
        table([header[0].upper() + header[1:] for header in headers], rows, "course-status"),
        reasons,
        *(collapsed("What else would do", *listed) if listed else []),
        *collapsed("The arithmetic, every number with its inputs", arithmetic),
    ]
