"""The page of compiled kernels: what each kernel becomes on each card, from the stored report."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from course_lib.kernels._report import Compiled, read_report
from course_lib.kernels._targets import PARTITIONS, REGISTERS_PER_LANE, TARGETS, Target

from .pieces import collapsed, fields, table

KIB = 1024
SUMMARY = ("Card", "Kernels", "Matrix instruction", "Most registers", "Most shared memory", "With spills", "Wrong")
HEAD = ("Case", "Registers", "Spills", "Shared memory", "Matrix", "Resident", "Limit", "Tile", "Warps, stages")


class CompileReport(SphinxDirective):  # type: ignore[misc]
    """``{compile-report}``: a summary by card, then every compiled kernel, by card."""

    def run(self) -> list[nodes.Node]:
        """Build the page from ``book/compile_report.json``."""
        path = Path(self.env.srcdir, "book", "compile_report.json")
        self.env.note_dependency(str(path))
        if not path.exists():
            raise self.error("compile-report: there is no book/compile_report.json; `make compile` writes it")
        stamp, entries = read_report(path)
        found = {name: [entry for entry in entries if entry.target == name] for name in TARGETS}
        found = {name: rows for name, rows in found.items() if rows}
        told = f"{len(entries)} compiled kernels, made by Triton {stamp['triton']} on {stamp['date']}."
        sections = [self.section(TARGETS[name], entries) for name, entries in found.items()]
        rows = [summary_row(TARGETS[name], entries) for name, entries in found.items()]
        return [nodes.paragraph(text=told), table(SUMMARY, rows, "course-compiled"), *sections]

    def section(self, target: Target, entries: list[Compiled]) -> nodes.section:
        """Return what was compiled for one card, a table a kernel."""
        section = nodes.section(ids=[f"compiled-for-{target.name.replace('_', '-')}"], names=[target.name])
        section += nodes.title("", f"{target.cards} ({target.name})")
        registers = REGISTERS_PER_LANE * PARTITIONS * target.warp_size
        limits = [
            ("A thread", f"at most {target.registers_per_thread} registers"),
            ("A block", f"at most {size(target.shared_per_block)} of shared memory"),
            ("A processor", f"{registers:,} registers, {size(target.shared_per_processor)} of shared memory"),
            ("It holds", f"{target.warps} warps of {target.warp_size} threads, {target.blocks} blocks"),
            ("Source", target.source),
        ]
        if target.tensor_memory:
            limits.insert(-1, ("Tensor memory", f"{target.tensor_memory} columns a processor"))
        section += fields(*((name, [nodes.Text(value)]) for name, value in limits))
        groups: dict[str, list[list[str]]] = {}
        for entry in entries:
            subject, _, case = entry.case.partition(" ")
            groups.setdefault(f"{subject}, {entry.kernel}", []).append([case, *figures(target, entry)])
        for name, rows in groups.items():
            told = f"{name}: {len(rows)} {'case' if len(rows) == 1 else 'cases'}"
            section += collapsed(told, table(HEAD, rows, "course-compiled"))
        return section


def size(count: int) -> str:
    """Write out a number of bytes."""
    return f"{count / KIB:.4g} KiB" if count >= KIB or count == 0 else f"{count} bytes"


def summary_row(target: Target, entries: list[Compiled]) -> list[str]:
    """Return a card's line of the summary."""
    counts = [name for entry in entries for name in entry.instructions if name.startswith(target.instruction)]
    return [
        f"{target.cards} ({target.name})",
        str(len(entries)),
        target.instruction if counts else "none",
        f"{max(entry.registers for entry in entries)} of {target.registers_per_thread}",
        f"{size(max(entry.shared_bytes for entry in entries))} of {size(target.shared_per_block)}",
        str(sum(entry.spills > 0 for entry in entries)),
        str(sum(bool(entry.faults()) for entry in entries)),
    ]


def figures(target: Target, entry: Compiled) -> list[str]:
    """Return what stands in a compiled kernel's line after the case."""
    tile = ("BLOCK_M", "BLOCK_N", "TOKENS", "Q_HEADS", "BLOCK_P")
    blocks = [entry.constants[name] for name in tile if name in entry.constants]
    # Machine code says more than PTX where there are both; its names are the ones in capitals.
    machine = {name: count for name, count in entry.instructions.items() if name.isupper()} or entry.instructions
    return [
        str(entry.registers),
        str(entry.spills),
        size(entry.shared_bytes),
        ", ".join(f"{count} {name}" for name, count in machine.items()) or "none",
        f"{entry.warps} of {target.warps} warps, {entry.blocks} {'block' if entry.blocks == 1 else 'blocks'}",
        entry.limited_by,
        "×".join(map(str, blocks)),
        f"{entry.num_warps}, {entry.num_stages}",
    ]
