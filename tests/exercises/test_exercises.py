"""The exercises accept right answers alone, say why a wrong one is wrong, and hand students nothing they should not see."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
import yaml
from rich.console import Console

from course_lib.exercises import WrongAnswer, check, grading

HERE = Path(__file__).parent
CHAPTERS = sorted(grading.sources())
STUB = "raise NotImplementedError"
HEADING = re.compile(
    r"`(?P<id>[\w-]+)` · (?P<minutes>\d+) minutes · difficulty (?P<difficulty>[1-5]) of 5 · (?P<points>\d+) points?\n"
)
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?### END SOLUTION", re.DOTALL | re.MULTILINE)
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)


def read(chapter: str) -> dict[str, Any]:
    """Return a source notebook's cells by their nbgrader id, in order."""
    cells = nbformat.read(grading.sources()[chapter], as_version=4).cells
    return {cell.metadata.nbgrader.grade_id: cell for cell in cells if "nbgrader" in cell.metadata}


def exercises(chapter: str) -> list[str]:
    return [name for name, cell in read(chapter).items() if cell.metadata.nbgrader.grade]


def wrong(chapter: str) -> dict[str, list[dict[str, str]]]:
    return yaml.safe_load((HERE / "wrong" / f"{chapter}.yml").read_text(encoding="utf-8"))


def answered(chapter: str, exercise: str, body: str) -> str:
    """Return the source of an exercise's solution cell with another body in the solution's place."""
    source = read(chapter)[f"{exercise}-solution"].source
    return SOLUTION.sub(lambda match: "".join(f"{match[1]}{line}\n" for line in body.splitlines()), source)


def run(chapter: str, exercise: str, solution: str | None = None, **names: Any) -> dict[str, Any]:
    """Run an exercise as the notebook does: shared cells, the solution (or another in its place), the tests."""
    cells, space = read(chapter), dict(names)
    shared = [cell for name, cell in cells.items() if cell.cell_type == "code" and not re.search("-solution$", name)]
    for cell in shared:
        if not cell.metadata.nbgrader.grade:
            exec(cell.source, space)
    exec(solution if solution is not None else cells[f"{exercise}-solution"].source, space)
    exec(cells[exercise].source, space)
    return space


HUGE = -(10**5000)  # more digits than Python turns into text
EXERCISES = [(chapter, exercise) for chapter in CHAPTERS for exercise in exercises(chapter)]
WRONG = [
    pytest.param(chapter, exercise, row["body"], row["says"], id=f"{exercise}-{row['says']}")
    for chapter in CHAPTERS
    for exercise, rows in wrong(chapter).items()
    for row in rows
]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_has_four_exercises_or_more_and_no_wrong_solution_without_one(chapter: str) -> None:
    assert len(exercises(chapter)) >= 4
    assert set(wrong(chapter)) == set(exercises(chapter))


@pytest.mark.parametrize(("chapter", "exercise"), EXERCISES)
def test_every_exercise_states_minutes_difficulty_points_and_objective(chapter: str, exercise: str) -> None:
    statement = read(chapter)[f"{exercise}-statement"].source
    heading = HEADING.search(statement)
    assert heading is not None
    assert heading["id"] == exercise
    assert int(heading["points"]) == read(chapter)[exercise].metadata.nbgrader.points
    assert "*Objective: " in statement


@pytest.mark.parametrize(("chapter", "exercise"), EXERCISES)
def test_every_exercise_has_a_stub_visible_and_hidden_tests_and_three_wrong_solutions(
    chapter: str, exercise: str
) -> None:
    cells = read(chapter)
    assert cells[f"{exercise}-solution"].metadata.nbgrader.solution
    assert SOLUTION.search(cells[f"{exercise}-solution"].source)
    hidden = HIDDEN.search(cells[exercise].source)
    assert hidden is not None
    assert "check(" in hidden[1]
    assert "check(" in HIDDEN.sub("", cells[exercise].source)
    assert len({row["says"] for row in wrong(chapter)[exercise]}) >= 3


@pytest.mark.parametrize(("chapter", "exercise"), EXERCISES)
def test_the_solution_passes_whatever_the_inputs(chapter: str, exercise: str) -> None:
    for _ in range(5):
        run(chapter, exercise)


@pytest.mark.parametrize(("chapter", "exercise"), EXERCISES)
def test_an_empty_stub_fails(chapter: str, exercise: str) -> None:
    with pytest.raises(NotImplementedError):
        run(chapter, exercise, answered(chapter, exercise, f"{STUB}()"))


