"""The report of compiled kernels: current, complete, within every card's limits, and able to find what is wrong.

Kernels that were defined under Triton's interpreter cannot be compiled, so compiling happens in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from course_lib.kernels import _report
from course_lib.kernels._report import Compiled, digest, read_report, sources
from course_lib.kernels._targets import TARGETS, occupancy

HERE = Path(__file__).parent


def python(*arguments: str, interpret: str, **settings: str) -> subprocess.CompletedProcess:
    if not find_spec("triton"):
        pytest.skip("there is no Triton for this system")
    environment = {**os.environ, "TRITON_INTERPRET": interpret, **settings}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def anew(tmp_path_factory) -> dict:
    """What compile_some.py prints; nothing comes from an earlier compilation."""
    cache = tmp_path_factory.mktemp("triton")
    done = python(str(HERE / "compile_some.py"), interpret="0", TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def entries() -> list[Compiled]:
    return read_report()[1]


# ---- the stored report --------------------------------------------------------------------------------------------


def test_report_was_made_from_the_kernels_as_they_are():
    stamp, _ = read_report()
    assert stamp["sources"] == sources(), "a kernel changed: run `make compile`"


def test_report_has_everything_that_there_is_to_compile(entries, anew):
    assert Counter(entry.key for entry in entries) == Counter(map(tuple, anew["todo"]))


def test_every_kernel_keeps_to_the_limits_of_every_card_and_uses_its_matrix_instruction(entries):
    assert {entry.key: entry.faults() for entry in entries if entry.faults()} == {}


def test_forward_kernels_of_the_usual_sizes_do_not_spill_on_a100_and_h100(entries):
    wanted = [
        entry
        for entry in entries
        if entry.kernel == "forward_kernel"
        and entry.target in ("sm_80", "sm_90")
        and entry.constants["HEAD_DIM"] in (64, 128)
    ]
    assert len(wanted) > 20
    assert {entry.key: entry.spills for entry in wanted if entry.spills} == {}


def test_products_with_quantised_weights_do_not_spill_on_any_card(entries):
    wanted = [entry for entry in entries if entry.case.startswith("quantised ")]
    assert {entry.kernel for entry in wanted} == {"matvec_kernel", "matmul_kernel", "sum_kernel"}
    assert {entry.key: entry.spills for entry in wanted if entry.spills} == {}


def test_decoding_does_not_spill_on_any_card_and_leaves_room_for_two_programs_on_a100_and_h200(entries):
    wanted = [entry for entry in entries if entry.case.startswith("decoding ")]
    assert {entry.kernel for entry in wanted} == {"split_kernel", "merge_kernel"}
    assert {entry.key: entry.spills for entry in wanted if entry.spills} == {}
    usual = [entry for entry in wanted if entry.target in ("sm_80", "sm_90") and entry.constants.get("BLOCK_M") == 16]
    usual = [entry for entry in usual if "bfloat16" in entry.case]
    assert len(usual) == 20
    assert {entry.key: entry.blocks for entry in usual if entry.blocks < 2} == {}


@pytest.mark.parametrize(
    ("target", "instruction", "machine"),
    [
        ("sm_80", "mma.sync", "HMMA"),
        ("sm_89", "mma.sync", "HMMA"),
        ("sm_90", "wgmma.mma_async", "HGMMA"),
        ("sm_100", "tcgen05.mma", "UTCHMMA"),
        ("gfx942", "v_mfma", "v_mfma"),
    ],
)
def test_each_generation_gets_its_own_matrix_instruction(entries, target, instruction, machine):
    multiply = [entry for entry in entries if entry.target == target and entry.matrix == "own"]
    assert {entry.kernel for entry in multiply} >= {"forward_kernel", "dq_kernel", "dkdv_kernel", "matmul_kernel"}
    for entry in multiply:
        assert entry.instructions[instruction] >= 1, entry.key
        assert entry.instructions[machine] >= 1, entry.key


def test_triton_emits_no_matrix_instruction_for_a_t4(entries):
    """The page, `course doctor` and the choice of a backend say so; a Triton that does will fail here."""
    t4 = [entry for entry in entries if entry.target == "sm_75"]
    assert t4
    assert {name for entry in t4 for name in entry.instructions} == set()


# ---- compiled anew ------------------------------------------------------------------------------------------------


def test_kernels_compiled_anew_are_as_reported(anew, entries):
    reported = {entry.key: entry for entry in entries}
    found = [Compiled(**entry) for entry in anew["compiled"]]
    assert len(found) == 9
    for entry in found:
        assert entry.faults() == []
        if anew["triton"] == read_report()[0]["triton"]:
            assert entry == reported[entry.key]


def test_too_much_shared_memory_is_found(anew):
    (fault,) = anew["greedy"]["faults"]
    assert f"{anew['greedy']['shared_bytes']:,} bytes of shared memory, 166,912 are allowed" == fault
    assert anew["greedy"]["blocks"] == 0


def test_a_missing_matrix_instruction_is_found(anew):
    assert anew["exact"]["faults"] == ["no mma.sync instruction"]
    assert anew["modest"]["faults"] == []


def test_spills_are_found(anew):
    assert anew["spilling"]["spills"] > 0
    assert anew["spilling"]["stack_bytes"] > 0
    assert anew["modest"]["spills"] == anew["modest"]["stack_bytes"] == 0


def test_interpreter_is_refused_with_one_sentence():
    done = python("-m", "course_lib.kernels._compile", interpret="1")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "TRITON_INTERPRET" in line


def test_unknown_card_is_named():
    done = python("-m", "course_lib.kernels._compile", "--targets", "sm_80,abacus", interpret="0")
    assert done.returncode == 2
    assert "abacus" in done.stderr.splitlines()[-1]
    assert "gfx942" in done.stderr.splitlines()[-1]


# ---- faults, occupancy, digests -----------------------------------------------------------------------------------


def entry(**changes) -> Compiled:
    sound = Compiled(
        case="a", kernel="k", target="sm_90", num_warps=8, num_stages=2, constants={}, registers=168, spills=0,
        stack_bytes=0, shared_bytes=98304, tensor_memory=0, instructions={"wgmma.mma_async": 8}, matrix="own",
        blocks=1, warps=8, limited_by="registers",
    )  # fmt: skip
    return replace(sound, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"shared_bytes": 227 * 1024 + 1}, "232,449 bytes of shared memory, 232,448 are allowed"),
        ({"target": "sm_89", "matrix": "none", "shared_bytes": 99 * 1024 + 1}, "101,376 are allowed"),
        ({"target": "sm_100", "matrix": "none", "tensor_memory": 513}, "513 columns of tensor memory, there are 512"),
        ({"instructions": {"mma.sync": 8}}, "no wgmma instruction"),
        ({"instructions": {"mma.sync": 8}, "matrix": "any"}, None),
        ({"instructions": {}, "matrix": "any"}, "no matrix instruction"),
        ({"instructions": {}, "matrix": "none"}, None),
        ({"blocks": 0}, "no block fits: 168 registers, 8 warps"),
    ],
)
def test_faults_are_told(changes, words):
    assert len(entry(**changes).faults()) == (words is not None)
    assert words is None or words in entry(**changes).faults()[0]


@pytest.mark.parametrize(
    ("target", "registers", "warps", "shared_bytes", "blocks"),
    # What cuda_occupancy.h of CUDA 13, in Triton's wheel, answers.
    [
        ("sm_75", 29, 1, 0, 16),
        ("sm_75", 198, 1, 50000, 1),
        ("sm_75", 29, 16, 0, 2),
        ("sm_75", 94, 2, 0, 10),
        ("sm_75", 211, 16, 50000, 0),
        ("sm_80", 55, 1, 0, 32),
        ("sm_80", 146, 4, 155000, 1),
        ("sm_80", 16, 16, 10000, 4),
        ("sm_80", 55, 16, 30000, 2),
        ("sm_80", 250, 16, 20000, 0),
        ("sm_89", 16, 1, 0, 24),
        ("sm_89", 198, 4, 70000, 1),
        ("sm_89", 16, 16, 10000, 3),
        ("sm_89", 237, 8, 50000, 1),
        ("sm_89", 159, 16, 85000, 0),
        ("sm_90", 29, 1, 5000, 32),
        ("sm_90", 172, 2, 90000, 2),
        ("sm_90", 16, 16, 35000, 4),
        ("sm_90", 211, 8, 220000, 1),
        ("sm_90", 198, 16, 40000, 0),
        ("sm_100", 55, 1, 0, 32),
        ("sm_100", 55, 1, 20000, 11),
        ("sm_100", 16, 8, 10000, 8),
        ("sm_100", 237, 8, 205000, 1),
        ("sm_100", 146, 16, 150000, 0),
    ],
)
def test_occupancy_is_that_of_nvidia_s_calculator(target, registers, warps, shared_bytes, blocks):
    assert occupancy(TARGETS[target], registers=registers, shared_bytes=shared_bytes, warps=warps).blocks == blocks


def test_occupancy_names_the_resource_that_limits_it():
    def limit(**figures: int) -> str:
        return occupancy(TARGETS["sm_100"], **({"registers": 32, "shared_bytes": 0, "warps": 4} | figures)).limited_by

    assert limit(registers=255) == "registers"
    assert limit(shared_bytes=100_000) == "shared memory"
    assert limit(tensor_memory=256) == "tensor memory"
    assert limit(warps=1) == "blocks"
    assert limit() == "registers"


CODE = '''"""Module."""


def cut(size):
    """Cut it."""
    return size // 2  # halves
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("Cut it.", "Cut it in two.\n\n    Again.\n    ", True),
        ("  # halves", "", True),
        ("\n\n\n", "\n", True),
        ("Module.", "Another.", True),
        ("// 2", "// 4", False),
        ("def cut(size)", "def cut(size: int)", False),
    ],
)
def test_digest_is_that_of_the_code(tmp_path, old, new, same):
    assert old in CODE
    assert (digest(CODE.replace(old, new)) == digest(CODE)) is same


def test_a_changed_kernel_file_changes_the_digests(tmp_path):
    for path in _report.KERNELS.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert sources(tmp_path) == sources()
    kernel = tmp_path / "flash_attention.py"
    kernel.write_text(kernel.read_text(encoding="utf-8") + "\nCHANGED = True\n", encoding="utf-8")
    changed = {name for name, value in sources(tmp_path).items() if value != sources()[name]}
    assert changed == {"flash_attention.py"}
