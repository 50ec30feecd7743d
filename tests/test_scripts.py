"""The two commands' machinery: the environment, the execution cache, and what is stored in notebooks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import build
import environment
import nbformat
import pytest
from rich.progress import Progress

from course_lib import claims

ROOT = Path(__file__).resolve().parents[1]


def run_environment(*arguments: str, prelude: str = "pass", **variables: str) -> subprocess.CompletedProcess:
    script = str(ROOT / "book" / "scripts" / "environment.py")
    source = f"import runpy, sys; {prelude}; sys.argv = {[script, *arguments]!r}; runpy.run_path({script!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env={**os.environ, **variables}
    )


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


# ---- the environment ------------------------------------------------------------------------------------------------


def test_old_python_is_one_line(tmp_path):
    done = run_environment(str(tmp_path / "v"), "all", prelude="sys.version_info = (3, 9, 2)")
    assert_one_line(done, "3.11 or newer")
    assert not (tmp_path / "v").exists()


def test_broken_environment_is_one_line_with_the_whole_path(tmp_path):
    folder = tmp_path / "with space" / "v"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    assert_one_line(run_environment(str(folder), "all"), "does not start", f"rm -rf '{folder}'")


def test_a_folder_that_is_no_environment_is_never_recommended_for_removal(tmp_path):
    (tmp_path / "precious").mkdir()
    for folder in (tmp_path / "precious", ROOT, ROOT.parent):
        done = run_environment(str(folder), "all")
        assert_one_line(done, str(folder))
        assert "rm " not in done.stderr


def test_missing_arguments_are_one_line():
    assert_one_line(run_environment(), "environment.py .venv all")
    assert_one_line(run_environment("", "all"), "environment.py .venv all")


def test_old_pythons_can_read_the_script_far_enough_to_say_so():
    import ast

    tree = ast.parse((ROOT / "book" / "scripts" / "environment.py").read_text(encoding="utf-8"), feature_version=(3, 6))
    for node in ast.walk(tree):
        for annotation in [getattr(node, "annotation", None), getattr(node, "returns", None)]:
            assert isinstance(annotation, ast.Name | ast.Constant | None)


def test_missing_network_is_one_line_and_leaves_no_stamp(tmp_path):
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    room = "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40)"
    done = run_environment(
        str(tmp_path / "v"), "all", prelude=room, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="", **offline
    )
    assert_one_line(done, "no network")
    assert not (tmp_path / "v" / "course.stamp").exists()


def test_full_disk_is_one_line(tmp_path, monkeypatch):
    assert "disk is full" in environment.explain(["ERROR: Could not install: [Errno 28] No space left on device"])
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    monkeypatch.setattr(environment, "installed_torch", lambda _: "")
    with pytest.raises(SystemExit, match=r"disk has 0\.00 GiB free"):
        environment.install(Path(sys.executable), "all", False)


def test_torch_that_is_installed_stays():
    lines = environment.constraints("2.12.1+cu130", oldest=False).splitlines()
    assert "torch==2.12.1+cu130" in lines
    assert sum(line.startswith("torch==") for line in lines) == 1
    assert not any(line.startswith("triton==") for line in lines)


def test_oldest_versions_replace_the_pins():
    lines = environment.constraints("", oldest=True).splitlines()
    assert {"torch==2.11.0", "transformers==5.17.0", "triton==3.6.0"} <= set(lines)
    assert sum(line.startswith(("torch==", "transformers==", "triton==")) for line in lines) == 3


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            ["ERROR: Could not find a version that satisfies the requirement x (from versions: none)"],
            "from versions: none",
        ),
        (["WARNING: Retrying: Failed to establish a new connection"], "no network"),
        (["ERROR: ResolutionImpossible: a and b"], "ResolutionImpossible"),
        ([], "no reason given"),
    ],
)
def test_pips_complaint_becomes_one_line(log, words):
    assert words in environment.explain(log)
    assert "\n" not in environment.explain(log)


# ---- the execution cache --------------------------------------------------------------------------------------------


@pytest.fixture
def small_tree(tmp_path, monkeypatch):
    """A copy of the library with one notebook that loads the room `memory` and no other."""
    shutil.copytree(ROOT / "course_lib", tmp_path / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "book").mkdir()
    (tmp_path / "notebooks").mkdir()
    for name in ("constraints.txt", "book/claims.yml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "_toc.yml").write_text("root: index\nchapters:\n- file: notebooks/01-small\n", encoding="utf-8")
    cells = [
        nbformat.v4.new_markdown_cell("Prose."),
        nbformat.v4.new_code_cell(
            "import sys\nfrom course_lib.memory import units\nprint(units.GIB, file=sys.stderr)\nunits.GIB"
        ),
        nbformat.v4.new_code_cell("import ipywidgets\nipywidgets.IntSlider()"),
    ]
    path = tmp_path / "notebooks" / "01-small.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "EXECUTED", tmp_path / "_build" / "executed")
    return path


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def test_notebook_runs_again_when_what_it_depends_on_changes_and_only_then(small_tree):
    root = small_tree.parents[1]
    assert build.notebooks() == [small_tree]
    assert not build.is_current(small_tree)
    with Progress(disable=True) as progress:
        build.execute(small_tree, progress)
    assert build.is_current(small_tree)
    executed = nbformat.read(build.executed_path(small_tree), as_version=4)
    assert executed.metadata["course"]["rooms"] == ["memory"]
    assert executed.metadata["course"]["peak_memory_bytes"] > 10 * 2**20
    assert executed.cells[1].outputs[-1].data["text/plain"] == str(2**30)

    notebook = nbformat.read(small_tree, as_version=4)
    notebook.cells[0].source = "Other prose."
    nbformat.write(notebook, small_tree)
    append(root / "course_lib" / "models" / "__init__.py", "\n# a room that the notebook does not load\n")
    assert build.is_current(small_tree)

    append(root / "course_lib" / "memory" / "units.py", "\nGIB = 2**30 + 1\n")
    assert not build.is_current(small_tree)


@pytest.mark.parametrize("change", ["constraints.txt", "book/claims.yml"])
def test_versions_and_claims_are_part_of_the_key(small_tree, change):
    notebook = nbformat.read(small_tree, as_version=4)
    before = build.key_of(notebook, ["memory"])
    append(small_tree.parents[1] / change, "\n# changed\n")
    assert build.key_of(notebook, ["memory"]) != before


@pytest.mark.parametrize("change", ["kernels/study.py", "kernels/results/study-card.json"])
def test_what_a_notebook_reads_from_the_workbench_is_part_of_the_key(small_tree, change):
    file = small_tree.parents[1] / change
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    notebook = nbformat.read(small_tree, as_version=4)
    notebook.cells[-1].source = 'study = "kernels/study.py"'
    before = build.key_of(notebook, ["memory"])
    append(file, "# changed")
    assert build.key_of(notebook, ["memory"]) != before


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "{}", '{"metadata": {"course": {}}, "cells": [], "nbformat": 4, "nbformat_minor": 5}']
)
def test_a_damaged_executed_copy_is_made_again(small_tree, damage):
    copy = build.executed_path(small_tree)
    copy.parent.mkdir(parents=True)
    copy.write_text(damage, encoding="utf-8")
    assert not build.is_current(small_tree)


@pytest.mark.parametrize("damage", ["", "{", "{}", None])
def test_a_notebook_that_cannot_be_read_is_named(small_tree, damage):
    small_tree.unlink()
    if damage is not None:
        small_tree.write_text(damage, encoding="utf-8")
    with pytest.raises(ValueError, match=r"notebooks.01-small\.ipynb cannot be read"):
        build.read(small_tree)


def test_a_kernel_that_dies_is_named(small_tree):
    from rich.console import Console

    notebook = nbformat.read(small_tree, as_version=4)
    notebook.cells[1].source = "import os\nos._exit(1)"
    nbformat.write(notebook, small_tree)
    with pytest.raises(RuntimeError, match=r"01-small\.ipynb: the kernel died"):
        build.execute_stale(Console(quiet=True))


def test_contents_are_read_as_yaml(small_tree):
    toc = small_tree.parents[1] / "_toc.yml"
    toc.write_text(
        "root: a\nparts:\n- chapters:\n  # - file: notebooks/00-old\n  - file: ./notebooks/01-small\n", encoding="utf-8"
    )
    assert build.notebooks() == [small_tree]
    toc.write_text("root: a\n", encoding="utf-8")
    with pytest.raises(ValueError, match="names no notebook"):
        build.notebooks()


def test_failing_notebook_leaves_no_executed_copy(small_tree):
    notebook = nbformat.read(small_tree, as_version=4)
    notebook.cells[1].source = "1 / 0"
    nbformat.write(notebook, small_tree)
    with Progress(disable=True) as progress, pytest.raises(build.CellExecutionError):
        build.execute(small_tree, progress)
    assert not build.executed_path(small_tree).exists()


# ---- what is stored -------------------------------------------------------------------------------------------------


def test_stored_outputs_carry_no_widget_no_warning_stream_and_no_timing(small_tree):
    from rich.console import Console

    with Progress(disable=True) as progress:
        build.execute(small_tree, progress)
    build.store(Console(quiet=True))
    text = small_tree.read_text(encoding="utf-8")
    stored = json.loads(text)
    assert "widget-view" not in text
    assert '"stderr"' not in text
    assert "course" not in stored["metadata"]
    assert stored["cells"][1]["outputs"][0]["data"]["text/plain"] == [str(2**30)]
    before = small_tree.read_bytes()
    with Progress(disable=True) as progress:
        build.execute(small_tree, progress)
    build.store(Console(quiet=True))
    assert small_tree.read_bytes() == before, "a second run must store the same bytes"


def test_a_claim_checked_again_on_another_day_is_no_change():
    record = {
        "claim": "x",
        "measured": 1,
        "unit": "",
        "verdict": "confirmed",
        "date": "2026-01-01",
        "machine": {},
        "versions": {},
    }

    def cell(**changes):
        output = nbformat.v4.new_output("display_data", data={claims.MIME: {**record, **changes}})
        return nbformat.v4.new_code_cell("check()", id="a", outputs=[output])

    assert build.steady(cell()) == build.steady(cell(date="2027-02-02", machine={"cpu": "other"}))
    assert build.steady(cell()) != build.steady(cell(measured=2))
