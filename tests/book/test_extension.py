"""The Sphinx extension on a book of two pages, and what it promises of the real book."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import docutils_namespace

from course_lib import claims
from course_lib.memory import advise

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = """
- {id: doubled, chapter: 1, source: A2.1, kind: exact, claim: Two and two make four, states: about 4, expect: 4, unit: GB}
- {id: broken, chapter: 1, source: B3, kind: exact, claim: The sum is five, expect: 4, verdict: corrected}
- {id: later, chapter: 9, source: A4, kind: measured, claim: Another chapter's, band: [1, null]}
"""
LIBRARY = '''"""A library that must not be imported."""

raise ImportError("imported")

LIMIT = 3


@decorate
def doubled(number):
    """Double it."""
    return 2 * number


class Box:
    def open(self):
        return "opened"
'''
MACHINE = {"cpu": "Test CPU", "cores": 2, "memory_bytes": 2**33, "gpu": None, "system": "Linux", "python": "3.11.0"}
VERSIONS = {"torch": "2.13.0"}
COMPILED = {
    "case": "sums of halves", "kernel": "sum_kernel", "target": "sm_90", "num_warps": 4, "num_stages": 3,
    "constants": {"BLOCK_M": 64, "BLOCK_N": 32, "HEAD_DIM": 96}, "registers": 168, "spills": 0, "stack_bytes": 0,
    "shared_bytes": 98304, "tensor_memory": 0, "instructions": {"HGMMA": 12, "wgmma.mma_async": 12}, "matrix": "own",
    "blocks": 2, "warps": 8, "limited_by": "registers",
}  # fmt: skip


def record(claim: str, measured: object, verdict: str, unit: str = "") -> dict:
    fields = {"claim": claim, "measured": measured, "unit": unit, "verdict": verdict, "date": "2026-01-02"}
    data = {"text/plain": claim, claims.MIME: fields | {"machine": MACHINE, "versions": VERSIONS}}
    return nbformat.v4.new_output("display_data", data=data)


def text(value: str) -> dict:
    return nbformat.v4.new_output("stream", name="stdout", text=value)


class MiniBook:
    """A book of one chapter, a ledger and a status page in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("book", "notebooks", "library"):
            (root / folder).mkdir()
        pages = "notebooks/01-sums\nbook/ledger\nbook/status\nbook/compiled"
        (root / "index.md").write_text(f"# A book\n\n```{{toctree}}\n{pages}\n```\n")
        (root / "book" / "ledger.md").write_text("# Ledger\n\n```{claims-ledger}\n```\n")
        (root / "book" / "status.md").write_text("# Status\n\n```{execution-status}\n```\n")
        (root / "book" / "compiled.md").write_text("# Compiled\n\n```{compile-report}\n```\n")
        (root / "book" / "claims.yml").write_text(CLAIMS)
        self.compiled(COMPILED)
        (root / "library" / "__init__.py").write_text("from library.sums import Box, doubled as sums\n")
        (root / "library" / "sums.py").write_text(LIBRARY)
        self.stored = root / "notebooks" / "01-sums.ipynb"
        self.executed = root / "_build" / "executed" / "notebooks" / "01-sums.ipynb"
        self.write(self.stored, "stored value")

    def write(
        self, path: Path, *outputs: str | dict, code: str = "2 + 2", prose: str = "Prose.", **course: object
    ) -> None:
        cell = nbformat.v4.new_code_cell(code, outputs=[text(one) if isinstance(one, str) else one for one in outputs])
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# Sums\n\n{prose}"), cell])
        notebook.metadata["language_info"] = {"name": "python"}
        if course:
            notebook.metadata["course"] = course
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, path)

    def compiled(self, *entries: dict) -> None:
        report = {"triton": "9.8.7", "date": "2026-03-05", "sources": {}, "compiled": entries}
        (self.root / "book" / "compile_report.json").write_text(json.dumps(report))

    def build(self) -> str:
        """Build what is out of date and return the warnings."""
        warnings = io.StringIO()
        repository = {"repository_url": "https://github.com/someone/somewhere", "repository_branch": "main"}
        settings = {
            "extensions": ["myst_nb", "sphinx_book_theme", "course_book"],
            "html_theme": "sphinx_book_theme",
            "html_theme_options": repository,
            "nb_execution_mode": "off",
            "exclude_patterns": ["_build"],
        }
        out = self.root / "_build"
        with docutils_namespace():
            folders = (str(self.root), None, str(out / "html"), str(out / "doctrees"), "html")
            app = Sphinx(*folders, confoverrides=settings, status=None, warning=warnings)
            app.build()
        return re.sub(r"\x1b\[[0-9;]*m", "", warnings.getvalue())

    def page(self, name: str) -> BeautifulSoup:
        html = (self.root / "_build" / "html" / f"{name}.html").read_text(encoding="utf-8")
        return BeautifulSoup(html, "html.parser").find("article")


