"""What every kernel becomes on every card, compiled ahead of time and without a card.

``python -m course_lib.kernels._compile`` calls each kernel module's own launch functions under a stand-in driver. Triton
specialises the launch for a card as it would on that card; then the launch is recorded instead of run, compiled, and the
compiled object is read: registers, spills, shared memory, matrix instructions, and the occupancy that follows from them.

What is compiled stands in `course_lib.kernels._cases`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from course_lib.kernels._cases import CompileCase, compile_cases
from course_lib.kernels._report import Compiled, write_report
from course_lib.kernels._targets import TARGETS, Target, occupancy

# Matrix instructions as PTX and AMD's assembler spell them, and those of NVIDIA's machine code.
MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)")
MACHINE_MATRIX = re.compile(r"(HMMA|IMMA|HGMMA|IGMMA|UTC\w*MMA)$")
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """A recorded launch of one kernel: what Triton would compile, and with which options."""

    case: CompileCase
    source: Any
    options: dict[str, Any]


# ---- recording ----------------------------------------------------------------------------------------------------


class _Driver:
    """Stands in for a card's driver: it says which card this is, and times nothing."""

    # Triton keeps what it compiled by device; a number of its own makes every recording start from nothing.
    numbers = itertools.count(1000)

    def __init__(self, target: Target) -> None:
        self.target, self.device = target, next(self.numbers)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self.target.backend, self.target.arch, self.target.warp_size)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Let a kernel that tunes itself launch each of its configurations once."""

        def once(call: Callable[[], object], quantiles: tuple[float, ...], **_: object) -> list[float]:
            call()
            return [0.0] * len(quantiles)

        return once


@contextmanager
def recording(target: Target) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Record, instead of run, every launch inside the block as it would be on a card: its source and its options."""
    found: list[tuple[Any, dict[str, Any]]] = []

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        attributes, constants = compile["configs"][0], compile["constants"]
        source = triton.compiler.ASTSource(fn.jit_function, compile["signature"], constants, attributes)
        options = json.loads(compile["specialization_data"])["options"]
        found.append((source, {name: _tuples(value) for name, value in options.items()}))
        return True  # Triton then neither compiles nor runs it

    capability = divmod(target.arch, 10) if isinstance(target.arch, int) else (9, 4)
    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(target)),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", record),
    ):
        yield found


def _tuples(value: Any) -> Any:
    """Turn JSON's lists back into the tuples that Triton's options are made of."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def cases() -> dict[str, CompileCase]:
    """Return the cases of every kernel module by name, and those of Triton's tutorial where its file is at hand."""
    tutorial = os.environ.get("COURSE_TUTORIAL")
    found = [*compile_cases(), *(tutorial_cases(Path(tutorial)) if tutorial else ())]
    return {case.name: case for case in found}


def tutorial_cases(path: Path) -> Iterator[CompileCase]:
    """Yield the cases of Triton's tutorial on fused attention, to be compared with ours; each of its tunings is compiled."""

    def launch(head_dim: int) -> None:
        spec = importlib.util.spec_from_file_location("tutorial", path)
        assert spec is not None
        assert spec.loader is not None
        tutorial = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tutorial)
        q = torch.empty(2, 8, 4096, head_dim, dtype=torch.float16, device="meta", requires_grad=True)
        output = tutorial.attention(q, q, q, True, head_dim**-0.5)
        torch.autograd.backward(output, torch.empty_like(output))

    for head_dim in (64, 128):
        yield CompileCase(f"tutorial float16 {head_dim} causal", partial(launch, head_dim))


def launches(target: Target, case: CompileCase) -> list[Launch]:
    """Record a case's launches on a card; none where the case is not for it."""
    if target.name not in case.targets:
        return []
    with recording(target) as found:
        case.launch()
    return [Launch(case, source, options) for source, options in found]


# ---- compiling and reading ----------------------------------------------------------------------------------------


