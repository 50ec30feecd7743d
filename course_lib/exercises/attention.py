"""Exercises of chapter 02: inputs to test with, right answers, and the answers that common mistakes lead to."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import torch

from course_lib.attention.reference import reference_attention
from course_lib.attention.rules import Rules
from course_lib.memory import peak_memory

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def random_heads(rng: Random, *, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw q, k, v of one head and a boolean mask, one row of which sees nothing, and one of which sees one key.

    Shapes are ``[query_len, head_dim]``, ``[kv_len, head_dim]``, ``[kv_len, value_dim]`` and ``[query_len, kv_len]``; `size`
    multiplies q, and so the scores. Those are exact in float32 whatever the order of the sums, so that large ones have one
    softmax: q and k are quarters, and the square root of head_dim is a power of two.
    """
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    query_len, kv_len, head_dim = rng.randint(4, 6), rng.randint(7, 9), rng.choice([4, 16])
    q, k = (torch.randn(length, head_dim, generator=draw).mul(4).round() / 4 for length in (query_len, kv_len))
    v = torch.randn(kv_len, head_dim + 2, generator=draw)
    mask = torch.rand(query_len, kv_len, generator=draw) < 0.6
    mask[0], mask[1] = False, torch.arange(kv_len) == rng.randrange(kv_len)
    # The last two rows are never alike to the mistakes: some keys are seen, some are not.
    mask[2:, 0], mask[2:, 1], mask[2:, 2] = True, False, True
    return size * q, k, v, mask


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the attention of one head, ``[query_len, value_dim]``; 0 for a row that sees nothing."""
    rules = Rules(scale=q.shape[-1] ** -0.5, attention_mask=mask[None, None])
    return reference_attention(q[None, None], k[None, None], v[None, None], rules)[0][0, 0]


def masked_mistakes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what mistakes in the attention of one head lead to."""
    dots = q @ k.T
    scores = dots / math.sqrt(q.shape[-1])
    blind = ~mask.any(dim=-1, keepdim=True)
    right = masked(q, k, v, mask)
    large = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)

    def soft(scores: torch.Tensor, seen: torch.Tensor = mask, dim: int = -1) -> torch.Tensor:
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=dim).masked_fill(blind, 0.0)

    bare = torch.exp(scores) * mask
    return {
        "The scores are not divided by the square root of head_dim.": soft(dots) @ v,
        "The scores are divided by head_dim; its square root is needed.": soft(dots / q.shape[-1]) @ v,
        "Softmax runs over the queries; each query's weights over the keys must sum to one.": (
            torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=0).nan_to_num() @ v
        ),
        "The mask is upside down: True attends.": torch.softmax(scores.masked_fill(mask, -torch.inf), dim=-1) @ v,
        "The mask is ignored.": torch.softmax(scores, dim=-1) @ v,
        "A hidden score becomes 0, and exp(0) is 1: it must become minus infinity.": torch.softmax(scores * mask, -1) @ v,
        "Weights are hidden after softmax, so what is left no longer sums to one.": (torch.softmax(scores, -1) * mask) @ v,
        "Not a number: a row that sees nothing divides 0 by 0, and must give 0.": right.masked_fill(blind, torch.nan),
        "A row that sees nothing attends everywhere: all its scores are the same large negative number.": (
            torch.softmax(large, dim=-1) @ v
        ),
        "Not a number or wrong: exp overflows unless each row's maximum is subtracted first.": bare
        / bare.sum(dim=-1, keepdim=True)
        @ v,
        "exp overflows unless each row's maximum is subtracted first.": (bare / bare.sum(-1, True)).masked_fill(blind, 0)
        @ v,
    }  # fmt: skip


def visible_keys(
    query_len: int,
    kv_len: int,
    window: int | None,
    real: torch.Tensor,
    *,
    top_left: bool = False,
    wide: int = 0,
    rows: bool = False,
) -> torch.Tensor:
    """Return what a causal query sees of padded keys, ``[batch, 1, query_len, kv_len]``, right or with faults.

    ``real`` is boolean, ``[batch, kv_len]``. The faults: queries aligned to the first key, a window that is `wide` keys too
    wide, and padding that hides rows instead of columns.
    """
    first = 0 if top_left else kv_len - query_len
    query, key = torch.arange(first, first + query_len)[:, None], torch.arange(kv_len)
    seen = key <= query
    if window is not None:
        seen &= key > query - window - wide
    return seen & (real[:, None, -query_len:, None] if rows else real[:, None, None, :])


