"""The kernels that multiply by quantised weights, `course_lib.kernels.quantized_matmul`'s.

A program takes rows of the weight ``n`` and, of each, ``LANES`` runs of ``RUN`` neighbouring codes: one or a few words of 32 bits.
What it holds is ``[RUN, rows, LANES]``: a thread has whole runs, so that a run's codes are taken apart, multiplied and added up
without leaving their thread, and share a scale.

``*_ptr``
    Tensors: ``codes_ptr`` in words of 32 bits where ``ALIGNED``, else in bytes. ``zero_ptr``, ``levels_ptr``,
    ``absmax_ptr`` with ``offset_ptr`` and ``scale_levels_ptr``, and ``bias_ptr`` are None where a call has no use for them.
``rows, row_codes, row_blocks``
    Rows of x; runs, or where not ``ALIGNED`` codes, from one row of the weight to the next; scales from one row to the next, None where blocks run on over rows.
``magic``
    The bits of 2**23 in float32. An argument and not a constant, so that it sits in a register: masking a code out of its word
    and putting it into a float's mantissa is then one instruction.
``SHIFTED``
    Codes are integers, ALIGNED and without a zero-point, and stay where they stand in their words; `units` makes up for it.
``ALIGNED``
    Each run lies in whole words and in one block. Otherwise codes and scales are loaded one by one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

#: 2**23, whose float32 has a unit as its last bit: an integer below it in the mantissa's bits is added exactly.
BIG = tl.constexpr(8388608.0)


@triton.jit(do_not_specialize=["rows", "magic"])
def matvec_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, levels_ptr, absmax_ptr, offset_ptr, scale_levels_ptr, bias_ptr, out_ptr,
    stride_x, rows, out_features, in_features, row_codes, row_blocks, span, magic,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, SHIFTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of x by BLOCK_N rows of the weight over ``span`` runs; WARPS warps share a row's columns."""
    width: tl.constexpr = LANES * RUN
    tile: tl.constexpr = BLOCK_N * WARPS
    first, begin = tl.program_id(0) * BLOCK_N, tl.program_id(1) * span
    # Row i of what is loaded is columns of warp i % WARPS of row i // WARPS.
    part = tl.arange(0, tile)
    n = first + part // WARPS
    side = part % WARPS * LANES  # in runs
    acc = tl.zeros([BLOCK_M, BLOCK_N, WARPS, LANES], tl.float32)
    m = tl.arange(0, BLOCK_M)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x
    lookup = table(levels_ptr, tile, LANES, RUN) if levels_ptr is not None else 0
    for run in range(begin, tl.minimum(begin + span, tl.cdiv(in_features, RUN)), LANES * WARPS):
        # The codes are loaded last: it is their layout then that Triton keeps, and what is smaller is brought into it.
        stretch: tl.constexpr = 256 if width >= 256 else width
        column = tl.arange(0, stretch)[None, None, :] + tl.arange(0, width // stretch)[:, None, None] * stretch
        k = (run * RUN + column + tl.arange(0, WARPS)[None, :, None] * width)[None]
        x = tl.load(x_rows[:, :, None, None] + k, mask=(m < rows)[:, None, None, None] & (k < in_features), other=0.0)
        x = tl.reshape(tl.permute(x, (0, 2, 1, 3)), [BLOCK_M, 1, WARPS, LANES, RUN])
        x = tl.permute(x, (4, 0, 1, 2, 3))
        values, scales = dequantize(
            codes_ptr, scale_ptr, zero_ptr, levels_ptr, lookup, absmax_ptr, offset_ptr, scale_levels_ptr,
            n, run + side, out_features, in_features, row_codes, row_blocks, magic, BITS, BLOCK, ALIGNED, SHIFTED,
            tile, LANES, RUN,
        )  # fmt: skip
        values = tl.reshape(values, [RUN, 1, BLOCK_N, WARPS, LANES])
        x = tl.broadcast_to(x, [RUN, BLOCK_M, BLOCK_N, WARPS, LANES]).to(tl.float32)
        if SHIFTED:
            x = x * tl.reshape(units(BITS, RUN), [RUN, 1, 1, 1, 1])
        if ALIGNED:
            acc += tl.sum(values * x, 0) * tl.reshape(scales, [1, BLOCK_N, WARPS, LANES])
        else:
            acc += tl.sum(values * tl.reshape(scales, [RUN, 1, BLOCK_N, WARPS, LANES]) * x, 0)
    write(
        tl.sum(tl.sum(acc, 3), 2), out_ptr, bias_ptr, m[:, None], (first + tl.arange(0, BLOCK_N))[None, :],
        rows, out_features, tl.program_id(1),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "magic"])
