"""Rotary positions in five versions: what a rotation costs is the memory that it moves. Chapter 06 tells what it is for.

    python kernels/rope.py [--versions 1,3] [--tokens 1,16384] [--json FOLDER]

Each version turns queries and keys, is checked against float64, and only then timed. Bytes are those that its operations or
programs ask for; a cache on the card may answer some of it. The bound is the time in which a card reads queries, keys and tables once and
writes the result once. On a CUDA card the run also times compiled PyTorch and the kernels of others, where they are installed;
elsewhere the kernels run in Triton's interpreter at small size, which checks them and says nothing about their speed.
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

if __name__ == "__main__" and importlib.util.find_spec("triton") is None:
    sys.exit(print("Triton is not installed (it exists for Linux), so there is nothing to study here."))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import triton
import triton.language as tl

from course_lib import benchmark
from course_lib.attention.cost import Cost
from course_lib.attention.yardstick import output_error, share_of_bound
from course_lib.kernels.rope import rope_qk
from course_lib.positions import apply_rope, rope_cos_sin, rope_frequencies

Pair = tuple[torch.Tensor, torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Pair]  # q, k, cos, sin

# ---- version 1: the formula as it is often printed


def rotate_half(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Multiply by cosines, and a copy with swapped halves by sines: pass after pass over whole tensors."""
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return turned(q), turned(k)


# ---- version 2: the library's, in PyTorch


def pytorch(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Work on the halves where they lie, with narrow tables: less to copy, yet each product and sum goes through memory."""
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


# ---- version 3: one pass


@triton.jit
def row_kernel(
    x, out, cos, sin, length, stride_xb, stride_xh, stride_xl, stride_ob, stride_oh, stride_ol, HALF: tl.constexpr
):
    sequence, token, head = (tl.program_id(0) // length).to(tl.int64), tl.program_id(0) % length, tl.program_id(1)
    columns = tl.arange(0, HALF)
    x += sequence * stride_xb + head.to(tl.int64) * stride_xh + token.to(tl.int64) * stride_xl
    out += sequence * stride_ob + head.to(tl.int64) * stride_oh + token.to(tl.int64) * stride_ol
    c, s = tl.load(cos + token * HALF + columns), tl.load(sin + token * HALF + columns)
    first, second = tl.load(x + columns).to(tl.float32), tl.load(x + HALF + columns).to(tl.float32)
    tl.store(out + columns, first * c - second * s)
    tl.store(out + HALF + columns, second * c + first * s)


def row_by_row(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Keep what is between load and store on the chip: a program for each head of each token."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = x.shape
        out = torch.empty_like(x)
        strides = (*x.stride()[:3], *out.stride()[:3])
        row_kernel[(batch * length, heads)](x, out, cos, sin, length, *strides, HALF=_half(x), num_warps=1)
        return out

    return turned(q), turned(k)


# ---- version 4: cosines and sines once for all heads


@triton.jit
def token_kernel(
    x, out, cos, sin, heads, length, stride_xb, stride_xh, stride_xl, stride_ob, stride_oh, stride_ol,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    sequence, token = (tl.program_id(0) // length).to(tl.int64), tl.program_id(0) % length
    columns, head = tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    x += sequence * stride_xb + token.to(tl.int64) * stride_xl + head.to(tl.int64) * stride_xh + columns
    out += sequence * stride_ob + token.to(tl.int64) * stride_ol + head.to(tl.int64) * stride_oh + columns
    c, s = tl.load(cos + token * HALF + columns), tl.load(sin + token * HALF + columns)
    inside = (head < heads) & (columns < HALF)
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, first * c - second * s, mask=inside)
    tl.store(out + HALF, second * c + first * s, mask=inside)


def token_by_token(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Load a token's angles once for all heads of a tensor: a program for each token."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = x.shape
        out = torch.empty_like(x)
        strides, block = (*x.stride()[:3], *out.stride()[:3]), triton.next_power_of_2(heads)
        token_kernel[(batch * length,)](x, out, cos, sin, heads, length, *strides, HEADS=block, HALF=_half(x))
        return out

    return turned(q), turned(k)


# ---- version 5: the library's kernel


def production(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Turn queries and keys in one launch and in place: any strides, both layouts, no new memory."""
    return rope_qk(q, k, cos, sin, inplace=True)


INTERPRETED = not isinstance(row_kernel, triton.runtime.JITFunction)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def _half(x: torch.Tensor) -> int:
    """Return half of a head's size."""
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1] or half & (half - 1) or x.stride(-1) != 1:
        raise ValueError(
            f"q or k has shape {list(x.shape)} and strides {list(x.stride())}; study versions take a head_dim that is a power of "
            "two, contiguous"
        )
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise TypeError("q or k is bfloat16, which Triton's interpreter rounds wrongly; float32 or float16 is accepted")
    return half


# ---- bytes


def data_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """Queries and keys, read once and written once."""
    return 2 * batch * (query_heads + kv_heads) * tokens * head_dim * element_size


