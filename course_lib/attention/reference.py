"""Attention as the formula says it, with every score in memory: the yardstick of the other backends."""

from __future__ import annotations

import torch

from course_lib.attention.rules import Rules, positions


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with the whole matrix of scores. Chapter 02 derives it.

    Products of matrices are in the inputs' dtype. Scores and softmax are in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    q, k, v : Tensor
        ``[batch, query_heads, query_len, head_dim]`` and ``[batch, kv_heads, kv_len, head_dim]``.
    rules : Rules
        What is seen, and how scores change.

    Returns
    -------
    output : Tensor
        ``[batch, query_heads, query_len, value_dim]`` in the inputs' dtype; 0 for a row that sees nothing.
    lse : Tensor
        Natural logarithm of the sum of exponentials, ``[batch, query_heads, query_len]``; minus infinity for such a row.
    """
    batch, query_heads, query_len, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    # The query heads of a group stand below one another, so that one product serves them and K is not repeated.
    grouped = (batch, kv_heads, query_heads // kv_heads * query_len)
    dots = q.reshape(*grouped, q.shape[-1]) @ k.transpose(-1, -2)
    dots = dots.view(batch, query_heads, query_len, kv_len).to(working)
    scores = rules.shape(dots, *positions(query_len, kv_len, q.device), rules.attention_mask)

    # A row that sees nothing is given something harmless to see and is erased afterwards: its gradient is 0, not NaN.
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(blind[..., 0], -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0).to(v.dtype)
    output = (weights.view(*grouped, kv_len) @ v).view(batch, query_heads, query_len, v.shape[-1])
    return output, lse
