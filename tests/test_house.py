"""The house: files that must agree with each other, and promises about what is (not) in the project."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from course_lib import claims, publishing

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
ALL_NOTEBOOKS = NOTEBOOKS + sorted(ROOT.glob("notebooks/exercises/*.ipynb"))


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def code(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def prose(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run_python(source: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", source], cwd=ROOT / "tests", capture_output=True, text=True)


# ---- environments -----------------------------------------------------------------------------------------------


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", line).group().lower().replace("_", "-") for line in requirements}


def test_conda_environment_installs_what_pyproject_says():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == ["--constraint constraints.txt", "--editable .[all]"]
    (python,) = (entry for entry in environment["dependencies"] if str(entry).startswith("python="))
    assert float(python.removeprefix("python=3.")) >= float(project()["requires-python"].removeprefix(">=3."))


def test_every_dependency_is_constrained_to_one_version_that_pyproject_accepts():
    from packaging.requirements import Requirement

    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
    wanted = [
        *project()["dependencies"],
        *(line for extra in project()["optional-dependencies"].values() for line in extra),
    ]
    for line in wanted:
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        if name != "course-lib":
            assert name in pins, f"{name} has no exact version in constraints.txt"
            assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is not {requirement.specifier}"


def test_oldest_versions_are_the_lower_bounds_of_pyproject():
    from environment import OLDEST_VERSIONS

    for line in project()["dependencies"]:
        name = re.match(r"[\w-]+", line).group()
        if name in OLDEST_VERSIONS:
            assert f">={OLDEST_VERSIONS[name].removesuffix('.0')}" in line


@pytest.mark.parametrize("package", ["triton", "bitsandbytes"])
def test_packages_without_macos_wheels_carry_a_platform_marker(package):
    from packaging.requirements import Requirement

    (line,) = (line for line in project()["dependencies"] if line.startswith(package))
    assert not Requirement(line).marker.evaluate({"platform_system": "Darwin"})
    assert Requirement(line).marker.evaluate({"platform_system": "Linux"})


def test_torch_range_is_open_so_that_a_preinstalled_torch_stays():
    (line,) = (line for line in project()["dependencies"] if line.startswith("torch"))
    assert re.fullmatch(r"torch>=[\d.]+", line)


# ---- imports ------------------------------------------------------------------------------------------------------


def test_importing_the_library_is_light():
    source = (
        "import course_lib, sys; print([m for m in ('torch', 'transformers', 'triton', 'numpy') if m in sys.modules])"
    )
    assert run_python(source).stdout.strip() == "[]"


def test_importing_the_library_costs_less_than_a_hundredth_of_torch():
    source = "import time; a = time.perf_counter(); import course_lib; b = time.perf_counter(); import torch; " + (
        "print((b - a) / (time.perf_counter() - b))"
    )
    assert min(float(run_python(source).stdout) for _ in range(3)) < 0.05


def test_workbench_is_not_a_package_and_not_in_the_wheel():
    assert not list((ROOT / "kernels").rglob("__init__.py"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert settings["targets"]["wheel"]["packages"] == ["course_lib"]


def test_workbench_does_not_stand_in_for_the_kernels_library(tmp_path):
    """A checkout on the path must not hide an installed package called kernels, wherever it comes on the path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("real = True", encoding="utf-8")
    source = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.real)"
    assert run_python(source).stdout.strip() == "True"


# ---- the public address -------------------------------------------------------------------------------------------


def test_address_is_named_only_where_the_command_changes_it():
    address = publishing.address(ROOT)
    owner_and_name = address.split("/", 3)[3]
    followers = set(publishing.followers(ROOT))
    for path in tracked():
        if path not in followers and path.suffix in {".py", ".md", ".yml", ".toml", ".cff", ".ipynb", ".txt", ""}:
            assert owner_and_name not in path.read_text(encoding="utf-8", errors="replace"), path


def test_all_files_agree_on_the_address():
    address = publishing.address(ROOT)
    assert project()["urls"]["Repository"] == address
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"] == address
    assert address.split("/", 3)[3] in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def tree(tmp_path):
    for path in publishing.followers(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path


def contents(root: Path) -> dict[Path, str]:
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in publishing.followers(root)}


@pytest.mark.parametrize("url", ["https://example.org/someone/elsewhere", "{old}-two", "https://a.b/c/d"])
def test_changing_the_address_changes_every_mention_and_back_again(tree, url):
    old, before = publishing.address(ROOT), contents(ROOT)
    url = url.format(old=old)
    publishing.change_address(tree, url)
    assert publishing.address(tree) == url
    for path, text in contents(tree).items():
        assert text.count(url.split("/", 3)[3]) >= before[path].count(old.split("/", 3)[3])
        assert old.split("/", 3)[3] not in text.replace(url.split("/", 3)[3], "")
    publishing.change_address(tree, old)
    assert contents(tree) == before


@pytest.mark.parametrize(
    "url", ["github.com/no/scheme", "https://../../..", "https://github.com/a/b.git", "https://github.com/a/b/", "x"]
)
def test_an_address_of_another_form_changes_nothing(tree, url):
    with pytest.raises(ValueError, match="owner/name is needed"):
        publishing.change_address(tree, url)
    assert contents(tree) == contents(ROOT)


def test_a_file_that_cannot_be_written_leaves_the_setting(tree):
    (tree / "README.md").unlink()
    (tree / "README.md").mkdir()
    with pytest.raises(OSError, match="README"):
        publishing.change_address(tree, "https://example.org/a/b")
    assert publishing.address(tree) == publishing.address(ROOT)


