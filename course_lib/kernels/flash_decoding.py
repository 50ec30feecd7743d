"""Attention of a few new tokens to many stored ones: the keys are split among programs, and what these find is merged.

Functions
---------
flash_decoding
    Attention of 1 to 16 query rows to a cache: contiguous, paged, or of int8 or int4 codes; on a card in Triton, elsewhere in PyTorch.
merge
    Make one attention of several over different keys.
decoding_refusal
    Why the kernel cannot run on tensors.

Decoding is bound by memory: each key and each value is read once, for a few multiplications. What counts is that every processor
of a card reads all the time, however few sequences and heads there are, and that a key is read once for all query heads that
share it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional

from course_lib.kernels.flash_decoding_arguments import Codes, Rules, Store, check, shape

__all__ = ["Codes", "decoding_refusal", "flash_decoding", "merge"]

Pair = tuple[torch.Tensor, torch.Tensor]


def flash_decoding(
    q: torch.Tensor,
    k: Store,
    v: Store,
    *,
    lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    ahead: int = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: int = 0,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> torch.Tensor | Pair:
    """Compute causal attention of the last few tokens to a cache, which is read as it lies.

    Parameters
    ----------
    q : Tensor
        ``[batch, query_heads, rows, head_dim]``, 1 to 16 rows, any strides. float16, bfloat16 or float32, on the torch backend
        float64 too.
    k, v : Tensor or Codes
        ``[batch, kv_heads, capacity, head_dim]`` and ``[batch, kv_heads, capacity, value_dim]`` in the dtype of ``q``, or codes, in
        any strides. With ``block_table`` pools, ``[num_blocks, kv_heads, block_size, head_dim or value_dim]``. What lies past a
        sequence's length is never read.
    lengths : Tensor, optional
        Keys of each sequence, int32 or int64, ``[batch]``; by default all that there is room for.
    block_table : Tensor, optional
        int32 or int64, ``[batch, blocks]``: where in the pool each sequence's blocks lie. Entries past a sequence's last block may
        hold anything.
    ahead : int
        Keys that follow these in another part of the cache: query row ``r`` stands at position
        ``length + ahead - rows + r``, and key ``j`` at ``j``.
    scale : float, optional
        Factor on the dot products, ``head_dim ** -0.5`` by default.
    sliding_window : int, optional
        A query at ``i`` sees keys ``j > i - sliding_window``.
    sinks : int
        The first keys, which it sees even so.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes : Tensor, optional
        float32, ``[query_heads]`` or ``[1 or batch, query_heads]``.
    return_lse : bool
        Whether the log-sum-exp is returned too.
    backend : str
        ``"triton"``, ``"torch"``, or ``"auto"``: Triton on a card where the kernel takes the tensors, else PyTorch.

    Returns
    -------
    output : Tensor
        ``[batch, query_heads, rows, value_dim]`` in the dtype of ``q``; 0 for a row that sees nothing.
    lse : Tensor
        float32 (float64 for such ``q``), ``[batch, query_heads, rows]``, natural logarithm; minus infinity for such a row.

    Raises
    ------
    TypeError
        If dtypes do not fit.
    ValueError
        If shapes, devices or numbers do not fit, or ``backend="triton"`` cannot run here.

    Notes
    -----
    The algorithm is Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023); the pages are those of Kwon et al., "Efficient memory
    management for large language model serving with PagedAttention", 2023. Both backends add up in float32. Only the PyTorch one
    has gradients; it waits for ``lengths`` on the host.
    """
    slopes = alibi_slopes[None] if alibi_slopes is not None and alibi_slopes.ndim == 1 else alibi_slopes
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rules = Rules(ahead, scale, sliding_window, sinks, softcap, slopes)
    check(q, k, v, lengths, block_table, rules)
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend is {backend!r}; accepted are 'auto', 'triton' and 'torch'")
    if backend == "triton" or (backend == "auto" and q.device.type == "cuda"):
        reason = decoding_refusal(q, k, v, block_table)
        if reason is None:
            from course_lib.kernels.flash_decoding_launch import launch

            output, lse = launch(q, k, v, lengths, block_table, rules)
            return (output, lse) if return_lse else output
        if backend == "triton":
            raise ValueError(f"backend is 'triton', which cannot run here: {reason}")
    output, sums = _torch(q, k, v, lengths, block_table, rules, return_lse)
    return output if sums is None or not return_lse else (output, sums)


def merge(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> Pair:
    """Make one attention of several over different keys.

    Parameters
    ----------
    outputs : sequence of Tensor
        ``[..., value_dim]``, one for each part; 0 or anything finite where a part saw nothing.
    lses : sequence of Tensor
        ``[...]``, minus infinity where a part saw nothing.

    Returns
    -------
    output, lse : Tensor
        As if one call had seen all keys: in the dtypes of the parts; 0 and minus infinity where no part saw any.
    """
    lse = torch.stack(tuple(lses))
    total = torch.logsumexp(lse, dim=0)
    # Where nothing was seen, -inf - (-inf) would not be a number.
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    output = (torch.stack(tuple(outputs)).to(lse.dtype) * weights.unsqueeze(-1)).sum(dim=0)
    return output.to(outputs[0].dtype), total


def decoding_refusal(q: torch.Tensor, k: Store, v: Store, block_table: torch.Tensor | None = None) -> str | None:
    """Return why the kernel cannot run on the tensors of a call, as the end of a sentence, or None.

    Parameters
    ----------
    q, k, v, block_table
        As for `flash_decoding`.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it exists for Linux)"
    from course_lib.kernels.flash_decoding_launch import kernel_refusal

    return kernel_refusal(q, k, v, block_table is not None)