@pytest.fixture
def mini(tmp_path, monkeypatch) -> MiniBook:
    monkeypatch.syspath_prepend(str(ROOT / "book" / "ext"))
    monkeypatch.delenv("COURSE_OUTPUTS", raising=False)
    return MiniBook(tmp_path)


def test_last_run_shows_where_its_code_is_current_and_prose_is_the_repository_s(mini):
    mini.write(mini.stored, "stored value", prose="New words.")
    mini.write(mini.executed, "executed value", prose="Old words.")
    assert mini.build() == ""
    shown = mini.page("notebooks/01-sums").get_text()
    assert "executed value" in shown
    assert "stored value" not in shown
    assert "New words." in shown
    assert "Old words." not in shown


def test_run_of_other_code_is_not_shown_and_warned_about(mini):
    mini.write(mini.executed, "executed value", code="2 + 3")
    assert "run the notebook again" in mini.build()
    assert "stored value" in mini.page("notebooks/01-sums").get_text()


def test_stored_outputs_show_on_request(mini, monkeypatch):
    mini.write(mini.executed, "executed value")
    monkeypatch.setenv("COURSE_OUTPUTS", "stored")
    assert mini.build() == ""
    assert "stored value" in mini.page("notebooks/01-sums").get_text()


def test_page_is_rebuilt_when_its_outputs_change(mini, monkeypatch):
    mini.build()
    mini.write(mini.executed, "first run", record("doubled", 4, "confirmed", "GB"))
    mini.build()
    assert "first run" in mini.page("notebooks/01-sums").get_text()
    assert "Test CPU" in mini.page("book/ledger").get_text()
    mini.write(mini.executed, "second run")
    os.utime(mini.executed, (1, 1))
    mini.build()
    assert "second run" in mini.page("notebooks/01-sums").get_text()
    monkeypatch.setenv("COURSE_OUTPUTS", "stored")
    mini.build()
    assert "stored value" in mini.page("notebooks/01-sums").get_text()


def test_mistyped_choice_of_outputs_is_refused(mini, monkeypatch):
    monkeypatch.setenv("COURSE_OUTPUTS", "sotred")
    with pytest.raises(ExtensionError, match=r"COURSE_OUTPUTS is 'sotred'; accepted are 'executed'.* and 'stored'"):
        mini.build()


def test_widget_shows_its_static_form_and_never_its_repr(mini):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider(value=0)"}
    still = nbformat.v4.new_output("display_data", data=view | {"text/html": "<p>Still picture</p>"})
    mini.write(mini.stored, nbformat.v4.new_output("display_data", data=view), still)
    assert mini.build() == ""
    page = mini.page("notebooks/01-sums")
    assert "Still picture" in page.get_text()
    assert "IntSlider" not in page.get_text()
    assert not page.find("script", type=re.compile("widget"))


def test_ledger_shows_each_claim_with_what_its_notebook_recorded(mini):
    mini.write(mini.stored, record("doubled", 4, "confirmed", "GB"), record("broken", 4, "corrected"))
    assert mini.build() == ""
    ledger = mini.page("book/ledger")
    doubled = ledger.find(id="doubled")
    for shown in ("confirmed", "Two and two make four", "about 4", "Computed here:", "4 GB", "2026-01-02", "Test CPU"):
        assert shown in doubled.get_text()
    assert "the optimisation guide, section 2.1" in doubled.get_text()
    assert doubled.find("a", href="../notebooks/01-sums.html")
    assert doubled.find(class_="course-verdict-confirmed")
    assert ledger.find(id="broken").find(class_="course-verdict-corrected")
    assert ledger.find(id="later").find(class_="course-verdict-not-yet-measured")
    summary = ledger.find(class_="course-summary").get_text()
    for count in ("3 claims", "1 confirmed", "1 corrected", "0 dated", "1 not yet measured"):
        assert count in summary
    assert len(ledger.find_all("details")) == 1, "one machine, told once"
    assert "2.13.0" in ledger.find("details").get_text()


