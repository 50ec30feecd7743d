"""Attention of one new token to a cache in five versions: read each key once, and keep a whole card reading.

    python kernels/flash_decoding.py [--versions 1,4] [--batches 1,32] [--keys 4096] [--json FOLDER]

Each version is checked against float64, and only then timed. Bytes are those that its operations or programs ask for; a cache on
the card may answer some of it. The bound is the time in which a card reads queries, keys and values once and writes the result
once. On a CUDA card the run also times PyTorch's SDPA, and FlashAttention where it is installed; elsewhere the kernels run in
Triton's interpreter at small size, which checks them and says nothing about their speed: times need a card.
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
from torch.nn.functional import scaled_dot_product_attention

if __name__ == "__main__" and importlib.util.find_spec("triton") is None:
    sys.exit(print("Triton is not installed (it exists for Linux), so there is nothing to study here."))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import triton
import triton.language as tl

from course_lib import benchmark
from course_lib.attention.cost import Cost
from course_lib.attention.yardstick import output_error, share_of_bound
from course_lib.kernels import flash_decoding_launch as library
from course_lib.kernels.flash_decoding import flash_decoding
from course_lib.kernels.flash_decoding_arguments import Rules
from course_lib.kernels.flash_decoding_kernel import merge_kernel

Decode = Callable[..., torch.Tensor]  # q, k, v, and for the last version a block table

KEYS = 64  # that a program of versions 2 and 3 takes at a time
SHARES = 8
PAGE = 16

# ---- version 1: a copy of the cache for each query head


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Repeat keys and values for the heads that share them, then multiply, as a model's plain code does."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


# ---- version 2: a program for each query head


@triton.jit
def head_kernel(
    q, k, v, out, lse, tokens, span, group, heads, scale, stride_kb, stride_kh, stride_vb, stride_vh,
    DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    index, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = index // heads, index % heads // group
    columns = tl.arange(0, DIM)
    query = tl.load(q + index * DIM + columns).to(tl.float32) * scale
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    total, highest, acc = 0.0, float("-inf"), tl.zeros([DIM], tl.float32)
    end = tl.minimum((share + 1) * span, tokens)
    for start in range(share * span, end, KEYS):
        rows = start + tl.arange(0, KEYS)
        places, inside = rows[:, None] * DIM + columns[None, :], (rows < end)[:, None]
        scores = tl.sum(tl.load(k + places, mask=inside, other=0.0).to(tl.float32) * query[None, :], 1)
        scores = tl.where(rows < end, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 0))
        weights, decay = tl.exp(scores - new), tl.exp(highest - new)
        total, highest = total * decay + tl.sum(weights, 0), new
        values = tl.load(v + places, mask=inside, other=0.0).to(tl.float32)
        acc = acc * decay + tl.sum(values * weights[:, None], 0)
    place = share.to(tl.int64) * tl.num_programs(0) + index
    if total > 0.0:
        tl.store(out + place * DIM + columns, (acc / total).to(out.dtype.element_ty))
    tl.store(lse + place, highest + tl.log(tl.where(total > 0.0, total, 1.0)))


def head_by_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Never write a score: a program for each query head goes through all keys. Each key is read by every head that shares it."""
    out = torch.empty_like(q)
    _heads(q, k, v, out, torch.empty(q.shape[:2], device=q.device), 1)
    return out


# ---- version 3: several programs for each query head


def divided_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Give a share of the keys to each of eight programs, and merge what they find: a small batch fills a card."""
    batch, heads, _, dim = q.shape
    parts = torch.empty(SHARES, *q.shape, device=q.device)
    sums = torch.empty(SHARES, *q.shape[:3], device=q.device)
    _heads(q, k, v, parts, sums, SHARES)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    size = batch * heads
    merge_kernel[(size,)](
        parts, sums, out, lse, *out.stride()[:3], heads, 1, SHARES, size, VALUE_DIM=dim, BLOCK_DV=dim, BLOCK_S=SHARES
    )
    return out


def _heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, shares: int
) -> None:
    """Launch the kernel of versions 2 and 3."""
    batch, heads, rows, dim = q.shape
    tokens = k.shape[2]
    whole = q.is_contiguous() and k.stride()[2:] == v.stride()[2:] == (dim, 1)
    if rows != 1 or dim & (dim - 1) or not whole or v.shape != k.shape or not tokens:
        raise ValueError(
            f"q has shape {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; study versions take one row, at least one key, and "
            "contiguous heads of one size that is a power of two"
        )
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise TypeError("q is bfloat16, which Triton's interpreter rounds wrongly; float32 or float16 is accepted")
    head_kernel[(batch * heads, shares)](
        q, k, v, out, lse, tokens, _span(tokens, shares), heads // k.shape[1], heads, dim**-0.5,
        *k.stride()[:2], *v.stride()[:2], DIM=dim, KEYS=KEYS,
    )  # fmt: skip


def _span(tokens: int, shares: int) -> int:
    """Return how many keys a share has: whole blocks."""
    return triton.cdiv(triton.cdiv(tokens, KEYS), shares) * KEYS


# ---- versions 4 and 5: the library's kernel


def production(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Make one tile of the query heads that share a key, which is then read once; and as many shares as the card needs."""
    return flash_decoding(q, k, v, backend="triton")


def paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Find the keys through a block table: the same, where the cache lies scattered in a pool."""
    return flash_decoding(q, k, v, block_table=block_table, lengths=lengths, backend="triton")


def pages(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return pools of blocks of 16 tokens that hold keys and values in any order, the table that finds them, and lengths."""
    batch, heads, tokens, dim = k.shape
    blocks = triton.cdiv(tokens, PAGE)
    order = torch.randperm(batch * blocks, device=k.device)
    pools = []
    for store in (k, v):
        store = torch.nn.functional.pad(store, (0, 0, 0, blocks * PAGE - tokens))
        pool = torch.empty(batch * blocks, heads, PAGE, dim, dtype=k.dtype, device=k.device)
        pool[order] = store.view(batch, heads, blocks, PAGE, dim).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=k.device)
    return *pools, order.view(batch, blocks).int(), lengths


INTERPRETED = not isinstance(head_kernel, triton.runtime.JITFunction)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# ---- bytes


def least_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """Keys and values once, queries once, the result once."""
    return 2 * batch * (kv_heads * tokens + query_heads) * head_dim * element_size


def repeated_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """Count what each of PyTorch's operations reads and writes, on tensors without memory."""
    dtype = {2: torch.float16, 4: torch.float32}[element_size]
    with torch.device("meta"):
        q = torch.empty(batch, query_heads, 1, head_dim, dtype=dtype)
        k, v = (torch.empty(batch, kv_heads, tokens, head_dim, dtype=dtype) for _ in range(2))
        return benchmark.eager_bytes(lambda: repeated(q, k, v))


def head_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """Keys and values for each query head, its query, result and log-sum-exp once."""
    return batch * query_heads * (2 * (tokens + 1) * head_dim * element_size + 4)


def divided_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """As version 2, with a query for each share; and shares that see any key are written and read once more, in float32."""
    data = batch * query_heads * 2 * tokens * head_dim * element_size
    seen = triton.cdiv(tokens, _span(tokens, SHARES))
    return data + batch * query_heads * ((SHARES + 1) * head_dim * element_size + _merged(seen, SHARES, head_dim))


def _merged(seen: int, shares: int, head_dim: int) -> int:
    """Return what a row's parts cost: those that saw a key and all log-sum-exps, there and back, and one log-sum-exp in the end."""
    return 2 * 4 * (seen * head_dim + shares) + 4


def production_bytes(
    batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int, table: int = 0
) -> int:
    """Keys and values once for each tile of a group, queries for each share, and the shares as in version 3."""
    dtype = {2: torch.float16, 4: torch.float32}[element_size]
    # Tensors of one element, on the card whose processors count.
    q, k = (
        torch.empty((), dtype=dtype, device=DEVICE).expand(batch, heads, 1, head_dim)
        for heads in (query_heads, kv_heads)
    )
    capacity = triton.cdiv(tokens, PAGE) * PAGE if table else tokens
    plan = library.plan(q, k, k, capacity, table > 0, Rules(0, 1.0, None, 0, None, None))
    data = batch * kv_heads * plan.blocks * (tokens * (2 * head_dim * element_size + table) + plan.splits * table)
    rows = batch * query_heads
    if plan.splits == 1:
        return data + rows * (2 * head_dim * element_size + 4)
    blocks = triton.cdiv(tokens, plan.cut.block_n)
    seen = triton.cdiv(blocks, triton.cdiv(blocks, plan.splits))
    return data + rows * ((seen + 1) * head_dim * element_size + _merged(seen, plan.splits, head_dim))


