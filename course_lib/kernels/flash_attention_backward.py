"""The backward kernels of flash attention: weights are computed again, block by block, from the log-sum-exp. Derived in chapter 05.

With ``P`` the weights, ``O = P V``, and ``dO`` the gradient of the output::

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        dQ = dS K * scale        dK = dS^T Q * scale

``delta`` is the sum of ``dO * O`` over a row, less the gradient of the row's log-sum-exp. One kernel walks over the queries of a
block of keys, another over the keys of a block of queries: no sum needs atomics, and results are the same in every run.

Parameters are named and ordered as in `course_lib.kernels.flash_attention_forward`; strides ``g``, ``dq``, ``dk`` and ``dv`` are gradients'.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from course_lib.kernels.flash_attention_forward import (
    LOG2E,
    bias_and_hide,
    exponential,
    key_range,
    load_tile,
    offset,
    program,
    sequence,
    store_tile,
    tanh,
)


@triton.jit(do_not_specialize=["blocks", "heads", "query_len"])
def delta_kernel(
    out_ptr, grad_ptr, grad_lse_ptr, shift_ptr, delta_ptr, starts_q_ptr,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
    blocks, heads, query_len,
    VARLEN: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute delta for one block of query rows."""
    block, head, batch = program(blocks, heads)
    start_m = block * BLOCK_M
    start_q, query_len = sequence(starts_q_ptr, batch, query_len, VARLEN)
    if start_m >= query_len:
        return
    out_base = out_ptr + offset(batch, head, start_q, stride_ob, stride_oh, stride_om, VARLEN)
    grad_base = grad_ptr + offset(batch, head, start_q, stride_gb, stride_gh, stride_gm, VARLEN)
    output = load_tile(out_base, start_m, query_len, stride_om, True, VALUE_DIM, BLOCK_M, BLOCK_DV)
    grad = load_tile(grad_base, start_m, query_len, stride_gm, True, VALUE_DIM, BLOCK_M, BLOCK_DV)
    delta = tl.sum(output.to(tl.float32) * grad.to(tl.float32), 1)
    rows = start_m + tl.arange(0, BLOCK_M)
    statistics = offset(batch, head, start_q, stride_lb, stride_lh, 1, VARLEN) + rows
    if grad_lse_ptr is not None:
        # The log-sum-exp of a blind row is a constant, whatever gradient arrives.
        grad_lse = tl.load(grad_lse_ptr + statistics, mask=rows < query_len, other=0.0)
        shift = tl.load(shift_ptr + statistics, mask=rows < query_len, other=0.0)
        delta -= tl.where(shift == float("inf"), 0.0, grad_lse)
    tl.store(delta_ptr + statistics, delta, mask=rows < query_len)


