"""The kernel that turns pairs of coordinates, `course_lib.kernels.rope`'s.

``stride_xy`` are elements from one index of an axis to the next: x is q, qo (turned queries), k, ko or t (tables); y is b (batch),
h (head), l (token), d (coordinate) or p (pair). Offsets within what a program holds at once are in 32 bits unless ``WIDE``, those
to its first element always in 64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "length"])
def rope_kernel(
    q_ptr, q_out_ptr, k_ptr, k_out_ptr, cos_ptr, sin_ptr,
    stride_qb, stride_qh, stride_ql, stride_qd, stride_qob, stride_qoh, stride_qol, stride_qod,
    stride_kb, stride_kh, stride_kl, stride_kd, stride_kob, stride_koh, stride_kol, stride_kod,
    stride_tb, stride_tl, stride_tp, batch, length, q_heads, k_heads,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, Q_REST: tl.constexpr,
    K_REST: tl.constexpr, TOKENS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Turn all heads of TOKENS tokens of a sequence, of queries and, unless ``k_ptr`` is None, of keys; INVERSE: back."""
    # The sequences of a batch come after one another, so that they find a table that they share in the card's cache.
    sequence, first = (tl.program_id(0) % batch).to(tl.int64), tl.program_id(0) // batch * TOKENS
    tokens, pairs = tl.arange(0, TOKENS)[:, None], tl.arange(0, BLOCK_P)[None, :]
    if WIDE:
        tokens, pairs = tokens.to(tl.int64), pairs.to(tl.int64)
    table = sequence * stride_tb + tl.cast(first, tl.int64) * stride_tl
    inside = (first + tokens < length) & (pairs < PAIRS)
    cos = tl.load(cos_ptr + table + (tokens * stride_tl + pairs * stride_tp), mask=inside, other=0.0)
    sin = tl.load(sin_ptr + table + (tokens * stride_tl + pairs * stride_tp), mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    turn(
        q_ptr + sequence * stride_qb, q_out_ptr + sequence * stride_qob, cos, sin, first, length, q_heads,
        stride_qh, stride_ql, stride_qd, stride_qoh, stride_qol, stride_qod,
        INTERLEAVED, WIDE, PAIRS, Q_REST, TOKENS, Q_HEADS, BLOCK_P,
    )  # fmt: skip
    if k_ptr is not None:
        turn(
            k_ptr + sequence * stride_kb, k_out_ptr + sequence * stride_kob, cos, sin, first, length, k_heads,
            stride_kh, stride_kl, stride_kd, stride_koh, stride_kol, stride_kod,
            INTERLEAVED, WIDE, PAIRS, K_REST, TOKENS, K_HEADS, BLOCK_P,
        )  # fmt: skip


@triton.jit
def turn(
    x_ptr, out_ptr, cos, sin, first, length, num_heads,
    stride_xh, stride_xl, stride_xd, stride_oh, stride_ol, stride_od,
    INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Turn all heads of TOKENS tokens, HEADS at a time, by angles ``[TOKENS, BLOCK_P]``; copy the last REST coordinates."""
    x_ptr += tl.cast(first, tl.int64) * stride_xl
    out_ptr += tl.cast(first, tl.int64) * stride_ol
    tokens, heads = tl.arange(0, TOKENS)[:, None, None], tl.arange(0, HEADS)[None, :, None]
    columns = tl.arange(0, 2 * BLOCK_P if INTERLEAVED else BLOCK_P)[None, None, :]
    if WIDE:
        tokens, heads, columns = tokens.to(tl.int64), heads.to(tl.int64), columns.to(tl.int64)
    working = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    cos, sin = cos.to(working)[:, None, :], sin.to(working)[:, None, :]
    for head in range(0, num_heads, HEADS):
        x = x_ptr + tl.cast(head, tl.int64) * stride_xh + (tokens * stride_xl + heads * stride_xh)
        out = out_ptr + tl.cast(head, tl.int64) * stride_oh + (tokens * stride_ol + heads * stride_oh)
        inside = (first + tokens < length) & (head + heads < num_heads)
        if INTERLEAVED:
            # Both members of a pair lie side by side: one wide load for both, taken apart in registers.
            turned = inside & (columns < 2 * PAIRS)
            both = tl.load(x + columns * stride_xd, mask=turned, other=0.0).to(working)
            one, other = tl.split(tl.reshape(both, [TOKENS, HEADS, BLOCK_P, 2]))
            both = tl.reshape(tl.join(one * cos - other * sin, other * cos + one * sin), [TOKENS, HEADS, 2 * BLOCK_P])
            tl.store(out + columns * stride_od, both, mask=turned)
        else:
            turned = inside & (columns < PAIRS)
            one = tl.load(x + columns * stride_xd, mask=turned, other=0.0).to(working)
            other = tl.load(x + (PAIRS + columns) * stride_xd, mask=turned, other=0.0).to(working)
            tl.store(out + columns * stride_od, one * cos - other * sin, mask=turned)
            tl.store(out + (PAIRS + columns) * stride_od, other * cos + one * sin, mask=turned)
        if REST:
            rest = 2 * PAIRS + tl.arange(0, triton.next_power_of_2(REST))[None, None, :].to(columns.dtype)
            kept = inside & (rest < 2 * PAIRS + REST)
            tl.store(out + rest * stride_od, tl.load(x + rest * stride_xd, mask=kept, other=0.0), mask=kept)