def paged_bytes(batch: int, query_heads: int, kv_heads: int, tokens: int, head_dim: int, element_size: int) -> int:
    """As version 4, and an entry of the table for each key of each head, and the length for each program."""
    return production_bytes(batch, query_heads, kv_heads, tokens, head_dim, element_size, table=4)


@dataclass(frozen=True)
class Version:
    """One version: `run` takes q and what `prepare` makes of k and v; `bytes_moved` takes sizes and element_size."""

    number: int
    name: str
    run: Decode
    bytes_moved: Callable[[int, int, int, int, int, int], int]
    prepare: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]] = lambda k, v: (k, v)

    @property
    def idea(self) -> str:
        """The version's one idea, in a sentence."""
        return (self.run.__doc__ or "").strip()


VERSIONS = [
    Version(1, "repeat, multiply", repeated, repeated_bytes),
    Version(2, "head by head", head_by_head, head_bytes),
    Version(3, "divided keys", divided_keys, divided_bytes),
    Version(4, "production", production, production_bytes),
    Version(5, "production, paged", paged, paged_bytes, pages),
]


def others() -> dict[str, Decode]:
    """Return the same as others compute it on a card; one that is not installed raises when it is called."""

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    def flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return {"SDPA": sdpa, "flash_attn_with_kvcache": flash_attn}


# ---- checking and timing


def exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute in float64, a sequence at a time so that long caches fit."""
    rows = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])
    found = []
    for query, keys, values in zip(rows, k, v, strict=True):
        scores = query.double() @ keys.double().mT * q.shape[-1] ** -0.5
        found.append(torch.softmax(scores, dim=-1) @ values.double())
    return torch.stack(found).view(q.shape)


def study(sizes: dict[str, int], dtype: torch.dtype, versions: list[Version]) -> list[dict[str, Any]]:
    """Check versions and the kernels of others, then time them on a card.

    Sizes are batch, query_heads, kv_heads, tokens and head_dim. An entry's error and limit are those of the worst row, relative;
    the limit is twice the error of version 1, and one rounding. What was not measured is None.
    """
    batch, query_heads, kv_heads, tokens, head_dim = sizes.values()
    q, k, v = (
        torch.randn(batch, heads, length, head_dim, device=DEVICE, dtype=dtype)
        for heads, length in ((query_heads, 1), (kv_heads, tokens), (kv_heads, tokens))
    )
    exact = exactly(q, k, v)
    limit = 2 * output_error(repeated(q, k, v), exact) + torch.finfo(dtype).eps
    calls: dict[str, Callable[[], torch.Tensor]] = {
        one.name: partial(one.run, q, *one.prepare(k, v)) for one in versions
    }
    if not INTERPRETED:
        calls |= {name: partial(run, q, k, v) for name, run in others().items()}
    least = Cost(4 * batch * query_heads * tokens * head_dim, least_bytes(*sizes.values(), dtype.itemsize))
    ours = {one.name for one in versions}
    found = benchmark.compare(calls, partial(output_error, exact=exact), limit, ours, not INTERPRETED)
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
    arguments.add_argument("--batches", type=numbers, default=[1, 32] if on_card else [1, 2], metavar="N,...")
    # With 32 sequences of the longer caches version 1 makes copies for which only large cards have room.
    large = on_card and torch.cuda.get_device_properties().total_memory > 6e10
    lengths = [4096, 32768] if large else [4096] if on_card else [150]
    arguments.add_argument("--keys", type=numbers, default=lengths, metavar="N,...")
    arguments.add_argument("--head-dim", type=int, default=128 if on_card else 16)
    arguments.add_argument("--heads", type=int, default=32 if on_card else 4, help="query heads")
    arguments.add_argument("--kv-heads", type=int, default=8 if on_card else 2, help="key heads")
    options = arguments.parse_args()

    cases = [
        {
            "batch": batch,
            "query_heads": options.heads,
            "kv_heads": options.kv_heads,
            "tokens": tokens,
            "head_dim": options.head_dim,
        }
        for batch, tokens in itertools.product(options.batches, options.keys)
    ]
    run = partial(study, versions=options.versions)
    benchmark.run_study("flash_decoding", cases, run, benchmark.traffic_table, on_card=on_card, folder=options.json)


if __name__ == "__main__":
    main()
