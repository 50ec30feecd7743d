"""Products with a weight of 4 bits in five versions: where the codes become numbers, and how often they are read.

    python kernels/quantized_matmul.py [--versions 1,5] [--rows 1,16] [--shapes 4096x14336] [--schemes nf4] [--json FOLDER]

Each version multiplies rows of x by a quantised weight, is checked against float64, and only then timed. Bytes are those that its
operations or programs ask for; a cache on the card may answer some of it. The bound is the time in which a card reads codes,
scales and x once and writes the result once, or computes it, whichever is longer. On a CUDA card the run also times PyTorch's product
with the values in 16 bits, and bitsandbytes' kernels where they are installed; elsewhere the kernels run in Triton's interpreter at
small size, which checks them and says nothing about their speed.
"""

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

if __name__ == "__main__" and importlib.util.find_spec("triton") is None:
    sys.exit(print("Triton is not installed (it exists for Linux), so there is nothing to study here."))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import triton
import triton.language as tl

from course_lib import benchmark
from course_lib.attention.cost import Cost
from course_lib.attention.yardstick import output_error, share_of_bound
from course_lib.kernels import quantized_matmul as library
from course_lib.kernels.quantized_matmul_kernels import sum_kernel
from course_lib.quantization import QuantizedTensor, nf4_levels, quantize

Product = Callable[[torch.Tensor, QuantizedTensor, torch.Tensor], torch.Tensor]  # x, weight, levels

BLOCK = 64  # neighbours that share a scale
ROWS, COLUMNS = 8, 512  # of the weight, that a program of versions 2 to 4 takes at a time
SHARES = 4

# ---- version 1: two operations


def dequantise_first(x: torch.Tensor, weight: QuantizedTensor, levels: torch.Tensor) -> torch.Tensor:
    """Dequantise the whole weight, then multiply: its values go to memory and come back."""
    return functional.linear(x, weight.dequantize(x.dtype))


# ---- version 2: values never leave the chip


