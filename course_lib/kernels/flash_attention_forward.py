"""The forward kernel of flash attention, and the parts that it shares with the backward kernels. Chapter 05 reads it line by line.

Every kernel here takes its parameters in one order: pointers, strides, sizes, factors, then what is fixed when it is compiled.

``*_ptr``
    Tensors. ``mask_ptr``, ``slopes_ptr``, ``starts_*_ptr`` and ``factor_ptr`` are None where a call has no use for them.
    ``shift_ptr`` and ``factor_ptr`` hold what turns scores into weights again: ``exp(score - shift) * factor``.
``stride_xy``
    Elements from one index of an axis to the next: x is q, k, v, o (output), m (mask), l (statistics of rows), a (slopes of
    ALiBi) or a gradient's name; y is b (batch), h (head), m (query row) or n (key). Last axes are contiguous, a mask's apart.
``blocks, heads``
    Programs are ordered by sequence, then head, then block: the blocks of a head, and the heads.
``group, query_len, kv_len, window``
    Query heads that share a key head; lengths, unless sequences are packed (``VARLEN``); the sliding window.
``inner, outer``
    A score is ``dots * inner``, or ``outer * tanh(dots * inner)`` with a cap.
``CAREFUL``
    Otherwise scores are in base 2, log2(e) being folded into these factors, so that a weight is one ``exp2``, and a row's shift
    is its log-sum-exp. In float32 the rounding of the latter would show, and an additive mask may hold the most negative number
    there is, to which neither a log can be added nor log2(e) be applied: scores then stay natural, the shift is the row's maximum
    and the factor one over its sum.

A query in row ``r`` stands at position ``kv_len - query_len + r``: the last query at the last key.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["blocks", "heads", "query_len", "kv_len", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, shift_ptr, factor_ptr, mask_ptr, slopes_ptr, starts_q_ptr, starts_k_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_lb, stride_lh, stride_mb, stride_mh, stride_mm, stride_mn, stride_ab,
    blocks, heads, group, query_len, kv_len, window, inner, outer,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    CAREFUL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp of one block of query rows of one head."""
    # Under causality the last rows see the most keys: their blocks start first, so that the short ones fill the gaps.
    block, head, batch = program(blocks, heads)
    start_m = (blocks - 1 - block) * BLOCK_M
    start_q, query_len = sequence(starts_q_ptr, batch, query_len, VARLEN)
    start_k, kv_len = sequence(starts_k_ptr, batch, kv_len, VARLEN)
    if start_m >= query_len:
        return

    q_base = q_ptr + offset(batch, head, start_q, stride_qb, stride_qh, stride_qm, VARLEN)
    k_base = k_ptr + offset(batch, head // group, start_k, stride_kb, stride_kh, stride_kn, VARLEN)
    v_base = v_ptr + offset(batch, head // group, start_k, stride_vb, stride_vh, stride_vn, VARLEN)
    mask_base = mask_ptr
    slope = 0.0
    if MASK is not None:
        mask_base = mask_ptr + batch * stride_mb + head * stride_mh
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * stride_ab + head) * (1.0 if CAREFUL else LOG2E)

    rows = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, start_m, query_len, stride_qm, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)

    begin, full_begin, full_end, end = key_range(start_m, query_len, kv_len, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if WINDOW:
        acc, row_sum, row_max = attend(
            acc, row_sum, row_max, q, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn, slope,
            rows, query_len, kv_len, window, inner, outer, begin, full_begin, True,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, q, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn, slope,
        rows, query_len, kv_len, window, inner, outer, full_begin, full_end, False,
        CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, q, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn, slope,
        rows, query_len, kv_len, window, inner, outer, full_end, end, True,
        CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip

    # A row that saw nothing has the sum 0: its output is 0 and its log-sum-exp minus infinity.
    blind = row_sum == 0.0
    total = tl.where(blind, 1.0, row_sum)
    out_base = out_ptr + offset(batch, head, start_q, stride_ob, stride_oh, stride_om, VARLEN)
    store_tile(out_base, acc / total[:, None], start_m, query_len, stride_om, VALUE_DIM, BLOCK_M, BLOCK_DV)
    statistics = offset(batch, head, start_q, stride_lb, stride_lh, 1, VARLEN) + rows
    inside = rows < query_len
    if CAREFUL:
        shift = row_max
        lse = row_max + tl.log(total)
        tl.store(factor_ptr + statistics, 1.0 / total, mask=inside)
    else:
        shift = row_max + tl.log2(total)
        lse = shift * LN2
    tl.store(lse_ptr + statistics, tl.where(blind, float("-inf"), lse), mask=inside)
    # exp2(score - inf) is 0: backwards, a blind row gets no weights, whatever its scores.
    tl.store(shift_ptr + statistics, tl.where(blind, float("inf"), shift), mask=inside)


@triton.jit
def attend(
    acc, row_sum, row_max, q, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn, slope,
    rows, query_len, kv_len, window, inner, outer, begin, end, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the keys from ``begin`` to ``end`` into the running maximum, sum and output of a block of query rows."""
    for start_n in tl.range(begin, end, BLOCK_N):
        k = load_tile(k_base, start_n, kv_len, stride_kn, EDGE, HEAD_DIM, BLOCK_N, BLOCK_D)
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if EDGE or SOFTCAP or ALIBI or CAREFUL or MASK is not None:
            scores = dots * inner
            if SOFTCAP:
                scores = outer * tanh(scores)
            columns = start_n + tl.arange(0, BLOCK_N)
            scores = bias_and_hide(
                scores, rows[:, None], columns[None, :], query_len, kv_len, window, slope, mask_base, stride_mm, stride_mn,
                EDGE, CAUSAL, WINDOW, ALIBI, MASK,
            )  # fmt: skip
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row that has seen nothing yet has the maximum -inf, and -inf - (-inf) is not a number.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = exponential(scores - shift[:, None], CAREFUL)
            decay = exponential(row_max - shift, CAREFUL)
        else:
            # inner is not negative, so it may be applied after the maximum: one fused multiply-add a score.
            new_max = tl.maximum(row_max, tl.max(dots, 1) * inner)
            weights = tl.exp2(dots * inner - new_max[:, None])
            decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        v = load_tile(v_base, start_n, kv_len, stride_vn, EDGE, VALUE_DIM, BLOCK_N, BLOCK_DV)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, row_sum, row_max


# ---- shared with the backward kernels


@triton.jit
def program(blocks, heads):
    """Return which block of which head of which sequence this program computes; the last two in 64 bits, to multiply strides."""
    index = tl.program_id(0)
    return index % blocks, (index // blocks % heads).to(tl.int64), (index // blocks // heads).to(tl.int64)


@triton.jit
def sequence(starts_ptr, batch, length, VARLEN: tl.constexpr):
    """Return where a packed sequence starts, and its length."""
    start = tl.zeros([], tl.int64)
    if VARLEN:
        start = tl.load(starts_ptr + batch).to(tl.int64)
        length = (tl.load(starts_ptr + batch + 1) - start).to(tl.int32)
    return start, length


@triton.jit
def offset(batch, head, start, stride_b, stride_h, stride_row, VARLEN: tl.constexpr):
    """Return where the first row of a head of a sequence lies."""
    if VARLEN:
        return head * stride_h + start * stride_row
    else:
        return head * stride_h + batch * stride_b


@triton.jit
def load_tile(
    base, start, length, stride, CHECK: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load rows from ``start`` on; columns from ``DIM`` on, and with ``CHECK`` rows from ``length`` on, are 0."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    tile = base + tl.cast(start, tl.int64) * stride + (rows.to(tl.int64) * stride + columns)
    if CHECK:
        inside = rows < length - start
        if DIM < COLUMNS:
            inside = inside & (columns < DIM)
        return tl.load(tile, mask=inside, other=0.0)
    elif DIM < COLUMNS:
        return tl.load(tile, mask=columns < DIM, other=0.0)
    else:
        return tl.load(tile)


@triton.jit
def store_tile(base, values, start, length, stride, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store rows from ``start`` to ``length`` in the dtype of the destination."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    tile = base + tl.cast(start, tl.int64) * stride + (rows.to(tl.int64) * stride + columns)
    inside = rows < length - start
    if DIM < COLUMNS:
        inside = inside & (columns < DIM)
    tl.store(tile, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def key_range(
    start_m, query_len, kv_len, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the keys that a block of query rows visits, in whole blocks: from ``begin``, through ``full_begin`` to ``full_end``,
    to ``end``.

    Between the middle two every row sees every key; outside of the outer two no row sees any.
    """
    first = kv_len - query_len + start_m
    last = kv_len - query_len + tl.minimum(start_m + BLOCK_M, query_len) - 1
    begin, end, full_begin, full_end = 0, kv_len, 0, kv_len
    if CAUSAL:
        end = tl.minimum(end, last + 1)
        full_end = tl.minimum(full_end, first + 1)
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.maximum(last - window + 1, 0)
        if not CAUSAL:
            end = tl.minimum(end, last + window)
            full_end = tl.minimum(full_end, first + window)
    # Where no block is fully visible, the first stretch takes them all.
    full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_N), tl.cdiv(tl.maximum(end, 0), BLOCK_N)) * BLOCK_N
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def bias_and_hide(
    scores, rows, columns, query_len, kv_len, window, slope, mask_base, stride_mm, stride_mn,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Return scores lowered by ALiBi and changed by the mask; hidden ones, of which only an ``EDGE`` has any, are -inf.

    ``rows`` and ``columns`` are indices, shaped to broadcast to the scores in either orientation.
    """
    positions = rows + (kv_len - query_len)
    if ALIBI:
        # Positions are exact in float32 up to 16 million.
        scores -= slope * tl.abs(positions.to(tl.float32) - columns.to(tl.float32))
    if MASK is not None:
        # Rows past the end read the last one's mask: what comes of it is not stored.
        rows = tl.minimum(rows, query_len - 1).to(tl.int64)
        tile = mask_base + (rows * stride_mm + columns.to(tl.int64) * stride_mn)
        mask = tl.load(tile, mask=(rows >= 0) & (columns < kv_len), other=0) if EDGE else tl.load(tile)
        if MASK == "boolean":
            scores = tl.where(mask != 0, scores, float("-inf"))
        else:
            scores += mask.to(tl.float32)
    if EDGE:
        visible = columns < kv_len
        if CAUSAL:
            visible = visible & (columns <= positions)
        if WINDOW:
            visible = visible & (tl.abs(columns - positions) < window)
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def exponential(x, CAREFUL: tl.constexpr):
    """Return the exponential of a difference of scores, in their base."""
    if CAREFUL:
        return tl.exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, with a relative error of a few float32 roundings."""
    # A polynomial near 0, where 1 - exp(...) would cancel; Cephes, tanhf.c.
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    near = x + x * square * series
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))
