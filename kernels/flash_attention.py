"""Flash attention in six versions, each with one idea more than the one before; chapter 05 tells the story.

    python kernels/flash_attention.py [--versions 1,3] [--tokens 1024,16384] [--json FOLDER]

Each version is checked against float64 and only then timed. On a CUDA card the run also times PyTorch's own kernels;
elsewhere the kernels run in Triton's interpreter at small size, which checks them and says nothing about their speed.
Heads are grouped unless `--kv-heads` is as much as `--heads`, which PyTorch's memory-efficient kernel insists on.
The study versions compute causal attention of contiguous tensors whose head_dim is a power of two of at least 16.
"""

import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

if __name__ == "__main__" and importlib.util.find_spec("triton") is None:
    sys.exit(print("Triton is not installed (it exists for Linux), so there is nothing to study here."))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import triton
import triton.language as tl

from course_lib import benchmark
from course_lib.attention import attention
from course_lib.attention.cost import flash_cost
from course_lib.attention.yardstick import Attention, Contestant, measure, others
from course_lib.kernels import flash_attention as library
from course_lib.kernels.flash_attention_forward import attend, forward_kernel

ROWS, KEYS = 128, 64  # queries and keys of a block
OPTIONS = {"num_warps": 8, "num_stages": 2}
LOG2_E = math.log2(math.e)

# ---- what the kernels share


@triton.jit
def load_rows(matrix, first, limit, COUNT: tl.constexpr, D: tl.constexpr):
    """Load COUNT rows of a matrix with D columns; rows from `limit` on are 0."""
    rows = tl.arange(0, COUNT)[:, None]
    offsets = rows * D + tl.arange(0, D)[None, :]
    return tl.load(matrix + tl.cast(first, tl.int64) * D + offsets, mask=first + rows < limit, other=0.0)


@triton.jit
def store_rows(matrix, values, first, limit, COUNT: tl.constexpr, D: tl.constexpr):
    """Store COUNT rows of a matrix with D columns; rows from `limit` on are left out."""
    rows = tl.arange(0, COUNT)[:, None]
    offsets = rows * D + tl.arange(0, D)[None, :]
    tl.store(matrix + tl.cast(first, tl.int64) * D + offsets, values, mask=first + rows < limit)