def compiled(target: Target, launch: Launch) -> Compiled:
    """Compile a recorded launch for a card and read the compiled object.

    Raises
    ------
    Exception
        Whatever Triton raises where it cannot compile the kernel for the card.
    """
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    kernel = triton.compile(launch.source, target=gpu, options=launch.options)
    meta, assembly = kernel.metadata, kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    instructions = Counter(MATRIX.findall(assembly))
    if target.backend == "cuda":
        usage, opcodes = _disassembled(kernel.asm["cubin"])
        registers, stack = (int(re.findall(rf"\b{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
        spills = opcodes["STL"] + opcodes["LDL"]
        instructions += Counter({name: count for name, count in opcodes.items() if MACHINE_MATRIX.match(name)})
    else:
        names = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        registers, stack, spills = (int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0]) for name in names)
    columns = getattr(meta, "tmem_size", 0) or 0
    arguments = launch.source.fn.arg_names
    constants = {arguments[path[0]]: value for path, value in launch.source.constants.items()}
    return Compiled(
        case=launch.case.name,
        kernel=launch.source.fn.__name__,
        target=target.name,
        num_warps=meta.num_warps,
        num_stages=meta.num_stages,
        constants={name: value for name, value in constants.items() if type(value) is int and name.isupper()},
        registers=registers,
        spills=spills,
        stack_bytes=stack,
        shared_bytes=meta.shared,
        tensor_memory=columns,
        instructions=dict(sorted(instructions.items())),
        matrix=launch.case.matrix if "tt.dot" in kernel.asm["ttir"] else "none",
        **asdict(
            occupancy(
                target, registers=registers, shared_bytes=meta.shared, warps=meta.num_warps, tensor_memory=columns
            )
        ),
    )


def _disassembled(cubin: bytes) -> tuple[str, Counter[str]]:
    """Return what cuobjdump says of a compiled object's resources, and how often each machine instruction occurs."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, option, str(path)], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return usage, Counter(OPCODE.findall(code))


# ---- the whole matrix ---------------------------------------------------------------------------------------------

Job = tuple[str, str, int]


def jobs(targets: list[str], words: str = "") -> dict[Job, str]:
    """Return everything there is to compile, as target, case and the launch's place in the case; with the kernel's name."""
    return {
        (target, name, place): launch.source.fn.__name__
        for target in targets
        for name, case in cases().items()
        if words in name
        for place, launch in enumerate(launches(TARGETS[target], case))
    }


def work(job: Job) -> Compiled | str:
    """Do one job; what Triton cannot compile comes back as a sentence."""
    target, name, place = job
    try:
        return compiled(TARGETS[target], launches(TARGETS[target], cases()[name])[place])
    except Exception as error:
        return f"{target}, {name}, launch {place}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def summary(entry: Compiled) -> str:
    """Describe an entry in one line."""
    constants = " ".join(f"{name}={value}" for name, value in entry.constants.items())
    counted = ", ".join(f"{count} {name}" for name, count in entry.instructions.items()) or "no matrix instruction"
    return (
        f"{entry.target} {entry.case}, {entry.kernel}: {entry.registers} registers, {entry.spills} spills, "
        f"{entry.shared_bytes / 1024:.1f} KiB, {counted}, {entry.blocks} resident (limit: {entry.limited_by}); "
        f"{entry.num_warps} warps, {entry.num_stages} stages, {constants}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Compile what is asked for, show it and write the report; return 1 if anything is wrong with a kernel, else 0."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.kernels._compile", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the report")
    parser.add_argument(
        "--targets", default=",".join(TARGETS), help="cards, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--cases", default="", metavar="WORDS", help="only cases whose name contains this")
    parser.add_argument("--processes", type=int, default=2, help="how many to compile at once (default: %(default)s)")
    parser.add_argument("--tutorial", type=Path, metavar="FILE", help="Triton's 06-fused-attention.py, to compare with")
    chosen = parser.parse_args(arguments)
    targets = chosen.targets.split(",")
    refused = None
    if unknown := set(targets) - set(TARGETS):
        refused = f"--targets names {', '.join(sorted(unknown))}; accepted are {', '.join(TARGETS)}"
    elif triton.knobs.runtime.interpret:
        refused = "TRITON_INTERPRET is set, and the interpreter's kernels cannot be compiled; unset it"
    elif chosen.tutorial and (chosen.json or not chosen.tutorial.is_file()):
        refused = (
            f"--tutorial {chosen.tutorial} must be a file, and comes without --json: the report is of our kernels alone"
        )
    if refused:
        parser.exit(2, f"{refused}\n")
    if chosen.tutorial:
        os.environ["COURSE_TUTORIAL"] = str(chosen.tutorial.absolute())
    todo = jobs(targets, chosen.cases)
    found, wrong = [], 0
    with ProcessPoolExecutor(chosen.processes, multiprocessing.get_context("spawn")) as pool:
        for number, result in enumerate(pool.map(work, todo), 1):
            faults = [] if isinstance(result, str) else result.faults()
            shown = result if isinstance(result, str) else summary(result)
            print(f"[{number}/{len(todo)}] {shown}", *faults, sep="\n    WRONG: ", flush=True)
            wrong += isinstance(result, str) or bool(faults)
            found += [] if isinstance(result, str) else [result]
    if chosen.json:
        write_report(chosen.json, triton.__version__, found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