def mask_mistakes(query_len: int, kv_len: int, window: int | None, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the faults of the mask, alone and together, lead to."""

    def seen(top_left: bool = False, wide: int = 0, rows: bool = False) -> torch.Tensor:
        return visible_keys(query_len, kv_len, window, real, top_left=top_left, wide=wide, rows=rows)

    return {
        "Alignment: the queries are the last positions, so row 0 stands at kv_len - query_len.": seen(True),
        "The window is one key too wide: it counts the query's own position.": seen(wide=1),
        "The window is one key too narrow: with a window of 1, a query sees itself.": seen(wide=-1),
        "Padding hides rows: it must hide the padded keys, which are columns.": seen(rows=True),
        "Alignment and window: row 0 stands at kv_len - query_len, and the window is one key too wide.": seen(True, 1),
        "Alignment and padding: row 0 stands at kv_len - query_len, and padding must hide columns.": seen(
            True, 0, True
        ),
        "Window and padding: the window is one key too wide, and padding must hide columns.": seen(False, 1, True),
        "This is the mask as you found it: there are three faults in it.": seen(True, 1, True),
        "The mask is upside down: True attends.": ~seen(),
    }


def random_groups(rng: Random, *, kv_len: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw q, k, v with two or three query heads for each of two or three key-value heads; `kv_len` makes them long and wide."""
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    kv_heads, group, head_dim = rng.randint(2, 3), rng.randint(2, 3), 64 if kv_len else rng.choice([2, 5])
    batch, query_len, keys = rng.randint(1, 3), rng.randint(2, 3), kv_len or rng.randint(4, 6)
    q = torch.randn(batch, kv_heads * group, query_len, head_dim, generator=draw)
    k, v = (torch.randn(batch, kv_heads, keys, size, generator=draw) for size in (head_dim, head_dim + 1))
    return q, k, v


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention with grouped heads, ``[batch, query_heads, query_len, value_dim]``."""
    return reference_attention(q, k, v, Rules(scale=q.shape[-1] ** -0.5))[0]


def grouped_mistakes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what mistakes about grouped heads lead to."""
    group = q.shape[1] // k.shape[1]
    repeated = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    right = grouped(q, k, v)
    by_group = right.reshape(q.shape[0], k.shape[1], group, *right.shape[2:])
    return {
        "Key-value heads are dealt out in turn: neighbouring query heads share one, so it is query head // group.": grouped(
            q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
        ),
        "All query heads read the first key-value head.": grouped(q, k[:, :1], v[:, :1]),
        "The scores are not divided by the square root of head_dim.": grouped(q * q.shape[-1] ** 0.5, k, v),
        "Softmax runs over the queries; each query's weights over the keys must sum to one.": torch.softmax(
            q @ repeated[0].transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-2
        )
        @ repeated[1],
        "The group's query heads are still an axis of their own: put them back beside the others.": by_group,
        "The heads come back in another order: those of one group stand next to each other.": by_group.transpose(
            1, 2
        ).flatten(1, 2),
        "One output for each key-value head: every query head has its own.": by_group.mean(dim=2),
    }


def copies(function: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return how many times K's bytes a function allocates at its worst moment, rounded down."""
    with peak_memory("cpu") as peak:
        function(q, k, v)
    return peak.bytes // k.nbytes


def copy_mistakes(found: int) -> dict[str, float]:
    """Return the explanation of copies of K or V."""
    return {
        "K or V is copied for the query heads: let the queries of a group share one product. Matrix products that broadcast copy, too.": found
    }


def longest_mistakes(
    free_bytes: int, num_heads: int, batch_size: int, value_bytes: int, copies: int
) -> dict[str, float]:
    """Return what mistakes about the longest sequence whose score matrices fit lead to."""
    each = num_heads * batch_size * value_bytes * copies

    def fit(each: int = each) -> int:
        return math.isqrt(free_bytes // each)

    return {
        "Scores grow with the square of the length: take the root.": free_bytes // each,
        "One token too many.": fit() + 1,
        "Rounded to the nearest: a sequence that fits in part does not fit.": round(math.sqrt(free_bytes / each)),
        "The heads are forgotten: each has a score matrix of its own.": fit(each // num_heads),
        "The batch is forgotten: every sequence has score matrices of its own.": fit(each // batch_size),
        "The copies are forgotten: all of them are alive at the same time.": fit(each // copies),
        "These are values, not bytes: each takes value_bytes.": fit(each // value_bytes),
        "Bits, not bytes: value_bytes already is in bytes.": fit(each * 8),
        "Rounded up: a sequence that fits in part does not fit.": math.ceil(math.sqrt(free_bytes / each)),
    }


def random_weights(rng: Random, *, zeros: bool = False) -> torch.Tensor:
    """Draw attention weights ``[heads, query_len, kv_len]``; with `zeros`, causal ones, as if the queries were the last tokens."""
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    heads, query_len, kv_len = rng.randint(2, 3), rng.randint(3, 4), rng.randint(5, 7)
    scores = 2 * torch.randn(heads, query_len, kv_len, generator=draw)
    if zeros:
        scores = scores.masked_fill(torch.ones(query_len, kv_len).triu(1 + kv_len - query_len).bool(), -torch.inf)
    return torch.softmax(scores, dim=-1)


def effective_keys(weights: torch.Tensor) -> torch.Tensor:
    """Return the exponential of each row's entropy, ``[heads, query_len]``: over how many keys the row is spread."""
    entropy: torch.Tensor = torch.special.entr(weights).sum(dim=-1)
    return entropy.exp()


def entropy_mistakes(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what mistakes about the effective number of keys lead to."""
    entropy = torch.special.entr(weights).sum(dim=-1)
    return {
        "Not a number: 0 times the logarithm of 0 counts as 0, and must be asked for.": (
            torch.exp(-(weights * weights.log()).sum(dim=-1))
        ),
        "This is the entropy; its exponential is a number of keys.": entropy,
        "The sign is missing: entropy is minus the sum of weight times logarithm.": torch.exp(-entropy),
        "The logarithm is in base 2, the exponential in base e: use one base for both.": torch.exp(
            entropy / math.log(2)
        ),
        "The keys that get any weight are counted: nearly nothing counts as much as nearly all.": (
            (weights > 0).sum(dim=-1).to(weights.dtype)
        ),
        "The mean over the keys is taken: entropy is a sum.": torch.exp(entropy / weights.shape[-1]),
        "The sum runs over the queries: each query has an entropy of its own.": (
            torch.special.entr(weights).sum(dim=-2).exp()
        ),
    }