@triton.jit
def masked_scores(queries, k, first, start, n, scale, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    """Scores of the queries from `first` on for the keys from `start` on; minus infinity where the key is later."""
    keys = load_rows(k, start, n, KEYS, D)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    later = start + tl.arange(0, KEYS)[None, :] > first + tl.arange(0, ROWS)[:, None]
    return tl.where(later, float("-inf"), scores)


# ---- version 1: the formula, a kernel for each step


@triton.jit
def scores_kernel(q, k, scores, n, scale, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    head, first, start = tl.program_id(2).to(tl.int64), tl.program_id(0) * ROWS, tl.program_id(1) * KEYS
    queries = load_rows(q + head * n * D, first, n, ROWS, D)
    block = masked_scores(queries, k + head // GROUP * n * D, first, start, n, scale, ROWS, KEYS, D)
    rows, columns = first + tl.arange(0, ROWS)[:, None], start + tl.arange(0, KEYS)[None, :]
    tl.store(scores + (head * n + rows) * n + columns, block, mask=(rows < n) & (columns < n))


@triton.jit
def softmax_kernel(scores, n, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    row = scores + tl.program_id(0).to(tl.int64) * n
    values = tl.load(row + columns, mask=columns < n, other=float("-inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, axis=0))
    tl.store(row + columns, weights / tl.sum(weights, axis=0), mask=columns < n)


@triton.jit
def weighted_sum_kernel(
    weights, v, output, n, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr
):
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, n, KEYS):
        columns = start + tl.arange(0, KEYS)[None, :]
        block = tl.load(weights + (head * n + rows) * n + columns, mask=(rows < n) & (columns < n), other=0.0)
        total = tl.dot(block, load_rows(v + head // GROUP * n * D, start, n, KEYS, D), total, input_precision="ieee")
    store_rows(output + head * n * D, total, first, n, ROWS, D)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Write every score to memory, turn them into weights there, multiply with V."""
    q, k, v, group, n, d = _prepare(q, k, v)
    heads, output = q.shape[0] * q.shape[1], torch.empty_like(q)
    scores = q.new_empty(heads, n, n)
    sizes = {"GROUP": group, "ROWS": ROWS, "KEYS": KEYS, "D": d, **OPTIONS}
    scores_kernel[(triton.cdiv(n, ROWS), triton.cdiv(n, KEYS), heads)](q, k, scores, n, d**-0.5, **sizes)
    softmax_kernel[(heads * n,)](scores, n, WIDTH=triton.next_power_of_2(n), num_warps=8)
    weighted_sum_kernel[(triton.cdiv(n, ROWS), heads)](scores, v, output, n, **sizes)
    return output


# ---- version 2: scores never leave the chip


@triton.jit
def two_pass_kernel(
    q, k, v, output, n, scale, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr
):
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    queries = load_rows(q + head * n * D, first, n, ROWS, D)
    k += head // GROUP * n * D
    v += head // GROUP * n * D

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(0, n, KEYS):
        scores = masked_scores(queries, k, first, start, n, scale, ROWS, KEYS, D)
        maximum = tl.maximum(maximum, tl.max(scores, axis=1))

    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, n, KEYS):
        scores = masked_scores(queries, k, first, start, n, scale, ROWS, KEYS, D)
        weights = tl.exp(scores - maximum[:, None])
        values = load_rows(v, start, n, KEYS, D)
        total += tl.sum(weights, axis=1)
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
    store_rows(output + head * n * D, weighted / total[:, None], first, n, ROWS, D)


def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keep the scores of a block of queries on the chip: one pass for the maximum, a second for sum and output."""
    return _launch(two_pass_kernel, q, k, v)


# ---- version 3: one pass


@triton.jit
def online_softmax_kernel(
    q, k, v, output, n, scale, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr
):
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    queries = load_rows(q + head * n * D, first, n, ROWS, D)
    k += head // GROUP * n * D
    v += head // GROUP * n * D

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, n, KEYS):
        scores = masked_scores(queries, k, first, start, n, scale, ROWS, KEYS, D)
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        shrink = tl.exp(maximum - higher)  # what was summed under the old maximum
        weights = tl.exp(scores - higher[:, None])
        values = load_rows(v, start, n, KEYS, D)
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = tl.dot(weights.to(values.dtype), values, weighted * shrink[:, None], input_precision="ieee")
        maximum = higher
    store_rows(output + head * n * D, weighted / total[:, None], first, n, ROWS, D)


def online_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Read K once: carry a running maximum, and shrink sum and output when it rises."""
    return _launch(online_softmax_kernel, q, k, v)


# ---- version 4: no work that the result does not need


@triton.jit
def absorb(
    queries, positions, k, v, begin, end, n, factor, maximum, total, weighted,
    MASKED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Take the keys from `begin` to `end` into the sums; `factor` is the scale times log2(e)."""
    for start in range(begin, end, KEYS):
        dots = tl.dot(queries, tl.trans(load_rows(k, start, n, KEYS, D)), input_precision="ieee")
        if MASKED:
            dots = tl.where(start + tl.arange(0, KEYS)[None, :] > positions[:, None], float("-inf"), dots)
        higher = tl.maximum(maximum, tl.max(dots, axis=1) * factor)
        shrink = tl.exp2(maximum - higher)
        weights = tl.exp2(dots * factor - higher[:, None])  # one multiply-add and one instruction for 2^x
        values = load_rows(v, start, n, KEYS, D)
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = tl.dot(weights.to(values.dtype), values, weighted * shrink[:, None], input_precision="ieee")
        maximum = higher
    return maximum, total, weighted


@triton.jit
def block_skipping_kernel(
    q, k, v, output, n, factor, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr
):
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    queries = load_rows(q + head * n * D, first, n, ROWS, D)
    positions = first + tl.arange(0, ROWS)
    k += head // GROUP * n * D
    v += head // GROUP * n * D

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    diagonal, end = first // KEYS * KEYS, tl.minimum(first + ROWS, n)
    maximum, total, weighted = absorb(
        queries, positions, k, v, 0, diagonal, n, factor, maximum, total, weighted, False, KEYS, D
    )
    maximum, total, weighted = absorb(
        queries, positions, k, v, diagonal, end, n, factor, maximum, total, weighted, True, KEYS, D
    )
    store_rows(output + head * n * D, weighted / total[:, None], first, n, ROWS, D)


def exp2_block_skipping(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stop at the diagonal, mask only there, and fold scale and log2(e) into one factor of a power of two."""
    return _launch(block_skipping_kernel, q, k, v, factor=LOG2_E)


# ---- version 5: the query heads of a group share a block


@triton.jit
def grouped_heads_kernel(
    q, k, v, output, n, factor, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr
):
    kv_head, pair = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    positions, member = pair // GROUP, pair % GROUP  # a row is a query and a head of the group
    offsets = ((kv_head * GROUP + member) * n + positions)[:, None] * D + tl.arange(0, D)[None, :]
    queries = tl.load(q + offsets, mask=positions[:, None] < n, other=0.0)
    k += kv_head * n * D
    v += kv_head * n * D

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    first, last = tl.program_id(0) * ROWS // GROUP, (tl.program_id(0) * ROWS + ROWS - 1) // GROUP
    diagonal, end = first // KEYS * KEYS, tl.minimum(last + 1, n)
    maximum, total, weighted = absorb(
        queries, positions, k, v, 0, diagonal, n, factor, maximum, total, weighted, False, KEYS, D
    )
    maximum, total, weighted = absorb(
        queries, positions, k, v, diagonal, end, n, factor, maximum, total, weighted, True, KEYS, D
    )
    tl.store(output + offsets, weighted / total[:, None], mask=positions[:, None] < n)


def grouped_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Fill the rows of a block with all query heads of a group, so that each key that arrives serves them all."""
    return _launch(grouped_heads_kernel, q, k, v, factor=LOG2_E, packed=True)


# ---- version 6: the library's


def production(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Call the library's kernel: any head_dim, strides, masks, windows and lengths, and a backward pass."""
    return attention(q, k, v, causal=True, backend="triton")


# ---- launching

INTERPRETED = not isinstance(absorb, triton.runtime.JITFunction)


def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    """Return contiguous tensors, query heads per key head, tokens and head_dim."""
    n, d = q.shape[2:]
    group, rest = divmod(q.shape[1], k.shape[1])
    if d < 16 or d & (d - 1) or rest or k.shape != (q.shape[0], k.shape[1], n, d) or k.shape != v.shape:
        raise ValueError(
            f"q has shape {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; the study versions take equal lengths "
            "and a head_dim that is a power of two from 16 on"
        )
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise TypeError("q is bfloat16, which Triton's interpreter multiplies wrongly; float32 or float16 is accepted")
    if not INTERPRETED and q.device.type == "cpu":
        raise ValueError("q is on the CPU; set TRITON_INTERPRET=1 before triton is first imported, or use a card")
    return q.contiguous(), k.contiguous(), v.contiguous(), group, n, d


def _launch(
    kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factor: float = 1.0, packed: bool = False
) -> torch.Tensor:
    """Run a kernel with one program for each block of rows and each head (`packed`: each key head)."""
    q, k, v, group, n, d = _prepare(q, k, v)
    output = torch.empty_like(q)
    rows, heads = (n * group, k.shape[1]) if packed else (n, q.shape[1])
    grid = (triton.cdiv(rows, ROWS), q.shape[0] * heads)
    kernel[grid](q, k, v, output, n, factor * d**-0.5, GROUP=group, ROWS=ROWS, KEYS=KEYS, D=d, **OPTIONS)
    return output


# ---- bytes that travel: what the programs ask for, element by element; a cache on the card may answer some of it


def naive_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """Q once for each block of keys, K and V once for each block of queries, every score four times, the output once."""
    rows = tokens * (triton.cdiv(tokens, KEYS) + 2 * triton.cdiv(tokens, ROWS) + 1)
    return batch * query_heads * (rows * head_dim + 4 * tokens**2) * element_size


def tiled_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """Q and output once; K twice and V once for each block of queries."""
    rows = tokens * (2 + 3 * triton.cdiv(tokens, ROWS))
    return batch * query_heads * rows * head_dim * element_size


def online_softmax_bytes(
    batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int
) -> int:
    """Q and output once; K and V once for each block of queries."""
    rows = tokens * (2 + 2 * triton.cdiv(tokens, ROWS))
    return batch * query_heads * rows * head_dim * element_size


def block_skipping_bytes(
    batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int
) -> int:
    """Q and output once; for each block of queries the keys and values up to its last query: half as many."""
    visible = sum(min(tokens, first + ROWS) for first in range(0, tokens, ROWS))
    return batch * query_heads * (2 * tokens + 2 * visible) * head_dim * element_size


def grouped_heads_bytes(
    batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int
) -> int:
    """Q and output once; keys and values as in version 4, for blocks that count the queries of all heads of a group.

    Blocks of equally many rows ask for equally much, however the rows are made up, once there are enough queries to fill them.
    The gain is in short inputs, where a block of one head would be half empty, and at the diagonal, which is narrower.
    """
    group, visible = query_heads // kv_heads, 0
    for first in range(0, tokens * group, ROWS):
        last = min(tokens, (first + ROWS - 1) // group + 1)
        visible += min(tokens, triton.cdiv(last, KEYS) * KEYS)
    return batch * (query_heads * 2 * tokens + kv_heads * 2 * visible) * head_dim * element_size


def production_bytes(
    batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int, capability: str = ""
) -> int:
    """As version 4, and two float32 numbers a row: the log-sum-exp for the caller, and in base 2 for the backward pass.

    The library cuts its blocks to fit the card, which `capability` names: "sm_80", say. By default it is this machine's, or a
    Hopper where there is none.
    """
    dtype = "float32" if element_size == 4 else "float16"
    capability = capability or ("sm_90" if INTERPRETED else library.capability())
    cut = library.configuration("forward", head_dim, dtype, capability)
    sizes = {"block_q": cut.block_m, "block_k": cut.block_n, "itemsize": element_size}
    with_one_number = flash_cost(tokens, tokens, head_dim, causal=True, **sizes).bytes
    return batch * query_heads * (with_one_number + 4 * tokens)


@dataclass(frozen=True)
class Version:
    """One version: `run` takes q, k, v; `bytes_moved` takes batch, query_heads, kv_heads, tokens, head_dim, element_size."""

    number: int
    name: str
    run: Attention
    bytes_moved: Callable[[int, int, int, int, int, int], int]
    kernels: tuple[Any, ...]

    @property
    def idea(self) -> str:
        """The version's one idea, in a sentence."""
        return (self.run.__doc__ or "").strip()


VERSIONS = [
    Version(1, "naive", naive, naive_bytes, (scores_kernel, softmax_kernel, weighted_sum_kernel)),
    Version(2, "tiled", tiled, tiled_bytes, (two_pass_kernel,)),
    Version(3, "online softmax", online_softmax, online_softmax_bytes, (online_softmax_kernel,)),
    Version(4, "exp2, block skipping", exp2_block_skipping, block_skipping_bytes, (absorb, block_skipping_kernel)),
    Version(5, "grouped heads", grouped_heads, grouped_heads_bytes, (absorb, grouped_heads_kernel)),
    Version(6, "production", production, production_bytes, (forward_kernel, attend)),
]

# ---- checking and timing


def study(sizes: dict[str, int], dtype: torch.dtype, versions: list[Version]) -> list[dict[str, Any]]:
    """Check and time versions and the kernels of others; sizes are batch, query_heads, kv_heads, tokens and head_dim."""
    contestants = [Contestant(one.name, one.run, ours=True, backward=one.run is production) for one in versions]
    if not INTERPRETED:
        contestants += others()
    entries = measure(contestants, sizes, dtype, torch.device("cpu" if INTERPRETED else "cuda"))
    for entry in entries:
        version = next((one for one in versions if one.name == entry["name"]), None)
        entry |= {"version": version.number if version else None, "bytes_moved": None}
        if version and entry["pass"] == "forward":
            entry["bytes_moved"] = version.bytes_moved(*sizes.values(), dtype.itemsize)
    return entries


def table(entries: list[dict[str, Any]]) -> str:
    """Return entries of one shape as text."""
    lines = [f"{'':32}{'error':>9}{'limit':>9}{'MB moved':>11}{'GFLOP':>9}"]
    if any(entry["seconds"] for entry in entries):
        lines[0] += f"{'ms':>10}{'TFLOP/s':>9}{'of bound':>9}"
    for entry in entries:
        line = f"{entry['version'] or '':>2} {entry['name']:21}{entry['pass']:8}"
        if entry["reason"]:
            lines.append(f"{line} not timed: {entry['reason']}")
            continue
        moved, seconds, share = entry["bytes_moved"], entry["seconds"], entry["share_of_bound"]
        line += f"{entry['error']:9.1e}{entry['limit']:9.1e}{f'{moved / 1e6:.1f}' if moved else '':>11}"
        line += f"{entry['flop'] / 1e9:9.3g}"
        if seconds:
            line += f"{seconds * 1e3:10.3f}{entry['flop'] / seconds / 1e12:9.1f}{f'{share:.0%}' if share else '':>9}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    on_card = not INTERPRETED
    arguments, numbers = benchmark.study_options(__doc__, VERSIONS), benchmark.numbers
    arguments.add_argument("--tokens", type=numbers, default=[1024, 4096, 16384] if on_card else [200], metavar="N,...")
    arguments.add_argument("--head-dims", type=numbers, default=[64, 128] if on_card else [32], metavar="D,...")
    arguments.add_argument("--heads", type=int, default=16 if on_card else 4, help="query heads")
    arguments.add_argument("--kv-heads", type=int, default=4 if on_card else 2, help="key and value heads")
    options = arguments.parse_args()

    cases = [
        {
            "batch": max(1, 16384 // tokens) if on_card else 1,
            "query_heads": options.heads,
            "kv_heads": options.kv_heads,
            "tokens": tokens,
            "head_dim": head_dim,
        }
        for head_dim, tokens in itertools.product(options.head_dims, options.tokens)
    ]
    run = partial(study, versions=options.versions)
    benchmark.run_study("flash_attention", cases, run, table, on_card=on_card, folder=options.json)


if __name__ == "__main__":
    main()