def test_one_unconfirmed_record_decides_the_verdict(mini):
    (mini.root / "book" / "claims.yml").write_text(
        "- {id: fast, chapter: 1, source: A2, kind: measured, claim: Fast, band: [2, null], speed: true}\n"
    )
    mini.write(mini.stored, record("fast", 3.0, "confirmed"), record("fast", 1.0, "not confirmed here"))
    assert mini.build() == ""
    fast = mini.page("book/ledger").find(id="fast")
    assert fast.find(class_="course-verdict-not-confirmed-here")
    assert "Measured here" in fast.get_text(), "only arithmetic is called computed"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (record("doubeld", 4, "confirmed", "GB"), "which is not in book/claims.yml"),
        (record("doubled", 5, "confirmed", "GB"), "records doubled as confirmed, now not confirmed here"),
    ],
)
def test_record_that_does_not_fit_the_claims_is_warned_about(mini, found, message):
    mini.write(mini.stored, found)
    assert message in mini.build()


def test_status_shows_the_run_or_says_that_there_was_none(mini):
    mini.build()
    assert "not yet executed" in mini.page("book/status").get_text()
    run = {"seconds": 12.34, "peak_memory_bytes": 3 * 2**30, "date": "2026-03-04", "machine": MACHINE}
    mini.write(mini.executed, "done", **run, versions=VERSIONS)
    mini.build()
    status = mini.page("book/status").get_text()
    assert "not yet executed" not in status
    for shown in ("Sums", "12.3", "3.00 GiB", "2026-03-04", "Test CPU", "8.00 GiB of memory", "2.13.0"):
        assert shown in status


def test_compiled_kernels_are_told_by_card_with_their_limits(mini):
    faulty = COMPILED | {"target": "sm_89", "spills": 7, "shared_bytes": 102400, "blocks": 0, "instructions": {}}
    mini.compiled(COMPILED, COMPILED | {"case": "sums of others", "registers": 170}, faulty)
    assert mini.build() == ""
    page = mini.page("book/compiled")
    assert "3 compiled kernels, made by Triton 9.8.7 on 2026-03-05." in page.get_text()
    for label in page.find_all(class_="course-label"):
        label.extract()  # for phones only
    texts = [[cell.get_text().strip() for cell in row.find_all("td")] for row in page.find_all("tr")]
    rows = [row for row in texts if row]
    assert ["H100, H200 (sm_90)", "2", "wgmma", "170 of 255", "96 KiB of 227 KiB", "0", "0"] in rows
    assert ["L4, RTX 4090 (sm_89)", "1", "none", "168 of 255", "100 KiB of 99 KiB", "1", "1"] in rows
    resident = "8 of 64 warps, 2 blocks"
    assert ["of halves", "168", "0", "96 KiB", "12 HGMMA", resident, "registers", "64×32", "4, 3"] in rows
    assert len(rows) == 2 + 3
    limits = page.find(id="compiled-for-sm-90").get_text()
    for shown in (
        "255 registers",
        "227 KiB of shared memory",
        "CUDA C++ Programming Guide",
        "sums, sum_kernel: 2 cases",
    ):
        assert shown in limits


def test_cells_say_what_they_are_where_a_phone_shows_no_columns(mini):
    assert mini.build() == ""
    cells = [cell.get_text().strip() for cell in mini.page("book/compiled").find("details").find_all("td")]
    assert cells[:3] == ["of halves", "Registers: 168", "Spills: 0"]


def test_advice_is_computed_with_its_arithmetic(mini):
    options = ":gpu: A100-40GB\n:context: 16000\n:goal: throughput\n:prefill-chunk: 512"
    (mini.root / "book" / "status.md").write_text(f"# Guide\n\n```{{course-advice}} octocoder\n{options}\n```\n")
    assert mini.build() == ""
    page = mini.page("book/status")
    found = advise("octocoder", gpu="A100 40GB", context=16_000, goal="throughput", prefill_chunk=512)
    command = "course advise octocoder --gpu A100-40GB --context 16000 --goal throughput --prefill-chunk 512"
    for told in (command, found.summary, *(row.reason for row in found.rows)):
        assert told in page.get_text().replace("’", "'")  # the book sets quotes as printers do
    names = [row.find("td").get_text().strip() for row in page.find("table").find_all("tr")[1:]]
    assert names == [step.name for step in found.steps]
    assert f"{found.result.sequences:,}" in page.find("table").get_text()
    arithmetic = page.find_all("details")[-1].get_text()
    assert all(line in arithmetic for step in found.steps for line in step.arithmetic)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("octopus", ":gpu: T4\n:context: 100", "neither a published name"),
        ("octocoder", ":gpu: abacus\n:context: 100", "gpu must be one of"),
        ("octocoder", ":gpu: T4", "context"),
    ],
)
def test_advice_that_cannot_be_given_fails_the_build(mini, model, options, message):
    (mini.root / "book" / "status.md").write_text(f"# Guide\n\n```{{course-advice}} {model}\n{options}\n```\n")
    assert message in mini.build()


