"""Hand out the exercise notebooks and grade what comes back, with nbgrader in a temporary course folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

from course_lib import publishing
from course_lib.exercises.results import SECONDS_PER_CELL, Mark, Result, explain, rows, table, write_feedback

__all__ = ["Mark", "Result", "grade", "release", "rows", "sources", "table", "write_feedback"]

ROOT = Path(__file__).resolve().parents[2]
UNREADABLE = "The notebook cannot be read: it is a folder, a broken link, or not yours to read."
DAMAGED = "The notebook cannot be run: it is damaged, not made by `course exercises release`, or its code ends Python."
# Stands before the tests in a notebook that is graded: they import the course's modules as they are on disk, not as the
# student's cells may have left them.
FRESH_IMPORTS = """\
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "course_lib"]:
    del sys.modules[name]
"""


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

    Students' code runs as you, in the same process as the tests. The tests are restored and import the course's modules
    anew, so changing either earns nothing; code written to defeat the grader still can. Points are a first reading: look
    at the solutions that matter.

    Parameters
    ----------
    folder : path
        One folder per student. Files that are no exercise notebook of the course are left alone.
    progress : callable, optional
        Called with the notebooks and their number, and returns them again: the place for a progress bar.

    Returns
    -------
    list of Result
        By student and chapter. A notebook that cannot be read or run at all earns nothing and has an ``error``.

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
    with _course(chosen, before_tests=FRESH_IMPORTS) as course:
        for name in chosen:
            course.run("GenerateAssignment", name)
        for number, path in enumerate(progress(submissions, len(submissions)) if progress else submissions):
            results.append(_grade_one(course, path, f"student{number}"))
    return results


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
        config.Execute.extra_arguments = ["--HistoryManager.hist_file=:memory:"]
        getattr(converters, converter)(coursedir=CourseDirectory(config=config), config=config).start()


@contextmanager
def _course(chosen: dict[str, Path], before_tests: str = "") -> Iterator[_Course]:
    """Make a temporary course folder that holds the chosen notebooks, without links that lead out of it."""
    try:
        from jupyter_client.manager import AsyncKernelManager
        from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning
        from nbgrader import __version__  # noqa: F401
        from sqlalchemy.exc import SAWarning
    except ModuleNotFoundError:
        raise ModuleNotFoundError("handing out and grading exercises needs nbgrader: pip install nbgrader") from None
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        for about_others in (SAWarning, DuplicateCellId, MissingIDFieldWarning):  # nbgrader's queries, students' cells
            warnings.simplefilter("ignore", about_others)
        # What a kernel and the programs that a student starts write past the notebook would mix with the report.
        quiet = partialmethod(AsyncKernelManager.start_kernel, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        undo.enter_context(patch.object(AsyncKernelManager, "start_kernel", quiet))
        # nbgrader calls `alembic` by name, which lies beside this Python and on PATH only where its environment is
        # active; and it leaves variables of its own behind when a notebook fails.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        undo.enter_context(patch.dict(os.environ, PATH=path))
        root = undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        course = _Course(Path(root).resolve())
        for name, notebook in chosen.items():
            target = course.root / "source" / name / notebook.name
            target.parent.mkdir(parents=True)
            target.write_text(_prepared(notebook, before_tests), encoding="utf-8")
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


def _prepared(notebook: Path, before_tests: str) -> str:
    """Return a notebook's text for Jupyter alone, and code before all tests.

    Links into the course's folders lead to the web, and names of the library that the book links are plain.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    notebooks = f"{publishing.address(ROOT)}/blob/main/notebooks/"
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            text = re.sub(r"\{course-source\}(?=`)", "", "".join(cell["source"]))
            cell["source"] = text.replace("](../", f"]({notebooks}")
        elif cell["metadata"].get("nbgrader", {}).get("grade"):
            cell["source"] = before_tests + "".join(cell["source"])
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _grade_one(course: _Course, path: Path, student: str) -> Result:
    import nbformat
    from nbgrader import utils
    from nbgrader.converters.base import NbGraderException

    chapter = path.stem
    source = nbformat.read(course.root / "source" / chapter / path.name, as_version=4)
    exercises = {
        cell.metadata.nbgrader.grade_id: cell.metadata.nbgrader.points for cell in filter(utils.is_grade, source.cells)
    }
    # nbgrader builds patterns from names, so it sees a plain one instead of the student's.
    submitted = course.root / "submitted" / student / chapter / path.name
    submitted.parent.mkdir(parents=True)
    error = ""
    found = {}
    try:
        if not path.is_file():  # a folder, a broken link, or a device without an end
            raise FileNotFoundError(path)
        shutil.copyfile(path, submitted)
    except OSError:
        error = UNREADABLE
    try:
        if not error:
            course.run("Autograde", chapter, student)
            graded = nbformat.read(course.root / "autograded" / student / chapter / path.name, as_version=4)
            for cell in filter(utils.is_grade, graded.cells):
                name = cell.metadata.nbgrader.grade_id
                found[name] = Mark(name, utils.determine_grade(cell)[0] or 0, exercises.get(name, 0), explain(cell))
    except NbGraderException:
        error = DAMAGED
    except Exception as unexpected:  # whatever one student handed in, the others are graded
        error = f"The notebook cannot be graded ({type(unexpected).__name__})."
    marks = []
    for name, most in exercises.items():
        missing = Mark(name, 0, most, error or "The test cell is missing from the notebook.")
        marks.append(missing if error else found.get(name, missing))
    return Result(path.parent.name, chapter, tuple(marks), error)
