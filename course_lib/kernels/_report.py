"""The stored report of what every kernel becomes on every card: its entries, their faults, and whether it is current."""

from __future__ import annotations

import ast
import datetime
import hashlib
import io
import json
import tokenize
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_lib.kernels._targets import TARGETS

KERNELS = Path(__file__).parent
REPORT = Path(__file__).resolve().parents[2] / "book" / "compile_report.json"


@dataclass(frozen=True)
class Compiled:
    """What the compiled object of one launch tells.

    Attributes
    ----------
    case, kernel, target : str
        The use that was compiled, the function in Triton, the card.
    num_warps, num_stages : int
        Warps per block, and stages of the software pipeline.
    constants : dict
        The launch's compile-time constants that are numbers: block sizes and head size among them.
    registers, stack_bytes : int
        Registers and bytes of memory per thread.
    spills : int
        Instructions that move registers to memory or back (NVIDIA), registers that live in memory (AMD).
    shared_bytes, tensor_memory : int
        Shared memory in bytes, and columns of tensor memory, per block.
    instructions : dict
        How often each kind of matrix instruction occurs: in PTX and in machine code (NVIDIA), in assembly (AMD).
    matrix : str
        Which matrix instruction must occur: the card's ``"own"``, ``"any"`` that it has, or ``"none"``.
    blocks, warps, limited_by : int, int, str
        The occupancy: what a processor holds at once, and what allows no more.
    """

    case: str
    kernel: str
    target: str
    num_warps: int
    num_stages: int
    constants: dict[str, int]
    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory: int
    instructions: dict[str, int]
    matrix: str
    blocks: int
    warps: int
    limited_by: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells one entry of the report from the others."""
        return self.case, self.kernel, self.target

    def faults(self) -> list[str]:
        """Return what is wrong: a limit of the card exceeded, or the card's matrix instruction missing."""
        target, found = TARGETS[self.target], []
        if self.shared_bytes > target.shared_per_block:
            found.append(f"{self.shared_bytes:,} bytes of shared memory, {target.shared_per_block:,} are allowed")
        if self.tensor_memory > target.tensor_memory:
            found.append(f"{self.tensor_memory} columns of tensor memory, there are {target.tensor_memory}")
        if self.blocks == 0 and not found:
            found.append(f"no block fits: {self.registers} registers, {self.num_warps} warps")
        if self.matrix == "own" and not any(name.startswith(target.instruction) for name in self.instructions):
            found.append(f"no {target.instruction} instruction")
        if self.matrix == "any" and not self.instructions:
            found.append("no matrix instruction")
        return found


def sources(folder: Path = KERNELS) -> dict[str, str]:
    """Return a digest of the code of every kernel file."""
    files = sorted(
        path for path in folder.glob("*.py") if path.name not in ("__init__.py", "_compile.py", "_report.py")
    )
    return {path.name: digest(path.read_text(encoding="utf-8")) for path in files}


def digest(text: str) -> str:
    """Return a digest of Python code that comments, docstrings and blank lines do not change."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def read_report(path: Path = REPORT) -> tuple[dict[str, Any], list[Compiled]]:
    """Read a report: its stamp (version of Triton, date, digests of the kernel files) and its entries."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return report, [Compiled(**entry) for entry in report.pop("compiled")]


def write_report(path: Path, triton_version: str, found: Iterable[Compiled]) -> None:
    """Write a report, one entry a line."""
    stamp = {"triton": triton_version, "date": datetime.date.today().isoformat(), "sources": sources()}
    lines = ",\n".join(json.dumps(asdict(entry)) for entry in found)
    path.write_text(f'{json.dumps(stamp)[:-1]}, "compiled": [\n{lines}\n]}}\n', encoding="utf-8")