# ---- in PyTorch


def _torch(
    q: torch.Tensor,
    k: Store,
    v: Store,
    lengths: torch.Tensor | None,
    table: torch.Tensor | None,
    rules: Rules,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to all sequences at once if they have one length, else to one after another."""
    batch, query_heads, rows, head_dim = q.shape
    _, kv_heads, tokens, value_dim = shape(v)
    capacity = tokens if table is None else tokens * table.shape[1]
    # The heads of a group stand below one another, so that no key is repeated for them.
    queries = q.reshape(batch, kv_heads, query_heads // kv_heads * rows, head_dim)
    simple = rows == 1 and capacity and lengths is None and table is None and not with_lse
    simple = simple and rules.window is None and rules.softcap is None and rules.slopes is None
    if simple and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        # The usual call on a CPU. It is so short that what follows, which would do the same, takes a tenth of its time.
        output = functional.scaled_dot_product_attention(queries, k, v, scale=rules.scale)
        return output.reshape(batch, query_heads, 1, value_dim), None
    found = [capacity]
    if lengths is not None:
        found = [max(0, length) for length in lengths.tolist()]
        if max(found, default=0) > capacity:
            raise ValueError(f"lengths holds {max(found)}; at most {capacity}, the room of k, is accepted")
    if len(set(found)) == 1:
        output, lse = _attend(queries, k, v, slice(None), found[0], rows, table, rules, with_lse)
    elif found:
        every = (slice(first, first + 1) for first in range(batch))
        parts = [_attend(queries[here], k, v, here, found[here.start], rows, table, rules, with_lse) for here in every]
        output = torch.cat([part for part, _ in parts])
        lse = torch.cat([part for _, part in parts if part is not None]) if with_lse else None
    else:
        output, lse = queries.new_empty(0, 0, 0, value_dim), queries.new_empty(0).float()
    output = output.reshape(batch, query_heads, rows, value_dim)
    return output if output.dtype == q.dtype else output.to(q.dtype), None if lse is None else lse.view(q.shape[:3])


def _attend(
    queries: torch.Tensor,
    k: Store,
    v: Store,
    here: slice,
    length: int,
    rows: int,
    table: torch.Tensor | None,
    rules: Rules,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to sequences of one length; without the log-sum-exp it is None."""
    first = length + rules.ahead - rows
    begin = 0 if rules.window is None else min(length, max(0, first - rules.window + 1))
    spans = [span for span in ((0, min(rules.sinks, begin)), (begin, length)) if span[0] < span[1]]
    # A single row sees all keys that its window leaves.
    hidden = (rows > 1 and (rules.window is not None or rules.ahead < rows - 1)) or first < 0
    if len(spans) == 1 and not (hidden or with_lse or rules.softcap is not None or rules.slopes is not None):
        keys, values = _read(k, here, spans[0], table, None), _read(v, here, spans[0], table, None)
        if not queries.dtype == keys.dtype == values.dtype:  # codes have become float32
            queries, keys, values = queries.float(), keys.float(), values.float()
        return functional.scaled_dot_product_attention(queries, keys, values, scale=rules.scale), None
    working = torch.float64 if queries.dtype == torch.float64 else torch.float32
    queries = queries.to(working) * rules.scale
    scores = _joined([queries @ _read(k, here, span, table, working).mT for span in spans] or [queries[..., :0]])
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if hidden or rules.slopes is not None:
        scores = _shaped(scores, spans, first, rows, here, rules)
    if hidden:
        # A row that sees nothing has the weights 0.
        blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    else:
        weights = torch.softmax(scores, dim=-1)
    parts = torch.split(weights, [end - start for start, end in spans], dim=-1)
    products = [part @ _read(v, here, span, table, working) for part, span in zip(parts, spans, strict=True)]
    attended = sum(products[1:], products[0]) if products else queries.new_zeros(*queries.shape[:3], shape(v)[-1])
    return attended, torch.logsumexp(scores, dim=-1) if with_lse else None


def _shaped(
    scores: torch.Tensor, spans: list[tuple[int, int]], first: int, rows: int, here: slice, rules: Rules
) -> torch.Tensor:
    """Lower scores by ALiBi and hide those that causality or the window hides."""
    columns = torch.cat([torch.arange(*span, device=scores.device) for span in spans or [(0, 0)]])
    distance = torch.arange(first, first + rows, device=scores.device)[:, None] - columns
    scores = scores.view(*scores.shape[:2], scores.shape[2] // rows, rows, scores.shape[3])
    if rules.slopes is not None:
        slopes = rules.slopes[here] if len(rules.slopes) > 1 else rules.slopes
        slopes = slopes.to(scores.dtype).reshape(len(slopes), scores.shape[1], scores.shape[2], 1, 1)
        scores = scores - slopes * distance.abs()
    hidden = distance < 0
    if rules.window is not None:
        hidden |= (distance >= rules.window) & (columns >= rules.sinks)
    return scores.masked_fill(hidden, -torch.inf).flatten(2, 3)


def _read(
    store: Store,
    here: slice,
    span: tuple[int, int],
    table: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return keys or values of some sequences from one position to another, ``[sequences, kv_heads, tokens, dim]``.

    Without a dtype they stay in their own, and codes become float32.
    """
    start, end = span
    if table is not None:
        size = shape(store)[2]
        blocks = table[here, start // size : -(-end // size)].long()
        if isinstance(store, Codes):
            scale, offset = _gathered(store.scale, blocks), _gathered(store.offset, blocks)
            store = dataclasses.replace(store, codes=_gathered(store.codes, blocks), scale=scale, offset=offset)
        else:
            store = _gathered(store, blocks)
        start, end, here = start % size, start % size + end - start, slice(None)
    if isinstance(store, torch.Tensor):
        store = store if here == slice(None) else store[here]
        store = store if end - start == store.shape[2] else store[:, :, start:end]
        return store if dtype is None else store.to(dtype)
    group = store.group if store.axis == "channel" else 1
    left, right = start // group, -(-end // group)
    codes = store.codes[here, :, left * group : right * group]
    scale, offset = store.scale[here, :, left:right], store.offset[here, :, left:right]
    found = dataclasses.replace(store, codes=codes, scale=scale, offset=offset).values(dtype or torch.float32)
    return found[:, :, start - left * group : end - left * group]


def _gathered(pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks of a pool side by side, ``[sequences, kv_heads, tokens, dim]``."""
    _, kv_heads, size, dim = pool.shape
    heads = torch.arange(kv_heads, device=pool.device)[:, None]
    if pool.stride(0) != kv_heads * pool.stride(1):
        return pool[blocks[:, None], heads].flatten(2, 3)
    # Heads of blocks are rows of a matrix: copied as such it takes a third of the time.
    rows = (blocks[:, None] * kv_heads + heads).flatten()
    return pool.flatten(0, 1).index_select(0, rows).view(len(blocks), kv_heads, blocks.shape[1] * size, dim)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
