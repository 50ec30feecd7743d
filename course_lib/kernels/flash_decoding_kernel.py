"""The kernels of `course_lib.kernels.flash_decoding`: one attends to a share of a sequence's keys, one merges what was found.

A program's tile has one row for each query head of a group and query row, so that a key is loaded once for all of them; tensor
cores take no fewer than 16. Keys are counted in blocks of ``BLOCK_N``, of which only those are visited that some row sees.

``*_ptr``
    Tensors; None where a call has no use for them.
``stride_xy``
    Elements from one index of an axis to the next: x is q, k, v, o (output), l (its log-sum-exp), t (block table), a (slopes), ks
    or vs (scales and offsets of codes); y is b (sequence, or block of a pool), h (head), m (query row), n (key), d (coordinate) or s (split).
``capacity, ahead, window, sinks``
    Keys of every sequence, unless ``lengths_ptr`` tells; keys that follow in another part; what a query sees.
``inner, outer``
    A score is ``dots * inner``, or ``outer * tanh(dots * inner)`` with a cap: in base 2, or where ``CAREFUL`` natural, as in flash attention.
``BITS, WORD``
    8 or 4 where keys and values are codes, else 0; they are loaded so many bytes at a time, 4 where rows consist of whole words, or 1.
``K_GROUP, V_GROUP, V_GROUPS``
    Tokens, and channels, that share constants; the constants of a token's values, padded to a power of two.
``magic``
    The bits of ``2**BITS`` in float32. An argument and not a constant, so that it sits in a register: masking a code out of its
    word and putting it into a float's mantissa is then one instruction.
``PAGE``
    Tokens of a block of the pool, 0 where keys are contiguous.
``WIDE``
    Whether offsets within a tile need 64 bits. Those to its first element always have them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from course_lib.kernels.flash_attention_forward import LN2, LOG2E, exponential, tanh


@triton.jit(
    do_not_specialize=["blocks", "kv_heads", "splits", "group", "rows", "capacity", "ahead", "window", "sinks", "magic"]
)
def split_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, k_offset_ptr, v_scale_ptr, v_offset_ptr, lengths_ptr, table_ptr, slopes_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ksb, stride_ksh, stride_ksn, stride_ksd, stride_vsb, stride_vsh, stride_vsn, stride_vsd,
    stride_ob, stride_oh, stride_om, stride_os, stride_lb, stride_lh, stride_ls, stride_tb, stride_tn, stride_ab,
    blocks, kv_heads, splits, group, rows, capacity, ahead, window, sinks, inner, outer, magic,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
    BITS: tl.constexpr, WORD: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, V_GROUPS: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend with one block of a group's rows to one share of the keys of a sequence."""
    index = tl.program_id(0)
    block, split = index % blocks, index // blocks % splits
    kv_head, batch = (
        (index // blocks // splits % kv_heads).to(tl.int64),
        (index // blocks // splits // kv_heads).to(tl.int64),
    )
    length = capacity
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + batch).to(tl.int32), capacity)

    # A row of the tile is a query row of a head.
    tile = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = tile < group * rows
    head, row = kv_head * group + tile // rows, tile % rows
    place = batch * stride_ob + head * stride_oh + row * stride_om + split.to(tl.int64) * stride_os
    statistics = batch * stride_lb + head * stride_lh + row + split.to(tl.int64) * stride_ls
    positions = length + ahead - rows + row

    # Blocks of keys: those of the sinks, and from the window's first one on.
    first_seen, sink_blocks, skipped = 0, 0, 0
    if WINDOW:
        first_seen = tl.minimum(tl.maximum(length + ahead - rows - window + 1, 0), length)
        sink_blocks = tl.minimum(tl.cdiv(tl.minimum(sinks, length), BLOCK_N), first_seen // BLOCK_N)
        skipped = first_seen // BLOCK_N - sink_blocks
    visited = tl.cdiv(length, BLOCK_N) - skipped
    share = tl.cdiv(visited, splits)
    begin, end = split * share, tl.minimum((split + 1) * share, visited)
    if begin >= end:
        tl.store(lse_ptr + statistics, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=inside)
        if splits == 1:
            store(out_ptr, place, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), inside, VALUE_DIM, BLOCK_DV)
        return

    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * stride_ab + head, mask=inside, other=0.0) * (1.0 if CAREFUL else LOG2E)
    channels = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + batch * stride_qb + head * stride_qh + row * stride_qm
    q_mask = inside[:, None] & (channels < HEAD_DIM)[None, :]
    q = tl.load(q_rows[:, None] + channels.to(tl.int64)[None, :] * stride_qd, mask=q_mask, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if BITS == 0:
        sequence = tl.zeros([], tl.int64) if PAGE else batch
        k_base = k_ptr + sequence * stride_kb + kv_head * stride_kh
        v_base = v_ptr + sequence * stride_vb + kv_head * stride_vh
        for number in tl.range(begin, end):
            start, columns, seen = keys(number, sink_blocks, skipped, length, first_seen, sinks, WINDOW, BLOCK_N)
            if PAGE:
                entries = table_ptr + batch * stride_tb + columns // PAGE * stride_tn
                page, slot = tl.load(entries, mask=seen, other=0).to(tl.int64), (columns % PAGE).to(tl.int64)
                k_rows = k_base + page * stride_kb + slot * stride_kn
                v_rows = v_base + page * stride_vb + slot * stride_vn
            else:
                k_rows = rows_from(k_base, start, stride_kn, WIDE, BLOCK_N)
                v_rows = rows_from(v_base, start, stride_vn, WIDE, BLOCK_N)
            k = load_tile(k_rows, seen, stride_kd, HEAD_DIM, BLOCK_D)
            dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights, decay, row_sum, row_max = weigh(
                dots, row_sum, row_max, positions, columns, length, window, sinks, slope, inner, outer, WINDOW, SOFTCAP, ALIBI, CAREFUL
            )  # fmt: skip
            v = load_tile(v_rows, seen, stride_vd, VALUE_DIM, BLOCK_DV)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    else:
        # Triton would bring codes to the chip's memory and fetch them from there byte by byte. Instead each block is asked for
        # while the one before it is worked on.
        k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
        v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
        ks_place, vs_place = batch * stride_ksb + kv_head * stride_ksh, batch * stride_vsb + kv_head * stride_vsh
        start, columns, seen = keys(begin, sink_blocks, skipped, length, first_seen, sinks, WINDOW, BLOCK_N)
        ks_base, ko_base = k_scale_ptr + ks_place, k_offset_ptr + ks_place
        vs_base, vo_base = v_scale_ptr + vs_place, v_offset_ptr + vs_place
        k, v, ks, ko, vs, vo = load_codes(
            k_base, v_base, ks_base, ko_base, vs_base, vo_base, start, seen, True, stride_kn, stride_kd, stride_vn, stride_vd, stride_ksn, stride_ksd, stride_vsn, stride_vsd,
            WIDE, BITS, WORD, K_GROUP, V_GROUP, V_GROUPS, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
        for number in tl.range(begin, end):
            start, next_columns, seen = keys(
                number + 1, sink_blocks, skipped, length, first_seen, sinks, WINDOW, BLOCK_N
            )
            next_k, next_v, next_ks, next_ko, next_vs, next_vo = load_codes(
                k_base, v_base, ks_base, ko_base, vs_base, vo_base, start, seen, number + 1 < end, stride_kn, stride_kd, stride_vn, stride_vd, stride_ksn, stride_ksd, stride_vsn, stride_vsd,
                WIDE, BITS, WORD, K_GROUP, V_GROUP, V_GROUPS, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
            )  # fmt: skip
            scale, offset = in_float32(ks, ko, BITS)
            codes = numbers(k, magic, BITS, WORD, BLOCK_N, BLOCK_D)
            values = (codes * scale[None, :] + offset[None, :]).to(q.dtype)
            dots = tl.dot(q, tl.trans(values), input_precision=PRECISION)
            weights, decay, row_sum, row_max = weigh(
                dots, row_sum, row_max, positions, columns, length, window, sinks, slope, inner, outer, WINDOW, SOFTCAP, ALIBI, CAREFUL
            )  # fmt: skip
            scale, offset = in_float32(vs, vo, BITS)
            scale = spread(scale, V_GROUP, V_GROUPS, BLOCK_N, BLOCK_DV)
            offset = spread(offset, V_GROUP, V_GROUPS, BLOCK_N, BLOCK_DV)
            values = (numbers(v, magic, BITS, WORD, BLOCK_N, BLOCK_DV) * scale + offset).to(q.dtype)
            acc = tl.dot(weights.to(q.dtype), values, acc * decay[:, None], input_precision=PRECISION)
            columns, k, v, ks, ko, vs, vo = next_columns, next_k, next_v, next_ks, next_ko, next_vs, next_vo
    # A row that saw nothing has the sum 0: its output is 0 and its log-sum-exp minus infinity.
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    store(out_ptr, place, acc / total[:, None], inside, VALUE_DIM, BLOCK_DV)
    lse = row_max + tl.log(total) if CAREFUL else (row_max + tl.log2(total)) * LN2
    tl.store(lse_ptr + statistics, tl.where(row_sum == 0.0, float("-inf"), lse), mask=inside)


@triton.jit(do_not_specialize=["splits", "heads", "rows"])
def merge_kernel(
    parts_ptr, sums_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, heads, rows, splits, size,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge what the splits found for one row: ``parts`` is ``[splits, size, VALUE_DIM]``, ``sums`` ``[splits, size]``.

    A part is read only where its split saw something; otherwise it may hold anything.
    """
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    total, highest = 0.0, float("-inf")
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        places = split.to(tl.int64) * size + index
        lse = tl.load(sums_ptr + places, mask=split < splits, other=float("-inf"))
        new = tl.maximum(highest, tl.max(lse, 0))
        # Where no split has seen anything yet, -inf - (-inf) would not be a number.
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(lse - shift)
        decay = tl.exp(highest - shift)
        read = (lse > float("-inf"))[:, None] & (columns < VALUE_DIM)[None, :]
        parts = tl.load(parts_ptr + places[:, None] * VALUE_DIM + columns[None, :], mask=read, other=0.0)
        acc = acc * decay + tl.sum(parts * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        highest = new
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    tl.store(lse_ptr + index, tl.where(blind, float("-inf"), highest + tl.log(total)))
    row, head, batch = index % rows, index // rows % heads, index // rows // heads
    place = batch * stride_ob + head * stride_oh + row * stride_om
    tl.store(out_ptr + place + columns, (acc / total).to(out_ptr.dtype.element_ty), mask=columns < VALUE_DIM)


# ---- parts


@triton.jit
def keys(number, sink_blocks, skipped, length, first_seen, sinks, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key of the block that is visited as the ``number``-th, its keys, and which of them some row sees."""
    start = (number + tl.where(number < sink_blocks, 0, skipped)) * BLOCK_N
    columns = start + tl.arange(0, BLOCK_N)
    seen = columns < length
    if WINDOW:
        seen = seen & ((columns >= first_seen) | (columns < sinks))
    return start, columns, seen


@triton.jit
def rows_from(base, start, stride, WIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where the rows of a tile of neighbours begin."""
    rows = tl.arange(0, BLOCK_N)
    if WIDE:
        rows = rows.to(tl.int64)
    return base + tl.cast(start, tl.int64) * stride + rows * stride


@triton.jit
def load_tile(rows, seen, stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load the rows that are seen; the others, and columns from ``DIM`` on, are 0."""
    columns = tl.arange(0, WIDTH)
    mask = seen[:, None]
    if DIM < WIDTH:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(rows[:, None] + (columns * stride)[None, :], mask=mask, other=0)


@triton.jit
def weigh(
    dots, row_sum, row_max, positions, columns, length, window, sinks, slope, inner, outer,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return the weights of a block of keys relative to the running maximum, what is left of those before, and sum and maximum."""
    scores = dots * inner
    if SOFTCAP:
        scores = outer * tanh(scores)
    distance = positions[:, None] - columns[None, :]
    if ALIBI:
        scores -= slope[:, None] * tl.abs(distance.to(tl.float32))
    visible = (distance >= 0) & (columns < length)[None, :]
    if WINDOW:
        visible = visible & ((distance < window) | (columns < sinks)[None, :])
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen nothing yet has the maximum -inf, and -inf - (-inf) is not a number.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exponential(scores - shift[:, None], CAREFUL)
    decay = exponential(row_max - shift, CAREFUL)
    return weights, decay, row_sum * decay + tl.sum(weights, 1), new_max


@triton.jit
def load_codes(
    k_base, v_base, ks_base, ko_base, vs_base, vo_base, start, seen, wanted,
    stride_kn, stride_kd, stride_vn, stride_vd, stride_ksn, stride_ksd, stride_vsn, stride_vsd,
    WIDE: tl.constexpr, BITS: tl.constexpr, WORD: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, V_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load a block of codes with its constants, if it is wanted: keys have one a channel for the whole block, values one a token
    and group of channels.
    """
    per_word: tl.constexpr = WORD * 8 // BITS
    seen = seen & wanted
    k = load_tile(
        rows_from(k_base, start, stride_kn, WIDE, BLOCK_N), seen, stride_kd, HEAD_DIM // per_word, BLOCK_D // per_word
    )
    v = load_tile(
        rows_from(v_base, start, stride_vn, WIDE, BLOCK_N), seen, stride_vd, VALUE_DIM // per_word, BLOCK_DV // per_word
    )
    channels = tl.arange(0, BLOCK_D)
    places = tl.cast(start // K_GROUP, tl.int64) * stride_ksn + channels * stride_ksd
    mask = (channels < HEAD_DIM) & wanted
    ks, ko = tl.load(ks_base + places, mask=mask, other=0.0), tl.load(ko_base + places, mask=mask, other=0.0)
    group = tl.arange(0, V_GROUPS)[None, :]
    places = tl.cast(start, tl.int64) * stride_vsn + tl.arange(0, BLOCK_N)[:, None] * stride_vsn + group * stride_vsd
    mask = seen[:, None] & (group * V_GROUP < VALUE_DIM)
    vs, vo = tl.load(vs_base + places, mask=mask, other=0.0), tl.load(vo_base + places, mask=mask, other=0.0)
    return k, v, ks, ko, vs, vo


@triton.jit
def numbers(words, magic, BITS: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return codes in their order as ``code + 2**BITS``, in float32.

    That is a code put into the mantissa of a power of two; a conversion of an integer takes a processor eight times as long.
    """
    words = words.to(tl.int32)
    if BITS == 8 and WORD == 1:
        codes = move(words, magic, 0, 8)
    elif BITS == 8:
        codes = tl.join(
            tl.join(move(words, magic, 0, 8), move(words, magic, 16, 8)),
            tl.join(move(words, magic, 8, 8), move(words, magic, 24, 8)),
        )
    elif WORD == 1:
        codes = tl.join(move(words, magic, 4, 4), move(words, magic, 0, 4))
    else:
        # The first of two codes is in the high half of a byte, and the first byte in the low bits of a word.
        first = tl.join(
            tl.join(move(words, magic, 4, 4), move(words, magic, 20, 4)),
            tl.join(move(words, magic, 12, 4), move(words, magic, 28, 4)),
        )
        second = tl.join(
            tl.join(move(words, magic, 0, 4), move(words, magic, 16, 4)),
            tl.join(move(words, magic, 8, 4), move(words, magic, 24, 4)),
        )
        codes = tl.join(first, second)
    return tl.reshape(codes, [ROWS, WIDTH]).to(tl.float32, bitcast=True)


@triton.jit
def move(words, magic, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Return the float of a word's code that begins at a bit: one shift, and one operation that masks and sets bits."""
    left: tl.constexpr = 23 - BITS - FIRST
    words = words << left if left >= 0 else words >> -left
    return words & ((1 << BITS) - 1 << 23 - BITS) | magic


@triton.jit
def in_float32(scale, offset, BITS: tl.constexpr):
    """Return constants in float32, the offset being that of `numbers`."""
    scale = scale.to(tl.float32)
    return scale, offset.to(tl.float32) - scale * (1 << BITS)


@triton.jit
def spread(constants, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return for every channel the constant of its group."""
    if GROUP * GROUPS == WIDTH:
        return tl.reshape(tl.broadcast_to(constants[:, :, None], [ROWS, GROUPS, GROUP]), [ROWS, WIDTH])
    else:
        # Padding has groups past the last: what comes of it is not stored.
        group = tl.minimum(tl.arange(0, WIDTH) // GROUP, GROUPS - 1)
        return tl.gather(constants, tl.broadcast_to(group[None, :], [ROWS, WIDTH]), 1)


@triton.jit
def store(out_ptr, place, values, inside, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows of the output in its dtype."""
    channels = tl.arange(0, WIDTH)
    mask = inside[:, None] & (channels < DIM)[None, :]
    tl.store(out_ptr + place[:, None] + channels[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