@triton.jit(do_not_specialize=["blocks", "heads", "query_len", "kv_len", "window"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, delta_ptr, shift_ptr, factor_ptr, dk_ptr, dv_ptr,
    mask_ptr, slopes_ptr, starts_q_ptr, starts_k_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_lb, stride_lh, stride_mb, stride_mh, stride_mm, stride_mn, stride_ab,
    blocks, heads, group, query_len, kv_len, window, inner, outer, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    CAREFUL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values, summed over the query heads that share them."""
    # ``heads`` counts key heads here. Under causality the first keys are seen by the most rows, and their blocks start first.
    block, kv_head, batch = program(blocks, heads)
    start_n = block * BLOCK_N
    start_q, query_len = sequence(starts_q_ptr, batch, query_len, VARLEN)
    start_k, kv_len = sequence(starts_k_ptr, batch, kv_len, VARLEN)
    if start_n >= kv_len:
        return

    k_base = k_ptr + offset(batch, kv_head, start_k, stride_kb, stride_kh, stride_kn, VARLEN)
    v_base = v_ptr + offset(batch, kv_head, start_k, stride_vb, stride_vh, stride_vn, VARLEN)
    k = load_tile(k_base, start_n, kv_len, stride_kn, True, HEAD_DIM, BLOCK_N, BLOCK_D)
    v = load_tile(v_base, start_n, kv_len, stride_vn, True, VALUE_DIM, BLOCK_N, BLOCK_DV)
    columns = start_n + tl.arange(0, BLOCK_N)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    begin, full_begin, full_end, end = query_range(
        start_n, query_len, kv_len, window, CAUSAL, WINDOW, MASK, BLOCK_M, BLOCK_N
    )
    if CAUSAL or WINDOW or MASK is not None:
        dk, dv = attend_from_keys(
            dk, dv, k, v, q_ptr, grad_ptr, delta_ptr, shift_ptr, factor_ptr, mask_ptr, slopes_ptr,
            stride_qb, stride_qh, stride_qm, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
            stride_mb, stride_mh, stride_mm, stride_mn, stride_ab,
            batch, kv_head, start_q, columns, group, query_len, kv_len, window, inner, outer, begin, full_begin, True,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, VARLEN, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
    if MASK is None:
        dk, dv = attend_from_keys(
            dk, dv, k, v, q_ptr, grad_ptr, delta_ptr, shift_ptr, factor_ptr, mask_ptr, slopes_ptr,
            stride_qb, stride_qh, stride_qm, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
            stride_mb, stride_mh, stride_mm, stride_mn, stride_ab,
            batch, kv_head, start_q, columns, group, query_len, kv_len, window, inner, outer, full_begin, full_end, False,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, VARLEN, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
    if WINDOW and MASK is None:
        dk, dv = attend_from_keys(
            dk, dv, k, v, q_ptr, grad_ptr, delta_ptr, shift_ptr, factor_ptr, mask_ptr, slopes_ptr,
            stride_qb, stride_qh, stride_qm, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
            stride_mb, stride_mh, stride_mm, stride_mn, stride_ab,
            batch, kv_head, start_q, columns, group, query_len, kv_len, window, inner, outer, full_end, end, True,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, VARLEN, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip

    dk_base = dk_ptr + offset(batch, kv_head, start_k, stride_dkb, stride_dkh, stride_dkn, VARLEN)
    dv_base = dv_ptr + offset(batch, kv_head, start_k, stride_dvb, stride_dvh, stride_dvn, VARLEN)
    store_tile(dk_base, dk * scale, start_n, kv_len, stride_dkn, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_tile(dv_base, dv, start_n, kv_len, stride_dvn, VALUE_DIM, BLOCK_N, BLOCK_DV)


@triton.jit
def attend_from_keys(
    dk, dv, k, v, q_ptr, grad_ptr, delta_ptr, shift_ptr, factor_ptr, mask_ptr, slopes_ptr,
    stride_qb, stride_qh, stride_qm, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_ab,
    batch, kv_head, start_q, columns, group, query_len, kv_len, window, inner, outer, begin, end, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    CAREFUL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add what rows from ``begin`` to ``end`` of every query head of a group give to the gradients of a block of keys.

    Scores stand keys by queries, so that the two products with sums over queries take them as they lie in registers.
    """
    for member in tl.range(0, group):
        head = kv_head * group + member
        q_base = q_ptr + offset(batch, head, start_q, stride_qb, stride_qh, stride_qm, VARLEN)
        grad_base = grad_ptr + offset(batch, head, start_q, stride_gb, stride_gh, stride_gm, VARLEN)
        statistics = offset(batch, head, start_q, stride_lb, stride_lh, 1, VARLEN)
        mask_base = mask_ptr
        slope = 0.0
        if MASK is not None:
            mask_base = mask_ptr + batch * stride_mb + head * stride_mh
        if ALIBI:
            slope = tl.load(slopes_ptr + batch * stride_ab + head) * (1.0 if CAREFUL else LOG2E)
        for start_m in tl.range(begin, end, BLOCK_M):
            rows = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_base, start_m, query_len, stride_qm, True, HEAD_DIM, BLOCK_M, BLOCK_D)
            # Rows past the end get weights of 0, as blind ones do.
            shift = tl.load(shift_ptr + statistics + rows, mask=rows < query_len, other=float("inf"))
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * inner
            if SOFTCAP:
                bounded = tanh(scores)
                scores = outer * bounded
            scores = bias_and_hide(
                scores, rows[None, :], columns[:, None], query_len, kv_len, window, slope, mask_base, stride_mm, stride_mn,
                EDGE, CAUSAL, WINDOW, ALIBI, MASK,
            )  # fmt: skip
            weights = exponential(scores - shift[None, :], CAREFUL)
            if CAREFUL:
                weights *= tl.load(factor_ptr + statistics + rows, mask=rows < query_len, other=0.0)[None, :]
            grad = load_tile(grad_base, start_m, query_len, stride_gm, True, VALUE_DIM, BLOCK_M, BLOCK_DV)
            dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=PRECISION)
            delta = tl.load(delta_ptr + statistics + rows, mask=rows < query_len, other=0.0)
            dweights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            dscores = weights * (dweights - delta[None, :])
            if SOFTCAP:
                dscores *= 1.0 - bounded * bounded
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["blocks", "heads", "query_len", "kv_len", "window"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, delta_ptr, shift_ptr, factor_ptr, dq_ptr,
    mask_ptr, slopes_ptr, starts_q_ptr, starts_k_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dqb, stride_dqh, stride_dqm,
    stride_lb, stride_lh, stride_mb, stride_mh, stride_mm, stride_mn, stride_ab,
    blocks, heads, group, query_len, kv_len, window, inner, outer, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    CAREFUL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of query rows."""
    block, head, batch = program(blocks, heads)
    start_m = (blocks - 1 - block) * BLOCK_M
    start_q, query_len = sequence(starts_q_ptr, batch, query_len, VARLEN)
    start_k, kv_len = sequence(starts_k_ptr, batch, kv_len, VARLEN)
    if start_m >= query_len:
        return

    q_base = q_ptr + offset(batch, head, start_q, stride_qb, stride_qh, stride_qm, VARLEN)
    grad_base = grad_ptr + offset(batch, head, start_q, stride_gb, stride_gh, stride_gm, VARLEN)
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
    grad = load_tile(grad_base, start_m, query_len, stride_gm, True, VALUE_DIM, BLOCK_M, BLOCK_DV)
    statistics = offset(batch, head, start_q, stride_lb, stride_lh, 1, VARLEN) + rows
    shift = tl.load(shift_ptr + statistics, mask=rows < query_len, other=float("inf"))
    delta = tl.load(delta_ptr + statistics, mask=rows < query_len, other=0.0)
    factor = shift
    if CAREFUL:
        factor = tl.load(factor_ptr + statistics, mask=rows < query_len, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    begin, full_begin, full_end, end = key_range(start_m, query_len, kv_len, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if WINDOW:
        dq = attend_from_queries(
            dq, q, grad, delta, shift, factor, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn,
            slope, rows, query_len, kv_len, window, inner, outer, begin, full_begin, True,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    dq = attend_from_queries(
        dq, q, grad, delta, shift, factor, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn,
        slope, rows, query_len, kv_len, window, inner, outer, full_begin, full_end, False,
        CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    dq = attend_from_queries(
        dq, q, grad, delta, shift, factor, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn,
        slope, rows, query_len, kv_len, window, inner, outer, full_end, end, True,
        CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CAREFUL, PRECISION, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip

    dq_base = dq_ptr + offset(batch, head, start_q, stride_dqb, stride_dqh, stride_dqm, VARLEN)
    store_tile(dq_base, dq * scale, start_m, query_len, stride_dqm, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def attend_from_queries(
    dq, q, grad, delta, shift, factor, k_base, v_base, stride_kn, stride_vn, mask_base, stride_mm, stride_mn,
    slope, rows, query_len, kv_len, window, inner, outer, begin, end, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the keys from ``begin`` to ``end`` give to the gradient of a block of query rows."""
    for start_n in tl.range(begin, end, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_base, start_n, kv_len, stride_kn, EDGE, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = load_tile(v_base, start_n, kv_len, stride_vn, EDGE, VALUE_DIM, BLOCK_N, BLOCK_DV)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * inner
        if SOFTCAP:
            bounded = tanh(scores)
            scores = outer * bounded
        scores = bias_and_hide(
            scores, rows[:, None], columns[None, :], query_len, kv_len, window, slope, mask_base, stride_mm, stride_mn,
            EDGE, CAUSAL, WINDOW, ALIBI, MASK,
        )  # fmt: skip
        weights = exponential(scores - shift[:, None], CAREFUL)
        if CAREFUL:
            weights *= factor[:, None]
        dweights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dscores = weights * (dweights - delta[:, None])
        if SOFTCAP:
            dscores *= 1.0 - bounded * bounded
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_range(
    start_n, query_len, kv_len, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the query rows that a block of keys visits, in whole blocks; the mirror image of `key_range`.

    Rows past the end may stand in a full block: their weights are 0 without a comparison.
    """
    # The rows that stand at the first and the last key.
    first = start_n - (kv_len - query_len)
    last = tl.minimum(start_n + BLOCK_N, kv_len) - 1 - (kv_len - query_len)
    begin, end, full_begin, full_end = 0, query_len, 0, tl.cdiv(query_len, BLOCK_M) * BLOCK_M
    if CAUSAL:
        begin = tl.maximum(first, 0)
        full_begin = tl.maximum(last, 0)
    if WINDOW:
        end = tl.minimum(end, last + window)
        full_end = tl.minimum(full_end, first + window)
        if not CAUSAL:
            begin = tl.maximum(first - window + 1, 0)
            full_begin = tl.maximum(last - window + 1, 0)
    begin = begin // BLOCK_M * BLOCK_M
    full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_M), tl.cdiv(tl.maximum(end, 0), BLOCK_M)) * BLOCK_M
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK_M * BLOCK_M, full_begin)
    if MASK is not None:
        full_begin = tl.cdiv(tl.maximum(end, 0), BLOCK_M) * BLOCK_M
    return begin, full_begin, full_end, end