def test_page_is_rebuilt_when_the_compile_report_changes(mini):
    mini.build()
    mini.compiled(COMPILED | {"registers": 201})
    os.utime(mini.root / "book" / "compile_report.json", (2**31, 2**31))
    mini.build()
    assert "201 of 255" in mini.page("book/compiled").get_text()


def test_missing_compile_report_names_the_command_that_writes_it(mini):
    (mini.root / "book" / "compile_report.json").unlink()
    assert "`make compile` writes it" in mini.build()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("library.sums.doubled", "L8-L11"),
        ("library.sums.Box.open", "L15-L16"),
        ("library.sums.LIMIT", "L5-L5"),
        ("library.Box.open", "L15-L16"),  # what the package imports counts as its own
        ("library.sums", "L8-L11"),  # and hides a module of that name
    ],
)
def test_source_is_linked_by_line_and_shown_without_import(mini, name, lines):
    mini.write(mini.stored, prose=f"See {{course-source}}`~{name}`.\n\n```{{course-code}} {name}\n```")
    assert mini.build() == ""
    page, url = mini.page("notebooks/01-sums"), "https://github.com/someone/somewhere/blob/main/library/sums.py#"
    assert [link.get_text() for link in page.find_all("a", href=url + lines)] == [
        name.rpartition(".")[2],
        "View in the repository",
    ]
    first, last = (int(number) for number in re.findall(r"\d+", lines))
    shown = page.find("details").find("pre").get_text()
    assert shown.split() == "\n".join(LIBRARY.splitlines()[first - 1 : last]).split()
    assert "library.sums" not in sys.modules


@pytest.mark.parametrize("name", ["library.sums.trebled", "library.sums.doubled.open", "elsewhere.sums"])
def test_name_that_the_library_lacks_is_warned_about(mini, name):
    mini.write(mini.stored, prose=f"See {{course-source}}`{name}`.\n\n```{{course-code}} {name}\n```")
    assert mini.build().count(name) >= 2


# ---- The real book --------------------------------------------------------------------------------------------------


def soups(book: Path) -> dict[Path, BeautifulSoup]:
    pages = [*(book / "book").rglob("*.html"), *(book / "notebooks").rglob("*.html")]
    return {page: BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser") for page in pages}


def test_every_page_of_the_contents_is_built_and_no_other(book):
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    wanted = {toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])}
    assert {page.relative_to(book).with_suffix("").as_posix() for page in soups(book)} == wanted


def test_every_claim_has_its_card(book):
    ledger = BeautifulSoup((book / "book" / "ledger.html").read_text(encoding="utf-8"), "html.parser")
    assert {card["id"] for card in ledger.find_all(class_="course-card")} == set(claims.load(ROOT / "book/claims.yml"))


def test_links_inside_the_book_arrive(book):
    pages = soups(book)
    ids = {page: {node["id"] for node in soup.find_all(id=True)} for page, soup in pages.items()}
    lost = []
    for page, soup in pages.items():
        for link in soup.find_all("a", href=True):
            parts = urlsplit(link["href"])
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in ids and anchor not in ids[target]):
                lost.append(f"{page.relative_to(book)}: {link['href']}")
    assert lost == []


def test_pages_name_no_foreign_script_style_or_image(book):
    for page, soup in soups(book).items():
        named = [(tag.get("src") or tag.get("href"), tag) for tag in soup.find_all(["script", "link", "img", "iframe"])]
        assert [str(tag) for address, tag in named if re.match(r"(https?:)?//", address or "")] == [], page.name
        assert not [tag for tag in soup.find_all("script") if re.search(r"https?://(cdn|unpkg)", tag.get_text())]


def test_launch_links_open_a_notebook_of_the_main_branch(book):
    settings = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    repository = settings["repository"]["url"].removeprefix("https://github.com/")
    for page, soup in soups(book).items():
        name = page.relative_to(book).with_suffix(".ipynb").as_posix()
        found = [a["href"] for a in soup.find_all("a", href=True) if "colab.research" in a["href"] and a.find("img")]
        if name.startswith("notebooks/"):
            assert f"https://colab.research.google.com/github/{repository}/blob/main/{name}" in found
            assert (ROOT / name).exists()


def test_chapters_that_the_library_names_exist_and_link_back():
    named: dict[str, str] = {}
    for file in (ROOT / "course_lib").rglob("*.py"):
        for path in re.findall(r"notebooks/[\w/-]+\.ipynb", file.read_text(encoding="utf-8")):
            named[path] = file.relative_to(ROOT).as_posix()
    assert named, "the library names no chapter"
    assert {path: file for path, file in named.items() if not (ROOT / path).exists()} == {}, "no such chapter"
    for path in named:
        cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
        prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert re.search(r"\{course-(source|code)\}", prose), f"{path} links to no source of the library"