@triton.jit
def code_kernel(
    x, codes, scales, levels, out, out_features, in_features,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, m = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    row, acc = n.to(tl.int64)[:, None] * in_features, tl.zeros([ROWS], tl.float32)
    for start in range(0, in_features, COLUMNS):
        k = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (n < out_features)[:, None] & (k < in_features)
        byte = tl.load(codes + (row + k) // 2, mask=inside, other=0).to(tl.int32)
        code = tl.where(k % 2 == 0, byte >> 4, byte & 15)
        value = tl.load(levels + code, mask=inside, other=0.0) * tl.load(
            scales + (row + k) // BLOCK, mask=inside, other=0.0
        )
        acc += tl.sum(value * tl.load(x + m * in_features + k, mask=k < in_features, other=0.0).to(tl.float32), 1)
    tl.store(out + m * out_features + n, acc, mask=n < out_features)


def code_by_code(x: torch.Tensor, weight: QuantizedTensor, levels: torch.Tensor) -> torch.Tensor:
    """Make numbers of the codes where they are multiplied; each code loads its byte, its level and its scale."""
    out, sizes = _prepare(x, weight)
    grid = (triton.cdiv(sizes[0], ROWS), len(x))
    code_kernel[grid](x, weight.codes, weight.scale, levels, out, *sizes, BLOCK=BLOCK, ROWS=ROWS, COLUMNS=COLUMNS)
    return out


# ---- version 3: eight codes in one load


@triton.jit
def word_kernel(
    x, words, scales, levels, out, out_features, in_features, span,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, m, begin = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.program_id(2) * span
    row, acc = n.to(tl.int64)[:, None] * in_features, tl.zeros([ROWS], tl.float32)
    for start in range(begin, tl.minimum(begin + span, in_features), COLUMNS):
        k = (start + tl.arange(0, COLUMNS // 8) * 8)[None, :]
        inside = (n < out_features)[:, None] & (k < in_features)
        word = tl.load(words + row // 8 + k // 8, mask=inside, other=0)
        total = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
        for code in tl.static_range(8):  # the first of two codes is in the high half of a byte
            level = tl.load(levels + (word >> (code // 2 * 8 + 4 - code % 2 * 4) & 15))
            total += level * tl.load(x + m * in_features + k + code, mask=k < in_features, other=0.0).to(tl.float32)
        acc += tl.sum(total * tl.load(scales + (row + k) // BLOCK, mask=inside, other=0.0), 1)
    out += tl.program_id(2).to(tl.int64) * tl.num_programs(1) * out_features
    tl.store(out + m * out_features + n, acc, mask=n < out_features)


def word_by_word(x: torch.Tensor, weight: QuantizedTensor, levels: torch.Tensor) -> torch.Tensor:
    """Load eight codes at a time as one word of 32 bits, and a scale with it; levels still come from a table in memory."""
    out, sizes = _prepare(x, weight)
    _multiply_words(x, weight, levels, out, sizes[1], 1)
    return out


# ---- version 4: more programs than rows


def divided_columns(x: torch.Tensor, weight: QuantizedTensor, levels: torch.Tensor) -> torch.Tensor:
    """Divide each row of the weight among programs, so that all of a card has work, and add up their shares in a fixed order."""
    out, (out_features, in_features) = _prepare(x, weight)
    span = triton.cdiv(triton.cdiv(in_features, COLUMNS), SHARES) * COLUMNS
    shares = torch.empty(triton.cdiv(in_features, span), *out.shape, device=x.device)
    _multiply_words(x, weight, levels, shares, span, len(shares))
    grid = (triton.cdiv(out.numel(), library.SUM_BLOCK),)
    sum_kernel[grid](shares, None, out, out_features, out.numel(), len(shares), BLOCK=library.SUM_BLOCK)
    return out


def _multiply_words(
    x: torch.Tensor, weight: QuantizedTensor, levels: torch.Tensor, out: torch.Tensor, span: int, shares: int
) -> None:
    """Launch the kernel of versions 3 and 4."""
    words, grid = weight.codes.view(-1).view(torch.int32), (triton.cdiv(weight.shape[0], ROWS), len(x), shares)
    options = {"BLOCK": BLOCK, "ROWS": ROWS, "COLUMNS": COLUMNS}
    word_kernel[grid](x, words, weight.scale, levels, out, *weight.shape, span, **options)


# ---- version 5: the library's kernel


def production(x: torch.Tensor, weight: QuantizedTensor, levels: torch.Tensor) -> torch.Tensor:
    """Look levels up in registers, share x among rows, and the weight among rows of x: any shape and scheme, tensor cores for many rows."""
    options: dict[str, Any] = {"scheme": weight.scheme, "shape": weight.shape, "block_size": weight.block_size}
    options["levels"] = levels if weight.scheme in library.TABLE_SCHEMES else None
    return library.quantized_matmul(x, weight.codes, weight.scale, **options)


INTERPRETED = not isinstance(code_kernel, triton.runtime.JITFunction)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def _prepare(x: torch.Tensor, weight: QuantizedTensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return an empty result and the weight's sizes."""
    out_features, in_features = weight.shape
    if (
        weight.scheme not in ("nf4", "int4")
        or weight.block_size != BLOCK
        or in_features % BLOCK
        or not x.is_contiguous()
    ):
        raise ValueError(
            f"weight is {weight.scheme} {list(weight.shape)} in blocks of {weight.block_size}, x of shape {list(x.shape)}; study versions "
            f"take nf4 and int4 in rows of whole blocks of {BLOCK}, and contiguous x"
        )
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise TypeError("x is bfloat16, which Triton's interpreter rounds wrongly; float32 or float16 is accepted")
    return x.new_empty(len(x), out_features), (out_features, in_features)


# ---- bytes: of rows of x, out_features and in_features


def least_bytes(rows: int, out_features: int, in_features: int, element_size: int) -> int:
    """Codes, scales and x, read once; the result, written once."""
    weight = out_features * in_features // 2 + out_features * in_features // BLOCK * 4
    return weight + rows * (in_features + out_features) * element_size


def first_bytes(rows: int, out_features: int, in_features: int, element_size: int) -> int:
    """Count what each of PyTorch's operations reads and writes, on tensors without memory."""
    dtype, count = {2: torch.float16, 4: torch.float32}[element_size], out_features * in_features
    with torch.device("meta"):
        codes, scale = torch.empty(out_features, in_features // 2, dtype=torch.uint8), torch.empty(count // BLOCK)
        weight = QuantizedTensor(
            "int4", torch.Size((out_features, in_features)), dtype, BLOCK, codes, scale.view(out_features, -1)
        )
        x = torch.empty(rows, in_features, dtype=dtype)
    return benchmark.eager_bytes(lambda: dequantise_first(x, weight, x))


def code_bytes(rows: int, out_features: int, in_features: int, element_size: int) -> int:
    """A byte, a level and a scale for each code, and x for each program, of which there are some for each row of x."""
    return rows * (out_features * in_features * 9 + _x_and_out(out_features, in_features, element_size))


def word_bytes(rows: int, out_features: int, in_features: int, element_size: int) -> int:
    """Half a byte and a level for each code, a scale for each eight, and x for each program."""
    words = out_features * in_features // 8
    # A level is looked up for what lies past the end of a row, or past the last row, too.
    looked_up = triton.cdiv(out_features, ROWS) * ROWS * triton.cdiv(in_features, COLUMNS) * COLUMNS
    return rows * (words * 8 + looked_up * 4 + _x_and_out(out_features, in_features, element_size))


def divided_bytes(rows: int, out_features: int, in_features: int, element_size: int) -> int:
    """As version 3; and each share of the result goes to memory and comes back, in float32."""
    span = triton.cdiv(triton.cdiv(in_features, COLUMNS), SHARES) * COLUMNS
    shares = 2 * triton.cdiv(in_features, span) * rows * out_features * 4
    return word_bytes(rows, out_features, in_features, element_size) + shares


def _x_and_out(out_features: int, in_features: int, element_size: int) -> int:
    """What the programs for one row of x read of it, and write."""
    return (triton.cdiv(out_features, ROWS) * in_features + out_features) * element_size


def production_bytes(rows: int, out_features: int, in_features: int, element_size: int, scheme: str = "int4") -> int:
    """The weight once for each tile of rows of x, up to 128 of them; a scale for each run of codes; x for each tile of the weight's rows."""
    dtype = {2: torch.float16, 4: torch.float32}[element_size]
    x = torch.empty(rows, in_features, dtype=dtype, device="meta")
    capability, processors = ("interpreter", 108) if INTERPRETED else (library.capability(), _processors())
    plan = library.plan(x, scheme, out_features, BLOCK, capability=capability, processors=processors)
    weight = plan.tiles[0] * out_features * in_features * (1 / 2 + 4 / plan.run)
    table = plan.tiles[0] * plan.tiles[1] * plan.shares * plan.cut.lanes * 4 if scheme in library.TABLE_SCHEMES else 0
    shares = 2 * plan.shares * rows * out_features * 4 if plan.shares > 1 else 0
    return int(weight) + table + shares + rows * (plan.tiles[1] * in_features + out_features) * element_size


def _processors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@dataclass(frozen=True)
class Version:
    """One version: `run` takes x, weight and levels; `bytes_moved` rows, out_features, in_features, element_size."""

    number: int
    name: str
    run: Product
    bytes_moved: Callable[[int, int, int, int], int]

    @property
    def idea(self) -> str:
        """The version's one idea, in a sentence."""
        return (self.run.__doc__ or "").strip()


VERSIONS = [
    Version(1, "dequantise, multiply", dequantise_first, first_bytes),
    Version(2, "code by code", code_by_code, code_bytes),
    Version(3, "word by word", word_by_word, word_bytes),
    Version(4, "divided columns", divided_columns, divided_bytes),
    Version(5, "production", production, production_bytes),
]


def others(weight: QuantizedTensor, values: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the product as others compute it on a card, of the weight's values or of what they quantise them to themselves."""
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "values in 16 bits": lambda x: functional.linear(x, values)
    }
    if weight.scheme == "nf4":

        def bitsandbytes(x: torch.Tensor) -> torch.Tensor:
            import bitsandbytes

            # Their packed weight is ours; a state says how to read it. One row takes their matrix-vector kernel.
            state = bitsandbytes.functional.QuantState(
                weight.scale, weight.shape, nf4_levels().to(x.device), BLOCK, "nf4", x.dtype
            )
            return bitsandbytes.matmul_4bit(x, weight.codes.view(-1, 1).t(), quant_state=state)

        found["bitsandbytes"] = bitsandbytes
    return found


# ---- checking and timing


def study(sizes: dict[str, int], scheme: str, dtype: torch.dtype, versions: list[Version]) -> list[dict[str, Any]]:
    """Check versions and the kernels of others, then time them on a card.

    Sizes are rows, out_features and in_features. An entry's error and limit are those of the worst row of the result, relative; the
    limit is twice the error of version 1, and one rounding. What was not measured is None.
    """
    rows, out_features, in_features = sizes.values()
    x = torch.randn(rows, in_features, device=DEVICE).to(dtype)
    weight = quantize(torch.randn(out_features, in_features, device=DEVICE), scheme, block_size=BLOCK)
    levels = nf4_levels().to(DEVICE) if scheme == "nf4" else torch.arange(-8.0, 8.0, device=DEVICE)
    exact = x.double() @ weight.dequantize(torch.float32).double().T
    limit = 2 * output_error(dequantise_first(x, weight, levels), exact) + torch.finfo(dtype).eps
    calls: dict[str, Callable[[], torch.Tensor]] = {one.name: partial(one.run, x, weight, levels) for one in versions}
    if not INTERPRETED:
        calls |= {name: partial(run, x) for name, run in others(weight, weight.dequantize(dtype)).items()}
    least = Cost(2 * rows * out_features * in_features, least_bytes(*sizes.values(), dtype.itemsize))
    ours = {one.name for one in versions}
    found = benchmark.compare(calls, partial(output_error, exact=exact), limit, ours, not INTERPRETED)

    def moved(version: Version) -> int:
        options = {"scheme": scheme} if version.run is production else {}
        return version.bytes_moved(*sizes.values(), dtype.itemsize, **options)

    case = {"scheme": scheme, **sizes, "dtype": str(dtype).removeprefix("torch.")}
    case |= {"flop": least.flops, "least_bytes": least.bytes, "limit": limit}
    card = None if INTERPRETED else benchmark.card_of(torch.cuda.get_device_name())
    return benchmark.entries(found, versions, case, moved, partial(share_of_bound, card, least))


#: Layers of Llama 3 8B: queries, keys, up, down, and the head, for whose values in float64 only large cards have room.
LLAMA = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096)]


def main() -> None:
    def shapes(text: str) -> list[tuple[int, int]]:
        found = [tuple(int(size) for size in shape.split("x")) for shape in text.split(",")]
        if any(len(shape) != 2 or min(shape) < 1 for shape in found):
            raise ValueError
        return found

    on_card = not INTERPRETED
    arguments, numbers = benchmark.study_options(__doc__, VERSIONS), benchmark.numbers
    arguments.add_argument("--rows", type=numbers, default=[1, 4, 16, 512] if on_card else [1, 6], metavar="N,...")
    large = on_card and torch.cuda.get_device_properties().total_memory > 6e10
    usual = LLAMA[: None if large else -1] if on_card else [(40, 576)]
    arguments.add_argument("--shapes", type=shapes, default=usual, metavar="OUTxIN,...")
    arguments.add_argument("--schemes", type=lambda text: text.split(","), default=["nf4", "int4"], metavar="nf4,int4")
    options = arguments.parse_args()
    if unknown := set(options.schemes) - {"nf4", "int4"}:
        arguments.error(f"--schemes names {', '.join(sorted(unknown))}; accepted are nf4 and int4")

    cases = [
        {"scheme": scheme, "rows": rows, "out_features": shape[0], "in_features": shape[1]}
        for scheme, shape, rows in itertools.product(options.schemes, options.shapes, options.rows)
    ]

    def run(case: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Any]]:
        scheme, *sizes = case.items()
        return study(dict(sizes), scheme[1], dtype, options.versions)

    benchmark.run_study("quantized_matmul", cases, run, benchmark.traffic_table, on_card=on_card, folder=options.json)


if __name__ == "__main__":
    main()