@pytest.mark.parametrize("text", ["", "a: [", "repository: {url: null}", "repository: 3"])
def test_a_missing_setting_is_one_sentence(tmp_path, text):
    (tmp_path / "_config.yml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"no repository\.url"):
        publishing.address(tmp_path)


def test_every_colab_badge_opens_a_notebook_that_is_there_on_the_published_branch():
    branch = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["branch"]
    links = [
        link
        for path in publishing.followers(ROOT)
        if path.suffix == ".md"
        for link in re.findall(r"colab\.research\.google\.com/github/([^)\s\"]+)", path.read_text(encoding="utf-8"))
    ]
    assert links, "the README has a badge"
    for link in links:
        prefix = f"{publishing.address(ROOT).split('/', 3)[3]}/blob/{branch}/"
        assert link.startswith(prefix)
        assert link.endswith(".ipynb")
        assert (ROOT / link.removeprefix(prefix)).is_file()


# ---- notebooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notebook", ALL_NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_is_the_one_first_cell(notebook):
    assert code(notebook)[0] == publishing.first_cell(ROOT)


def test_first_cell_does_nothing_outside_colab():
    from IPython.core.inputtransformer2 import TransformerManager

    source = TransformerManager().transform_cell(publishing.first_cell(ROOT))
    before = dict(sys.modules)
    exec(compile(source, "first cell", "exec"), {})
    assert set(sys.modules) == set(before)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_chapter_has_the_required_sections(notebook):
    text = prose(notebook)
    for heading in ("Objectives", "On a larger machine", "Exercises", "Summary", "Reading"):
        assert re.search(rf"^## {heading}", text, re.MULTILINE), f"no section {heading!r}"
    for label in ("Prerequisites", "Minutes", "Hardware"):
        assert re.search(rf"^\*\*{label}\.\*\* \S", text, re.MULTILINE), f"no line that starts with **{label}.**"
    for step in ("Predict", "Measure", "Explain"):
        assert f"**{step}.**" in text
    assert "machine.choose()" in "\n".join(code(notebook)[:2]), "the chapter must say what it runs on"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_asks_for_as_many_minutes_as_its_exercises(notebook):
    minutes = re.findall(r"· (\d+) minutes ·", prose(notebook.parent / "exercises" / notebook.name))
    assert f", {sum(map(int, minutes))} more for the graded exercises." in prose(notebook)


@pytest.mark.parametrize("notebook", ALL_NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_complete_and_free_of_noise(notebook):
    stored = json.loads(notebook.read_text(encoding="utf-8"))
    assert "widgets" not in stored["metadata"]
    counts = [cell["execution_count"] for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    for cell in stored["cells"]:
        assert "execution" not in cell["metadata"]
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_go_through_the_shared_style(notebook):
    source = "\n".join(code(notebook))
    assert "plt." not in source
    assert "import matplotlib" not in source


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_glued_number_is_used_in_the_prose_and_no_other(notebook):
    stored = json.loads(notebook.read_text(encoding="utf-8"))
    outputs = [output for cell in stored["cells"] for output in cell.get("outputs", [])]
    glued = {output["metadata"]["scrapbook"]["name"] for output in outputs if "scrapbook" in output.get("metadata", {})}
    assert glued == set(re.findall(r"\{glue:text\}`([\w-]+)`", prose(notebook)))


@pytest.mark.parametrize("notebook", ALL_NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_hides_what_an_installation_says(notebook):
    assert "%%capture" not in "\n".join(code(notebook))


# ---- the ledger ---------------------------------------------------------------------------------------------------


def chapters() -> set[int]:
    return {int(path.name[:2]) for path in NOTEBOOKS}


def test_every_claim_of_a_finished_chapter_is_checked_by_a_cell():
    checked = {match for path in NOTEBOOKS for match in re.findall(r'check\(\s*"([\w-]+)"', "\n".join(code(path)))}
    wanted = {claim.id for claim in claims.load().values() if claim.chapter in chapters()}
    assert checked - set(claims.load()) == set(), "unknown ids"
    assert wanted - checked == set()


def test_every_claim_of_a_finished_chapter_has_a_stored_record():
    recorded = {record.claim for path in NOTEBOOKS for record in claims.records(path)}
    assert {claim.id for claim in claims.load().values() if claim.chapter in chapters()} <= recorded


def test_stored_records_lie_within_their_bands():
    for path in NOTEBOOKS:
        for record in claims.records(path):
            claim = claims.load()[record.claim]
            assert claim.speed or claim.accepts(record.measured), record


# ---- what the project does not say --------------------------------------------------------------------------------


def test_no_absolute_paths_and_no_package_index_addresses():
    forbidden = re.compile(
        r"/(home|root|Users|work|tmp)/\w|pypi\.org|pythonhosted|registry\.npmjs|download\.pytorch\.org"
    )
    for path in tracked():
        if path.suffix in {".py", ".md", ".yml", ".toml", ".cff", ".ipynb", ".txt", ".sh", ".json", ".css", ".js", ""}:
            found = forbidden.search(path.read_text(encoding="utf-8", errors="replace"))
            assert path.name == "test_house.py" or not found, f"{path.relative_to(ROOT)}: {found and found.group()}"


def test_readme_names_the_two_commands_and_ci_runs_the_second():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make book" in readme
    assert "make test" in readme
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("make test")