def table_bytes(tokens: int, head_dim: int) -> int:
    """A cosine and a sine in float32 for each pair of each token."""
    return 2 * tokens * (head_dim // 2) * 4


def row_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """The data once, the tables for every head."""
    tables = batch * (query_heads + kv_heads) * table_bytes(tokens, head_dim)
    return data_bytes(batch, query_heads, kv_heads, tokens, head_dim, element_size) + tables


def token_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """The data once, the tables once for queries and once for keys of each sequence."""
    data = data_bytes(batch, query_heads, kv_heads, tokens, head_dim, element_size)
    return data + 2 * batch * table_bytes(tokens, head_dim)


def production_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """The data once, the tables once for each sequence."""
    data = data_bytes(batch, query_heads, kv_heads, tokens, head_dim, element_size)
    return data + batch * table_bytes(tokens, head_dim)


def eager_bytes(
    run: Rotate, batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int
) -> int:
    """Count what each of PyTorch's operations reads and writes, on tensors without memory."""
    dtype = {2: torch.float16, 4: torch.float32}[element_size]
    with torch.device("meta"):
        q, k = (torch.empty(batch, heads, tokens, head_dim, dtype=dtype) for heads in (query_heads, kv_heads))
        cos, sin = torch.empty(2, tokens, head_dim // 2)
        return benchmark.eager_bytes(lambda: run(q, k, cos, sin))


@dataclass(frozen=True)
class Version:
    """One version: `run` takes q, k, cos, sin; `bytes_moved` batch, query_heads, kv_heads, tokens, head_dim, element_size."""

    number: int
    name: str
    run: Rotate
    bytes_moved: Callable[[int, int, int, int, int, int], int]

    @property
    def idea(self) -> str:
        """The version's one idea, in a sentence."""
        return (self.run.__doc__ or "").strip()


VERSIONS = [
    Version(1, "rotate_half", rotate_half, partial(eager_bytes, rotate_half)),
    Version(2, "apply_rope", pytorch, partial(eager_bytes, pytorch)),
    Version(3, "row by row", row_by_row, row_bytes),
    Version(4, "token by token", token_by_token, token_bytes),
    Version(5, "production, in place", production, production_bytes),
]


def others() -> dict[str, Rotate]:
    """Return the rotation as others compute it on a card; one that is not installed raises when it is called."""
    compiled = torch.compile(pytorch)

    def liger(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        from liger_kernel.ops.rope import LigerRopeFunction

        wide = (torch.cat((table, table), dim=-1)[None] for table in (cos, sin))
        return LigerRopeFunction.apply(q, k, *wide)

    def flash_attn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        from flash_attn.layers.rotary import apply_rotary_emb

        tables = (cos.to(q.dtype), sin.to(q.dtype))  # it takes no others
        turned = (apply_rotary_emb(x.transpose(1, 2), *tables, inplace=True).transpose(1, 2) for x in (q, k))
        return next(turned), next(turned)

    return {"torch.compile of 2": compiled, "Liger": liger, "flash-attn": flash_attn}


# ---- checking and timing


def study(sizes: dict[str, int], dtype: torch.dtype, versions: list[Version]) -> list[dict[str, Any]]:
    """Check versions and the kernels of others, then time them on a card.

    Sizes are batch, query_heads, kv_heads, tokens and head_dim. An entry's error and limit are those of the worst row, relative;
    the limit is twice the error of version 2, and one rounding. What was not measured is None.
    """
    q, k = (
        torch.randn(sizes["batch"], sizes["tokens"], sizes[heads], sizes["head_dim"], device=DEVICE)
        .to(dtype)
        .transpose(1, 2)
        for heads in ("query_heads", "kv_heads")
    )
    angles = torch.arange(sizes["tokens"], device=DEVICE), rope_frequencies(sizes["head_dim"])[0].to(DEVICE)
    cos, sin = rope_cos_sin(*angles)
    exact = pytorch(q.double(), k.double(), cos.double(), sin.double())

    def error(found: Pair) -> float:
        return max(output_error(one, truth) for one, truth in zip(found, exact, strict=True))

    limit = 2 * error(pytorch(q, k, cos, sin)) + torch.finfo(dtype).eps
    data = data_bytes(*sizes.values(), dtype.itemsize)
    least = Cost(3 * data // (2 * dtype.itemsize), data + table_bytes(sizes["tokens"], sizes["head_dim"]))
    runs = {one.name: one.run for one in versions} | ({} if INTERPRETED else others())
    # Some turn them in place.
    calls = {name: partial(run, q.clone(), k.clone(), cos, sin) for name, run in runs.items()}
    found = benchmark.compare(calls, error, limit, {one.name for one in versions}, not INTERPRETED)
    case = {**sizes, "dtype": str(dtype).removeprefix("torch."), "flop": least.flops, "least_bytes": least.bytes}
    card = None if INTERPRETED else benchmark.card_of(torch.cuda.get_device_name())
    return benchmark.entries(
        found,
        versions,
        case | {"limit": limit},
        lambda version: version.bytes_moved(*sizes.values(), dtype.itemsize),
        partial(share_of_bound, card, least),
    )


def main() -> None:
    on_card = not INTERPRETED
    arguments, numbers = benchmark.study_options(__doc__, VERSIONS), benchmark.numbers
    arguments.add_argument("--tokens", type=numbers, default=[1, 1024, 16384] if on_card else [1, 40], metavar="N,...")
    arguments.add_argument("--head-dims", type=numbers, default=[64, 128] if on_card else [32], metavar="D,...")
    arguments.add_argument("--heads", type=int, default=32 if on_card else 4, help="query heads")
    arguments.add_argument("--kv-heads", type=int, default=8 if on_card else 2, help="key heads")
    options = arguments.parse_args()

    cases = [
        {
            "batch": min(64, max(1, 16384 // tokens)) if on_card else 2,
            "query_heads": options.heads,
            "kv_heads": options.kv_heads,
            "tokens": tokens,
            "head_dim": head_dim,
        }
        for head_dim, tokens in itertools.product(options.head_dims, options.tokens)
    ]
    run = partial(study, versions=options.versions)
    benchmark.run_study("rope", cases, run, benchmark.traffic_table, on_card=on_card, folder=options.json)


if __name__ == "__main__":
    main()
