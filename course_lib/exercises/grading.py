"""Hand out the exercise notebooks and grade what comes back, with nbgrader in a temporary course folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from course_lib import publishing

if TYPE_CHECKING:
    from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_CELL = 30
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


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


def sources() -> dict[str, Path]:
    """Return the exercise notebooks with solutions and hidden tests, by name (``"01-memory"``).

    Raises
    ------
    FileNotFoundError
        If this is not a checkout of the course: an installed package does not carry the notebooks.
    """
    folder = ROOT / "notebooks" / "exercises"
    found = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not found:
        raise FileNotFoundError(f"no exercise notebooks in {folder}; run this from a checkout of the course")
    return found


def release(destination: Path | str, chapters: Sequence[str] | None = None) -> list[Path]:
    """Write the students' versions of the exercise notebooks: no solutions, no hidden tests, no outputs.

    Parameters
    ----------
    destination : path
        Folder to write into; made if missing.
    chapters : sequence of str, optional
        Names such as ``"01-memory"``, or their numbers, ``"01"``; all by default.

    Returns
    -------
    list of Path
        The notebooks written.

    Raises
    ------
    ValueError
        If no exercise notebook has one of the names.
    FileExistsError
        If the folder already holds one of the notebooks, which may be a student's work.
    ModuleNotFoundError
        If nbgrader is not installed.
    """
    destination = Path(destination)
    chosen = _choose(chapters)
    targets = {name: destination / f"{name}.ipynb" for name in chosen}
    for target in targets.values():
        if target.exists():
            raise FileExistsError(
                f"destination {str(destination)!r} already holds {target.name}; choose another folder"
            )
    with _course(chosen) as course:
        for name in chosen:
            course.run("GenerateAssignment", name)
        destination.mkdir(parents=True, exist_ok=True)
        for name, target in targets.items():
            shutil.copyfile(course.root / "release" / name / target.name, target)
    return list(targets.values())


def grade(
    folder: Path | str, *, progress: Callable[[Iterable[Path], int], Iterable[Path]] | None = None
) -> list[Result]:
    """Grade the notebooks in ``folder/<student>/<chapter>.ipynb``, running each in a fresh kernel.

    Parameters
    ----------
    folder : path
        One folder per student. Files that are no exercise notebook of the course are left alone.
    progress : callable, optional
        Called with the notebooks and their number, and returns them again: the place for a progress bar.

    Returns
    -------
    list of Result
        By student and chapter. A notebook that cannot be run at all earns nothing and has an ``error``.

    Raises
    ------
    FileNotFoundError
        If the folder does not exist or holds no exercise notebook.
    ModuleNotFoundError
        If nbgrader is not installed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder is {str(folder)!r}, which is not a folder")
    known = sources()
    submissions = [path for path in sorted(folder.glob("*/*.ipynb")) if path.stem in known]
    if not submissions:
        names = ", ".join(f"{name}.ipynb" for name in known)
        raise FileNotFoundError(f"folder {str(folder)!r} holds no <student>/<chapter>.ipynb; chapters are {names}")
    chosen = {path.stem: known[path.stem] for path in submissions}
    results = []
    with _course(chosen) as course:
        for name in chosen:
            course.run("GenerateAssignment", name)
        for number, path in enumerate(progress(submissions, len(submissions)) if progress else submissions):
            results.append(_grade_one(course, path, f"student{number}"))
    return results


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
    """Return the results as a table for the terminal: one row for each notebook, one column for each exercise."""
    from rich.table import Table

    exercises = list(dict.fromkeys(mark.exercise for result in results for mark in result.marks))
    shown = Table("student", "chapter")
    for name in [*exercises, "total"]:
        shown.add_column(name, justify="right")
    for result in results:
        points = {mark.exercise: f"{mark.points:g}/{mark.max_points:g}" for mark in result.marks}
        total = f"{result.points:g}/{result.max_points:g}" + (" (not graded)" if result.error else "")
        shown.add_row(result.student, result.chapter, *(points.get(name, "") for name in exercises), total)
    return shown