@pytest.mark.parametrize(("chapter", "exercise", "body", "says"), WRONG)
def test_a_wrong_solution_is_told_its_mistake(chapter: str, exercise: str, body: str, says: str) -> None:
    for _ in range(3):
        with pytest.raises(WrongAnswer, match=re.escape(says)):
            run(chapter, exercise, answered(chapter, exercise, body))


@pytest.mark.parametrize(("chapter", "exercise", "body", "says"), WRONG)
def test_hidden_tests_alone_reject_a_wrong_solution_and_show_no_value(
    chapter: str, exercise: str, body: str, says: str
) -> None:
    space = run(chapter, exercise)
    exec(answered(chapter, exercise, body), space)
    hidden = HIDDEN.search(read(chapter)[exercise].source)
    assert hidden is not None
    for _ in range(3):
        with pytest.raises(WrongAnswer) as caught:
            exec(hidden[1], space)
        assert "an input that you cannot see" in str(caught.value)
        assert "; right is " not in str(caught.value)


@pytest.mark.parametrize(("chapter", "exercise"), EXERCISES)
def test_hidden_inputs_are_fresh_and_differ_from_the_visible_ones(chapter: str, exercise: str) -> None:
    cells = read(chapter)
    function = re.search(r"^def (\w+)", cells[f"{exercise}-solution"].source, re.MULTILINE)
    hidden = HIDDEN.search(cells[exercise].source)
    assert function is not None
    assert hidden is not None

    def inputs(tests: str) -> set[str]:
        seen = []
        solve = space[function[1]]
        space[function[1]] = lambda *args: (seen.append(repr(args)), solve(*args))[1]
        exec(tests, space)
        space[function[1]] = solve
        return set(seen)

    space = run(chapter, exercise)
    visible, first, second = inputs(HIDDEN.sub("", cells[exercise].source)), inputs(hidden[1]), inputs(hidden[1])
    # Of a few small numbers, several of thirty draws may repeat an input by chance; inputs that do not change repeat all.
    assert len(first) >= 15
    assert len(first - visible) >= len(first) / 4
    assert len(second - first) >= len(second) / 4


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    assert [path.stem for path in grading.release(folder)] == CHAPTERS
    return folder


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_students_version_has_neither_solutions_nor_hidden_tests(released: Path, chapter: str) -> None:
    notebook = nbformat.read(released / f"{chapter}.ipynb", as_version=4)
    nbformat.validate(notebook)
    text = json.dumps(notebook)
    assert "SOLUTION" not in text
    assert "HIDDEN" not in text
    assert text.count(STUB) == len(exercises(chapter))
    assert not any(cell.get("outputs") for cell in notebook.cells)
    for exercise in exercises(chapter):
        source = read(chapter)
        hidden = HIDDEN.search(source[exercise].source)
        solution = SOLUTION.search(source[f"{exercise}-solution"].source)
        assert hidden is not None
        assert solution is not None
        secret = {line.strip() for line in (hidden[1] + solution[0]).splitlines() if len(line.strip()) > 25}
        secret -= {line.strip() for line in HIDDEN.sub("", source[exercise].source).splitlines()}
        shown = {line.strip() for cell in notebook.cells for line in cell.source.splitlines()}
        assert len(secret) >= 3
        assert not secret & shown
    assert "](../" not in text
    assert not re.search(r"\{[a-z:-]+\}`", text), "a role that only the book can read"


def test_release_leaves_a_students_work_alone(released: Path) -> None:
    before = {path: path.read_bytes() for path in released.iterdir()}
    with pytest.raises(FileExistsError, match="already holds"):
        grading.release(released)
    assert before == {path: path.read_bytes() for path in released.iterdir()}


def test_release_names_the_chapters_it_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=CHAPTERS[0]):
        grading.release(tmp_path / "out", ["99"])
    assert not (tmp_path / "out").exists()


HIDDEN_SOURCE = 'get_ipython().user_ns["In"][-1].partition("BEGIN HIDDEN")[2].replace("\\n", " ")'
CHEATS = {  # solutions of the first exercise that change what grades them, or try to have the hidden tests quoted
    "patches check": "import course_lib.exercises\ncourse_lib.exercises.check = lambda *a, **k: None\n{def} return 0",
    "patches answer": "from course_lib import memory\nmemory.weight_bytes = lambda *a: 7\n{def} return 7",
    "quotes": f"{{def}} raise ValueError({HIDDEN_SOURCE})",
    "forges": f"from course_lib.exercises import WrongAnswer\n{{def}} raise WrongAnswer({HIDDEN_SOURCE})",
    "names": f"{{def}} raise type({HIDDEN_SOURCE}, (Exception,), {{}})()",
    "returns": f"{{def}} return type({HIDDEN_SOURCE}, (), {{}})()",
}


