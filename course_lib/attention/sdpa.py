"""Attention by PyTorch's own function: what it needs to keep the rules of this library."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from course_lib.attention.reference import reference_attention
from course_lib.attention.rules import Rules, positions


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Compute attention with ``torch.nn.functional.scaled_dot_product_attention``. Chapter 05 compares it.

    PyTorch aligns causal rows with the first key, knows no window and no slopes, and leaves rows that see nothing to the kernel it
    picks. Here its own causality is used where both alignments agree, a mask is built where it has no word for a
    rule, and none where nothing is hidden.

    Parameters
    ----------
    q, k, v : Tensor
        ``[batch, query_heads, query_len, head_dim]``, ``[batch, kv_heads, kv_len, head_dim]`` and
        ``[batch, kv_heads, kv_len, value_dim]``.
    rules : Rules
        What is seen, and how scores change; without softcap, for which PyTorch has no word either.

    Returns
    -------
    Tensor
        ``[batch, query_heads, query_len, value_dim]`` in the inputs' dtype; 0 for a row that sees nothing.

    Notes
    -----
    Where an additive mask holds the lowest finite number in a whole row, the output is the average of the values, as everywhere, but
    PyTorch's fused kernel for CPUs passes too large a gradient back through that row.
    """
    if 0 in (q.numel(), k.numel(), v.numel()):
        return reference_attention(q, k, v, rules)[0]
    query_len, kv_len = q.shape[2], k.shape[2]
    mask = blind = None
    windowed = rules.sliding_window is not None and max(query_len, kv_len) > rules.sliding_window
    # A single query stands at the last key: nothing lies ahead of it.
    by_position = windowed or (rules.causal and query_len > 1)
    # PyTorch hides a key by minus infinity before it multiplies with the scale, which makes NaN or plus infinity of it.
    aligned = query_len == kv_len and not windowed and rules.scale > 0
    unmasked = rules.attention_mask is None and rules.alibi_slopes is None
    if not unmasked or (by_position and not aligned):
        mask, blind = _mask(q, kv_len, rules)
    elif query_len == 1:
        # Query heads that share keys stand in one product as its rows, so that no key is repeated for them.
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        return scaled_dot_product_attention(rows, k, v, scale=rules.scale).reshape(*q.shape[:3], v.shape[3])
    output = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and by_position,
        scale=rules.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return output if blind is None else output.masked_fill(blind, 0.0)


def _mask(q: torch.Tensor, kv_len: int, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask that says what the rules say, and which rows are blind.

    Both broadcast to ``[batch, query_heads, query_len, ...]``. A blind row is given every key to see, which no kernel gets wrong,
    and its output is erased afterwards: its gradient is 0 then, not NaN.
    """
    given, (queries, keys) = rules.attention_mask, positions(q.shape[2], kv_len, q.device)
    if rules.alibi_slopes is None and (given is None or given.dtype == torch.bool):
        hidden = rules.hidden(queries, keys)
        seen = given if hidden is None else ~hidden[None, None] if given is None else given & ~hidden
        assert seen is not None
        blind = ~seen.any(dim=-1, keepdim=True)
        return seen | blind, blind
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    bias = rules.shape(torch.zeros(1, 1, q.shape[2], kv_len, dtype=working, device=q.device), queries, keys, given)
    blind = (bias == -torch.inf).all(dim=-1, keepdim=True)
    bias = bias.masked_fill(blind, 0.0)
    # Kernels on a CPU add a bias of float32 to half precisions; those on a card want it in the inputs' dtype.
    return bias if q.device.type == "cpu" else narrow(bias, q.dtype), blind


def narrow(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a bias so that only minus infinity becomes minus infinity: other low numbers stop at the dtype's lowest."""
    return torch.where(bias == -torch.inf, -torch.inf, bias.clamp(min=torch.finfo(dtype).min)).to(dtype)