def write_feedback(results: Iterable[Result], folder: Path | str) -> list[Path]:
    """Write ``folder/<student>/<chapter>.md``: points and what went wrong, for the student.

    nbgrader's own feedback pages show the hidden tests' source and tracebacks. These carry only the last line of an error.
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


@dataclass(frozen=True)
class _Course:
    """A course folder as nbgrader wants it."""

    root: Path

    def run(self, converter: str, chapter: str, student: str = "*") -> None:
        """Run one of nbgrader's converters on one notebook."""
        from nbgrader import converters
        from nbgrader.coursedir import CourseDirectory
        from traitlets.config import Config

        config = Config()
        config.CourseDirectory.root = str(self.root)
        config.CourseDirectory.assignment_id = chapter
        config.CourseDirectory.student_id = student
        # The default, read-only, keeps Windows from removing the temporary folder.
        config.Autograde.permissions = 644
        config.Execute.timeout = SECONDS_PER_CELL
        config.Execute.extra_arguments = ["--log-level=ERROR"]
        getattr(converters, converter)(coursedir=CourseDirectory(config=config), config=config).start()


@contextmanager
def _course(chosen: dict[str, Path]) -> Iterator[_Course]:
    """Make a temporary course folder that holds the chosen notebooks, without links that lead out of it."""
    try:
        from nbgrader import __version__  # noqa: F401
        from sqlalchemy.exc import SAWarning
    except ModuleNotFoundError:
        raise ModuleNotFoundError("handing out and grading exercises needs nbgrader: pip install nbgrader") from None
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", SAWarning)  # about nbgrader's own queries
        # nbgrader calls `alembic` by name, which lies beside this Python and on PATH only where its environment is
        # active; and it leaves variables of its own behind when a notebook fails.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        undo.enter_context(patch.dict(os.environ, PATH=path))
        root = undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        course = _Course(Path(root).resolve())
        for name, notebook in chosen.items():
            target = course.root / "source" / name / notebook.name
            target.parent.mkdir(parents=True)
            target.write_text(_with_web_links(notebook), encoding="utf-8")
        yield course


def _choose(chapters: Sequence[str] | None) -> dict[str, Path]:
    known = sources()
    if chapters is None:
        return known
    chosen = {}
    for chapter in chapters:
        names = [name for name in known if chapter in (name, name.partition("-")[0])]
        if not names:
            raise ValueError(f"chapters names {chapter!r}; exercise notebooks are {', '.join(known)}")
        chosen.update({name: known[name] for name in names})
    return chosen


def _with_web_links(notebook: Path) -> str:
    """Return a notebook's text with links into the course's folders turned into links into its repository."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    notebooks = f"{publishing.address(ROOT)}/blob/main/notebooks/"
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = "".join(cell["source"]).replace("](../", f"]({notebooks}")
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _grade_one(course: _Course, path: Path, student: str) -> Result:
    import nbformat
    from nbgrader import utils
    from nbgrader.converters.base import NbGraderException

    chapter = path.stem
    # nbgrader builds patterns from names, so it sees a plain one instead of the student's.
    submitted = course.root / "submitted" / student / chapter / path.name
    submitted.parent.mkdir(parents=True)
    shutil.copyfile(path, submitted)
    source = nbformat.read(course.root / "source" / chapter / path.name, as_version=4)
    exercises = {
        cell.metadata.nbgrader.grade_id: cell.metadata.nbgrader.points for cell in filter(utils.is_grade, source.cells)
    }
    error = ""
    cells = {}
    try:
        course.run("Autograde", chapter, student)
        graded = nbformat.read(course.root / "autograded" / student / chapter / path.name, as_version=4)
        cells = {cell.metadata.nbgrader.get("grade_id"): cell for cell in filter(utils.is_grade, graded.cells)}
    except NbGraderException:
        error = "The notebook cannot be run: it is damaged, not made by `course exercises release`, or its code ends Python."
    marks = []
    for name, most in exercises.items():
        if name in cells:
            marks.append(Mark(name, utils.determine_grade(cells[name])[0], most, _message(cells[name])))
        else:
            marks.append(Mark(name, 0, most, error or "The test cell is missing from the notebook."))
    return Result(path.parent.name, chapter, tuple(marks), error)


def _message(cell: Any) -> str:
    """Return what a test cell's error says: never its traceback, which shows the hidden tests."""
    for output in cell.outputs:
        if output.output_type == "error":
            text = ESCAPES.sub("", output.evalue)
            if output.ename == "WrongAnswer":
                return text
            if output.ename in ("KeyboardInterrupt", "CellTimeoutError"):
                return f"Your function was stopped after {SECONDS_PER_CELL} seconds."
            # A student's own exception can quote anything, the tests as well.
            return f"{output.ename}: {text[:200].partition(chr(10))[0]}".removesuffix(": ")
        if output.output_type == "stream" and output.name == "stderr":
            return "Your function writes to standard error (a warning?), which counts as failed."
    return ""
