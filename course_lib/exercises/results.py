"""What students earned, and what they are told: never a text of their own making, which could quote the hidden tests."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.exercises import checks, tensors

if TYPE_CHECKING:
    from rich.table import Table

#: Also on a busy machine, where a cell's imports alone may take half of it.
SECONDS_PER_CELL = 60


@dataclass(frozen=True)
class Mark:
    """What one exercise earned.

    Attributes
    ----------
    exercise : str
        The exercise's id, which is the ``grade_id`` of its test cell.
    points, max_points : float
        Points earned and to be earned.
    message : str
        Why points are missing; empty where none are.
    """

    exercise: str
    points: float
    max_points: float
    message: str = ""


@dataclass(frozen=True)
class Result:
    """What one student earned in one exercise notebook.

    Attributes
    ----------
    student, chapter : str
        The submission's folder and the notebook's name without its ending.
    marks : tuple of Mark
        One for each exercise, in the notebook's order.
    error : str
        Why the notebook could not be graded; empty where it could.
    """

    student: str
    chapter: str
    marks: tuple[Mark, ...]
    error: str = ""

    @property
    def points(self) -> float:
        """Points earned in all exercises."""
        return sum(mark.points for mark in self.marks)

    @property
    def max_points(self) -> float:
        """Points to be earned in all exercises."""
        return sum(mark.max_points for mark in self.marks)


def rows(results: Iterable[Result]) -> Iterator[dict[str, Any]]:
    """Yield one flat record for each student and exercise, for JSON and CSV."""
    for result in results:
        for mark in result.marks:
            yield {
                "student": result.student,
                "chapter": result.chapter,
                "exercise": mark.exercise,
                "points": mark.points,
                "max_points": mark.max_points,
                "message": result.error or mark.message,
            }


def table(results: Sequence[Result]) -> Table:
    """Return the results as a table for the terminal: one row for each notebook, its exercises side by side in one cell."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table("student", "chapter", "exercises")
    shown.add_column("total", justify="right")
    for result in results:
        # Without a space, so that points stay with their exercise when the line is wrapped.
        points = ", ".join(f"{mark.exercise}:{mark.points:g}/{mark.max_points:g}" for mark in result.marks)
        total = f"{result.points:g}/{result.max_points:g}" + (" (not graded)" if result.error else "")
        shown.add_row(escape(result.student), result.chapter, points, total)
    return shown


def write_feedback(results: Iterable[Result], folder: Path | str) -> list[Path]:
    """Write ``folder/<student>/<chapter>.md``: points and what went wrong, for the student.

    nbgrader's own feedback pages show the hidden tests' source and tracebacks. These hold no text but the course's own:
    which kind of test failed, and the explanations that it gave.
    """
    written = []
    for result in results:
        lines = [f"# {result.chapter}: {result.points:g} of {result.max_points:g} points", ""]
        lines += [result.error, ""] if result.error else []
        for mark in result.marks:
            lines += [f"- **{mark.exercise}**: {mark.points:g} of {mark.max_points:g}. {mark.message}".rstrip()]
        path = Path(folder) / result.student / f"{result.chapter}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        written.append(path)
    return written


def explain(cell: Any) -> str:
    """Return why a test cell failed, in the course's own words: any text of an error can be a student's that quotes the tests."""
    for output in cell.outputs:
        if output.output_type == "error":
            if output.ename == "WrongAnswer":
                unseen = checks.CASE_YOU_CANNOT_SEE in output.evalue
                reasons = " Or: ".join(reason for reason in _explanations() if reason in output.evalue)
                where = checks.CASE_YOU_CANNOT_SEE if unseen else "a visible test, which shows the values"
                return f"Wrong for {where}. {reasons}".rstrip()
            if output.ename in ("KeyboardInterrupt", "CellTimeoutError"):
                return f"Your function was stopped after {SECONDS_PER_CELL} seconds."
            kind = getattr(builtins, output.ename, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return f"{output.ename}: run the visible tests to see more."
            return "Your code raises an exception of its own."
        if output.output_type == "stream" and output.name == "stderr":
            return "Your function writes to standard error (a warning?), which counts as failed."
    return ""


@cache
def _explanations() -> tuple[str, ...]:
    """Return the sentences by which `check` explains mistakes: its own, and the keys of the dicts in this package."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(Path(__file__).parent.glob("*.py"))]
    keys = [key for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    texts = [str(key.value) for key in keys if isinstance(key, ast.Constant) and " " in str(key.value)]
    own = (checks.FORGOTTEN_RETURN, checks.INT_NEEDED, checks.FLOAT_NEEDED, checks.UNKNOWN, *tensors.SENTENCES)
    return tuple(dict.fromkeys((*own, *texts)))
