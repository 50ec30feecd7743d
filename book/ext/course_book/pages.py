"""The generated pages: the claims ledger and the execution status."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from course_lib import claims

from .outputs import notebooks, read
from .pieces import badge, collapsed, fields, table

LOGGER = logging.getLogger(__name__)
SOURCES = {"A": "the optimisation guide", "B": "the inner skeleton"}
# A claim that was checked more than once shows the first of these that occurs.
SEVERITY = ("not confirmed here", "corrected", "dated", "confirmed", "not yet measured")


def title(notebook: dict[str, Any]) -> str:
    """Return a notebook's first heading."""
    prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    found = re.search(r"^# +(.+)$", prose, re.MULTILINE)
    return found[1].strip() if found else "Untitled"


def machine_text(machine: dict[str, Any]) -> str:
    """Describe a machine in one line."""
    memory = f"{machine['memory_bytes'] / 2**30:.2f} GiB of memory" if machine.get("memory_bytes") else None
    cores = f"{machine['cores']} cores" if machine.get("cores") else None
    parts = [machine.get("gpu"), machine.get("cpu"), cores, memory, machine.get("system")]
    return ", ".join([str(part) for part in parts if part] + [f"Python {machine['python']}"])


class GeneratedPage(SphinxDirective):  # type: ignore[misc]
    """What the ledger and the status page share: links to pages and the list of machines."""

    def prepare(self) -> None:
        """Collect the notebooks of the book; the page is generated anew in every build."""
        self.env.note_reread()
        self.files = notebooks(self.env)
        self.titles = {page: title(read(path)) for page, path in self.files.items()}
        self.machines: dict[str, int] = {}

    def page_link(self, page: str, text: str | None = None) -> nodes.Node:
        """Return a link to a page of the book."""
        content = nodes.inline(text=text or self.titles[page])
        target = {"refdomain": "std", "reftype": "doc", "reftarget": f"/{page}", "refexplicit": True}
        return pending_xref("", content, refdoc=self.env.docname, refwarn=True, **target)

    def machine_link(self, machine: dict[str, Any], versions: dict[str, str]) -> nodes.Node:
        """Return a link to the description of a machine and its versions, which stands once on the page."""
        key = json.dumps([machine, versions], sort_keys=True)
        number = self.machines.setdefault(key, len(self.machines) + 1)
        shown = machine.get("gpu") or machine.get("cpu") or machine["system"]
        return nodes.reference("", str(shown), refuri=f"#machine-{number}", internal=True)

    def machine_list(self) -> list[nodes.Node]:
        """Return the machines that the page links to, with their versions, collapsed."""
        boxes: list[nodes.Node] = []
        for key, number in self.machines.items():
            machine, versions = json.loads(key)
            packages = fields(*((name, [nodes.Text(version)]) for name, version in sorted(versions.items())))
            boxes += collapsed(f"Machine and versions: {machine_text(machine)}", packages, anchor=f"machine-{number}")
        return boxes