def submit(released: Path, folder: Path, student: str, chapter: str, sources: dict[str, str]) -> None:
    notebook = nbformat.read(released / f"{chapter}.ipynb", as_version=4)
    for cell in notebook.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = sources.get(name, cell.source)
    (folder / student).mkdir(exist_ok=True)
    nbformat.write(notebook, folder / student / f"{chapter}.ipynb")


def graded_wrong(chapter: str, name: str) -> dict[str, str]:
    """Return the wrong solution that goes through the grader; all of them are tried on the tests alone."""
    return wrong(chapter)[name][CHAPTERS.index(chapter) % 3]


@pytest.fixture(scope="module")
def graded(released: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Grade, in one call, an untouched notebook, a right one, one all wrong, cheats, and some that cannot run."""
    folder = tmp_path_factory.mktemp("submitted")

    for chapter in CHAPTERS:
        names = exercises(chapter)
        submit(released, folder, "stub", chapter, {})
        submit(
            released,
            folder,
            "right",
            chapter,
            {f"{name}-solution": read(chapter)[f"{name}-solution"].source for name in names},
        )
        bodies = {name: graded_wrong(chapter, name)["body"] for name in names}
        submit(
            released,
            folder,
            "wrong",
            chapter,
            {f"{name}-solution": answered(chapter, name, body) for name, body in bodies.items()},
        )
    chapter, names = CHAPTERS[0], exercises(CHAPTERS[0])
    submit(released, folder, "cheat [1][bold]", chapter, dict.fromkeys(names, "print('all well')"))
    submit(released, folder, "quits", chapter, {f"{names[0]}-solution": "import os\nos._exit(1)"})
    function = re.search(r"^def .*?:$", read(chapter)[f"{names[0]}-solution"].source, re.MULTILINE | re.DOTALL)
    assert function is not None
    for student, body in CHEATS.items():
        submit(
            released, folder, student, chapter, {f"{names[0]}-solution": body.replace("{def}", function[0] + "\n   ")}
        )
    (folder / "folder" / f"{chapter}.ipynb").mkdir(parents=True)
    (folder / "link").mkdir()
    with contextlib.suppress(OSError):  # Windows lets few users make one
        (folder / "link" / f"{chapter}.ipynb").symlink_to(folder / "nowhere")
    (folder / "damaged").mkdir()
    (folder / "damaged" / f"{chapter}.ipynb").write_text("{", encoding="utf-8")
    (folder / "stub" / "notes.ipynb").write_text("not an exercise", encoding="utf-8")
    before = dict(os.environ)
    results = grading.grade(folder)
    assert dict(os.environ) == before
    return SimpleNamespace(folder=folder, results={(each.student, each.chapter): each for each in results})


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_grading_gives_stubs_nothing_and_solutions_everything(graded: SimpleNamespace, chapter: str) -> None:
    stub, right = graded.results["stub", chapter], graded.results["right", chapter]
    assert [mark.exercise for mark in right.marks] == exercises(chapter)
    assert {mark.exercise: mark.message for mark in right.marks if mark.message} == {}
    assert stub.points == 0
    assert right.points == right.max_points == stub.max_points > 0
    assert all(mark.message.startswith("NotImplementedError") for mark in stub.marks)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_grading_gives_wrong_solutions_nothing_and_says_why(graded: SimpleNamespace, chapter: str) -> None:
    result = graded.results["wrong", chapter]
    assert result.error == ""
    for mark in result.marks:
        assert mark.points == 0
        assert graded_wrong(chapter, mark.exercise)["says"] in mark.message


def test_grading_restores_tests_that_a_student_changed(graded: SimpleNamespace) -> None:
    assert graded.results["cheat [1][bold]", CHAPTERS[0]].points == 0


@pytest.mark.parametrize("student", CHEATS)
def test_changing_what_grades_or_quoting_it_earns_nothing_and_shows_no_text_of_ones_own(
    graded: SimpleNamespace, student: str
) -> None:
    result = graded.results[student, CHAPTERS[0]]
    assert (result.points, result.error) == (0, "")
    message = result.marks[0].message
    assert message
    assert not re.search(r"HIDDEN|random|range|check\(", message)
    assert len(message) < 200


def test_an_exception_of_python_s_own_is_named(graded: SimpleNamespace) -> None:
    assert graded.results["quotes", CHAPTERS[0]].marks[0].message.startswith("ValueError: ")


def test_what_students_programs_print_does_not_mix_with_the_report(
    released: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chapter = CHAPTERS[0]
    noise = "import os\nos.write(1, b'noise')\nos.write(2, b'noise')"
    submit(released, tmp_path, "noisy", chapter, {f"{exercises(chapter)[0]}-solution": noise})
    twice = nbformat.read(tmp_path / "noisy" / f"{chapter}.ipynb", as_version=4)
    (tmp_path / "twice").mkdir()
    text = json.dumps(twice | {"cells": [*twice.cells, twice.cells[-1]]})
    (tmp_path / "twice" / f"{chapter}.ipynb").write_text(text, encoding="utf-8")
    assert [result.points for result in grading.grade(tmp_path)] == [0, 0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("student", ["folder", "link"])
def test_what_is_no_file_earns_nothing_and_stops_no_other(graded: SimpleNamespace, student: str) -> None:
    if (student, CHAPTERS[0]) in graded.results or os.name != "nt":
        result = graded.results[student, CHAPTERS[0]]
        assert result.points == 0
        assert result.max_points > 0
        assert "cannot be read" in result.error


@pytest.mark.parametrize("student", ["quits", "damaged"])
def test_a_notebook_that_cannot_run_earns_nothing_and_stops_no_other(graded: SimpleNamespace, student: str) -> None:
    result = graded.results[student, CHAPTERS[0]]
    assert result.points == 0
    assert result.max_points > 0
    assert "cannot be run" in result.error


def test_feedback_and_records_show_no_hidden_test(graded: SimpleNamespace, tmp_path: Path) -> None:
    results = list(graded.results.values())
    written = grading.write_feedback(results, tmp_path)
    assert len(written) == len(results)
    shown = "".join(path.read_text(encoding="utf-8") for path in written) + json.dumps(list(grading.rows(results)))
    assert "These are bits" in shown
    for chapter, exercise in EXERCISES:
        hidden = HIDDEN.search(read(chapter)[exercise].source)
        assert hidden is not None
        assert not any(line.strip() in shown for line in hidden[1].splitlines() if len(line) > 25)
    table = grading.table(results)
    assert table.row_count == len(results)
    console = Console(width=250)
    with console.capture() as capture:
        console.print(table)
    assert all(result.student in capture.get() for result in results)


def test_grading_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a folder"):
        grading.grade(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="<student>"):
        grading.grade(tmp_path)


def test_without_nbgrader_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nbgrader", None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        grading.release(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answer", [None, "7", True, [7], 7.0, float("nan")])
def test_check_wants_a_whole_number_of_bytes(answer: object) -> None:
    with pytest.raises(WrongAnswer, match=r"None|number|whole"):
        check(answer, 7)


@pytest.mark.parametrize("answer", [Fraction(1, 3), 10**400, HUGE, "0.5", 1j, True], ids=type)
def test_check_wants_a_float_and_says_so(answer: object) -> None:
    for case in ("f(3)", None):
        with pytest.raises(WrongAnswer, match=r"A number \(float\) is needed") as caught:
            check(answer, 1 / 3, lambda: {"half": 0.5}, case=case)
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("answer", [10**400, HUGE, float("inf"), Fraction(7, 2)], ids=type)
def test_check_survives_any_answer_where_a_whole_number_is_wanted(answer: object) -> None:
    with pytest.raises(WrongAnswer) as caught:
        check(answer, 7, lambda: {"half": 3.5, "thousandth": 0.007}, case="f(3)")
    assert len(str(caught.value)) < 250


def test_check_takes_numpy_s_numbers_as_python_s() -> None:
    check(np.int64(7), 7)
    check(np.float64(1 / 3), 1 / 3)
    check(7, 7.0)


def test_check_names_a_mistake_only_where_it_leads_astray() -> None:
    def mistakes(number: int) -> dict[str, float]:
        return {"harmless here": number, "bits": 8 * number}

    check(7, 7, mistakes, 7)
    with pytest.raises(WrongAnswer, match="bits") as caught:
        check(56, 7, mistakes, 7, case="f(7)")
    assert "harmless" not in str(caught.value)
    assert "f(7)" in str(caught.value)
    with pytest.raises(WrongAnswer) as caught:
        check(56, 7, mistakes, 7)
    assert not re.search(r"\d", str(caught.value))