def matmul_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, levels_ptr, absmax_ptr, offset_ptr, scale_levels_ptr, bias_ptr, out_ptr,
    stride_x, rows, out_features, in_features, row_codes, row_blocks, span, magic,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, SHIFTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of x by BLOCK_N rows of the weight over ``span`` runs, by tensor cores."""
    width: tl.constexpr = LANES * RUN
    n, begin = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(2) * span
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # The weight is the left factor, which Hopper's and Blackwell's instructions take from registers or their own memory.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_rows = x_ptr + m.to(tl.int64)[None, :] * stride_x
    lookup = table(levels_ptr, BLOCK_N, LANES, RUN) if levels_ptr is not None else 0
    for run in range(begin, tl.minimum(begin + span, tl.cdiv(in_features, RUN)), LANES):
        k = run * RUN + tl.arange(0, width)
        x = tl.load(x_rows + k[:, None], mask=(m < rows)[None, :] & (k < in_features)[:, None], other=0.0)
        values, scales = dequantize(
            codes_ptr, scale_ptr, zero_ptr, levels_ptr, lookup, absmax_ptr, offset_ptr, scale_levels_ptr,
            n, run + tl.zeros_like(n), out_features, in_features, row_codes, row_blocks, magic, BITS, BLOCK, ALIGNED, SHIFTED,
            BLOCK_N, LANES, RUN,
        )  # fmt: skip
        if SHIFTED:
            scales = scales * units(BITS, RUN)
        weight = tl.reshape(tl.permute(values * scales, (1, 2, 0)), [BLOCK_N, width]).to(x.dtype)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    write(acc, out_ptr, bias_ptr, m[None, :], n[:, None], rows, out_features, tl.program_id(2))


@triton.jit(do_not_specialize=["shares"])
def sum_kernel(shares_ptr, bias_ptr, out_ptr, out_features, size, shares, BLOCK: tl.constexpr):
    """Add up shares ``[shares, size]`` in their order, and the bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for share in range(shares):
        total += tl.load(shares_ptr + tl.cast(share, tl.int64) * size + place, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + place % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


# ---- parts


@triton.jit
def table(levels_ptr, ROWS: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr):
    """Return the 16 levels, one a lane and over again, for every row that `dequantize` looks up."""
    levels = tl.load(levels_ptr + tl.arange(0, LANES) % 16)
    return tl.broadcast_to(levels[None, :], [RUN * ROWS, LANES])


@triton.jit
def dequantize(
    codes_ptr, scale_ptr, zero_ptr, levels_ptr, lookup, absmax_ptr, offset_ptr, scale_levels_ptr,
    n, run, out_features, in_features, row_codes, row_blocks, magic,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, SHIFTED: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return values ``[RUN, ROWS, LANES]`` and scales, whose product, and where SHIFTED that with `units`, is the weight.

    ``n`` and ``run``, ``[ROWS]``, are rows of the weight and their first runs. Scales are ``[1, ROWS, LANES]``, or for each code
    where not ALIGNED. What lies outside has the scale 0.
    """
    k = ((run[:, None] + tl.arange(0, LANES)[None, :]) * RUN)[None, :, :]
    if not ALIGNED:
        k += tl.arange(0, RUN)[:, None, None]
    row = n.to(tl.int64)[None, :, None]
    inside = (n < out_features)[None, :, None] & (k < in_features)
    scales, zeros = load_scales(
        scale_ptr, zero_ptr, absmax_ptr, offset_ptr, scale_levels_ptr, row, k, inside, in_features, row_blocks, BITS, BLOCK
    )  # fmt: skip
    if ALIGNED:
        # In runs, so that Triton knows that each is loaded or left out as a whole, and aligned.
        words: tl.constexpr = RUN * BITS // 32
        column = run[:, None] * words + tl.arange(0, LANES * words)[None, :]
        inside = (n < out_features)[:, None] & (column // words < row_codes)
        word = tl.load(codes_ptr + n.to(tl.int64)[:, None] * (row_codes * words) + column, mask=inside, other=0)
        codes = tl.reshape(take_apart(word, magic, BITS, levels_ptr is not None), [ROWS, LANES, RUN])
        codes = tl.permute(codes, (2, 0, 1))
    elif BITS == 4:
        place = row * row_codes + k
        shift = 4 - place % 2 * 4  # the first of two codes is in the high half
        codes = tl.load(codes_ptr + place // 2, mask=inside, other=0).to(tl.int32) >> shift.to(tl.int32) & 15
    else:
        codes = tl.load(codes_ptr + row * row_codes + k, mask=inside, other=0).to(tl.int32) + 128
    if levels_ptr is not None:
        values = tl.reshape(tl.gather(lookup, tl.reshape(codes, [RUN * ROWS, LANES]), 1), [RUN, ROWS, LANES])
    elif SHIFTED:
        # With the code of zero in the number that is subtracted, as many bits to the left as the codes.
        powers = (1 << positions(BITS, RUN)).to(tl.float32)[:, None, None]
        values = codes.to(tl.float32, bitcast=True) - (BIG + zeros * powers)
    elif ALIGNED:
        values = (codes.to(tl.float32, bitcast=True) - BIG) * units(BITS, RUN) - zeros
    else:
        values = codes.to(tl.float32) - zeros
    return values, scales


@triton.jit
def load_scales(
    scale_ptr, zero_ptr, absmax_ptr, offset_ptr, scale_levels_ptr, row, k, inside, in_features, row_blocks,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the scale at columns ``k`` of rows, and the code of zero there, of unsigned codes, in float32."""
    block = (row * in_features + k) // BLOCK if row_blocks is None else row * row_blocks + k // BLOCK
    if absmax_ptr is not None:
        code = tl.load(scale_ptr + block, mask=inside, other=0).to(tl.int32)
        absmax = tl.load(absmax_ptr + block // 256, mask=inside, other=0.0)
        scales = tl.load(scale_levels_ptr + code, mask=inside, other=0.0) * absmax + tl.load(offset_ptr)
        scales = tl.where(inside, scales, 0.0)
    else:
        scales = tl.load(scale_ptr + block, mask=inside, other=0.0)
    zeros = 2.0 ** (BITS - 1)
    if zero_ptr is not None:
        zeros = tl.load(zero_ptr + block, mask=inside, other=0).to(tl.float32) + (128.0 if BITS == 8 else 0.0)
    return scales, zeros


@triton.jit
def take_apart(word, magic, BITS: tl.constexpr, INDICES: tl.constexpr):
    """Return a word's codes in order on new last axes: as numbers, or as the mantissas of floats where `positions` says."""
    if BITS == 8:
        word = word ^ -2139062144  # signed bytes become unsigned ones, the sign bits of 0x80808080 turned
        high = word >> 16
        even = tl.join(word & 0xFF | magic, high & 0xFF | magic)
        odd = tl.join(word & 0xFF00 | magic, high & 0xFF00 | magic)
    elif INDICES:
        # The first of two codes is in the high half of a byte, and the first byte in the low bits of a word.
        even = tl.join(tl.join(word >> 4 & 15, word >> 20 & 15), tl.join(word >> 12 & 15, word >> 28 & 15))
        odd = tl.join(tl.join(word & 15, word >> 16 & 15), tl.join(word >> 8 & 15, word >> 24 & 15))
    else:
        high = word >> 12
        even = tl.join(
            tl.join(word & 0xF0 | magic, high & 0xF00 | magic), tl.join(word & 0xF000 | magic, high & 0xF0000 | magic)
        )
        odd = tl.join(
            tl.join(word & 0xF | magic, word & 0xF0000 | magic), tl.join(word & 0xF00 | magic, high & 0xF000 | magic)
        )
    return tl.join(even, odd)


@triton.jit
def positions(BITS: tl.constexpr, RUN: tl.constexpr):
    """Return by how many bits `take_apart` leaves each code of a run shifted to the left."""
    code = tl.arange(0, RUN)
    if BITS == 8:
        return code % 2 * 8
    else:
        shift = code % 8 // 2 * 8 + 4 - code % 2 * 4
        return tl.where(shift > 16, shift - 12, shift)


@triton.jit
def units(BITS: tl.constexpr, RUN: tl.constexpr):
    """Return the powers of 2 that undo the shifts of `positions`, ``[RUN, 1, 1]``."""
    return ((127 - positions(BITS, RUN)) << 23).to(tl.float32, bitcast=True)[:, None, None]


@triton.jit
def write(values, out_ptr, bias_ptr, m, n, rows, out_features, share):
    """Write a tile of the result, the bias added; of several shares of a sum each to a place of its own."""
    if bias_ptr is not None:
        values += tl.load(bias_ptr + n, mask=n < out_features, other=0.0).to(tl.float32)
    place = (share.to(tl.int64) * rows + m) * out_features + n
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=(m < rows) & (n < out_features))