class ClaimsLedger(GeneratedPage):
    """``{claims-ledger}``: every claim with its source, expectation, values and verdict, by chapter."""

    def run(self) -> list[nodes.Node]:
        """Build the ledger from ``book/claims.yml`` and the records in the notebooks' outputs."""
        self.prepare()
        ledger = claims.load(Path(self.env.srcdir, "book", "claims.yml"))
        found: dict[str, list[tuple[str, claims.Record]]] = {}
        for page, path in self.files.items():
            for record in claims.records(path):
                if record.claim not in ledger:
                    self.warn(f"{page} records the claim {record.claim!r}, which is not in book/claims.yml")
                elif record.verdict != (now := self.verdict(ledger[record.claim], record)):
                    self.warn(f"{page} records {record.claim} as {record.verdict}, now {now}; run the notebook again")
                found.setdefault(record.claim, []).append((page, record))
        verdicts = {name: self.worst([record for _, record in found.get(name, [])]) for name in ledger}
        sections: list[nodes.Node] = []
        for chapter in sorted({claim.chapter for claim in ledger.values()}):
            home = next((page for page in self.files if re.match(rf"notebooks/{chapter:02d}-", page)), None)
            section = nodes.section(ids=[f"claims-of-chapter-{chapter}"], names=[f"claims of chapter {chapter}"])
            section += nodes.title("", f"Chapter {chapter}" + (f": {self.titles[home]}" if home else ""))
            if home:
                section += nodes.paragraph("", "", self.page_link(home, "Go to the chapter"))
            for claim in ledger.values():
                if claim.chapter == chapter:
                    section += self.card(claim, verdicts[claim.id], found.get(claim.id, []))
            sections.append(section)
        return [self.summary(Counter(verdicts.values())), *self.machine_list(), *sections]

    def warn(self, message: str) -> None:
        """Report what is wrong with a record; it fails a build that treats warnings as errors."""
        LOGGER.warning(message, location=self.env.docname, type="course")

    @staticmethod
    def verdict(claim: claims.Claim, record: claims.Record) -> str:
        """Return the verdict that the current claims file gives a recorded value."""
        return (claim.verdict or "confirmed") if claim.accepts(record.measured) else "not confirmed here"

    @staticmethod
    def worst(records: list[claims.Record]) -> str:
        """Return the verdict that a claim's records amount to."""
        return min((record.verdict for record in records), key=SEVERITY.index, default="not yet measured")

    @staticmethod
    def summary(counts: Counter[str]) -> nodes.Node:
        """Return how many claims have which verdict."""
        line = nodes.paragraph("", f"{counts.total()} claims: ", classes=["course-summary"])
        for verdict in claims.VERDICTS:
            line += [badge(verdict, f"{counts[verdict]} {verdict}"), nodes.Text(" ")]
        return line

    def card(self, claim: claims.Claim, verdict: str, found: list[tuple[str, claims.Record]]) -> nodes.Node:
        """Return one claim's card, which carries the claim's id as its anchor."""
        card = nodes.container(ids=[claim.id], names=[claim.id], classes=["course-card"])
        self.state.document.note_explicit_target(card)
        name = nodes.reference("", claim.id, refuri=f"#{claim.id}", internal=True)
        card += nodes.paragraph("", "", badge(verdict), nodes.Text(" "), name, classes=["course-card-head"])
        card += nodes.paragraph("", "", *self.inline(claim.claim))
        rows: list[tuple[str, list[nodes.Node]]] = [("Source", [nodes.Text(source_text(claim.source))])]
        if claim.states:
            rows.append(("It states", self.inline(str(claim.states))))
        if claim.expect is not None or claim.band is not None:
            rows.append(("Expected", [nodes.Text(claim.band_text())]))
        for page, record in found:
            label = "Computed here" if claim.kind == "exact" else "Measured here"
            rows.append((label, [nodes.strong(text=measured_text(claim, record))]))
            where = [self.page_link(page), nodes.Text(f", {record.date}, ")]
            rows.append(("Where", [*where, self.machine_link(record.machine, record.versions)]))
        if claim.reading:
            rows.append(("Reading", self.inline(claim.reading)))
        card += fields(*rows)
        return card

    def inline(self, text: str) -> list[nodes.Node]:
        """Parse a text of the claims file as inline Markdown."""
        parsed, messages = self.state.inline_text(text, self.lineno)
        return [*parsed, *messages]


def measured_text(claim: claims.Claim, record: claims.Record) -> str:
    """Return a record's value with its unit."""
    value = record.measured
    if isinstance(value, dict) and isinstance(claim.expect, dict):
        # A stored notebook sorts its keys; the claim's own order reads better.
        value = {key: value[key] for key in claim.expect if key in value}
    if value is True:
        return "the check passed"
    return f"{claims.show(value, claims.decimals(record.unit))} {record.unit}".strip()


def source_text(source: str) -> str:
    """Write out a claim's source: ``A2.1`` becomes the document's name and section."""
    return re.sub(
        r"\b([AB])\s*(\d[\d.]*)?",
        lambda found: SOURCES[found[1]] + (f", section {found[2]}" if found[2] else ""),
        source,
    )


class ExecutionStatus(GeneratedPage):
    """``{execution-status}``: each notebook's run time, peak memory, date, machine and versions."""

    def run(self) -> list[nodes.Node]:
        """Build the table from the notebooks' ``course`` metadata."""
        self.prepare()
        rows = [[[self.page_link(page)], *self.figures(path)] for page, path in self.files.items()]
        head = ("Notebook", "Seconds", "Peak memory", "Date", "Machine")
        return [table(head, rows, "course-status"), *self.machine_list()]

    def figures(self, path: Path) -> list[str | list[nodes.Node]]:
        """Return what a notebook's run took, or that there was none."""
        run = read(path)["metadata"].get("course")
        if not run:
            return ["not yet executed", "", "", ""]
        memory = f"{run['peak_memory_bytes'] / 2**30:.2f} GiB"
        return [f"{run['seconds']:.1f}", memory, run["date"][:10], [self.machine_link(run["machine"], run["versions"])]]
