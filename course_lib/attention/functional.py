"""The one call for attention: checks its inputs, chooses a backend, and runs it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal, overload

import torch

from course_lib.attention.arguments import check_packed, check_rules, check_starts
from course_lib.attention.backends import RUNNERS, BackendChoice, Result, choose, packs, run_packed


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> Result: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | Result:
    """Scaled dot-product attention, the same on every backend.

    A score is ``q . k * scale``; then ``softcap`` bounds it, ALiBi lowers it, an additive mask raises it; causality, window and
    boolean mask hide keys. Queries stand at the **end** of the keys: query row ``r`` is at position
    ``kv_len - query_len + r``.

    Parameters
    ----------
    q : Tensor
        ``[batch, query_heads, query_len, head_dim]``; float16, bfloat16, float32 or float64; head_dim from 1 to 256.
    k, v : Tensor
        ``[batch, kv_heads, kv_len, head_dim]`` and ``[batch, kv_heads, kv_len, value_dim]``; ``kv_heads`` divides
        ``query_heads``. Strides are free, lengths may be 0.
    causal : bool
        Whether a query is blind to later keys.
    scale : float, optional
        ``1 / sqrt(head_dim)`` by default.
    attention_mask : Tensor, optional
        Boolean (True attends) or floating (added to the scores), of a shape that broadcasts to
        ``[batch, query_heads, query_len, kv_len]``. A padding mask ``[batch, kv_len]`` is given as ``mask[:, None, None, :]``.
    alibi_slopes : Tensor, optional
        ``[query_heads]`` or ``[batch, query_heads]``: a score falls by the slope for each token of distance.
    sliding_window : int, optional
        ``W >= 1``: keys ``j > i - W`` are seen with ``causal``, else those with ``|i - j| < W``. The own position counts.
    softcap : float, optional
        Positive; scores become ``softcap * tanh(score / softcap)``.
    return_lse : bool
        Whether to return the log-sum-exp as well.
    backend : str
        ``"auto"``, ``"reference"``, ``"blockwise"``, ``"sdpa"`` or ``"triton"``; see :func:`choose_backend`.

    Returns
    -------
    output : Tensor
        ``[batch, query_heads, query_len, value_dim]`` in the dtype of ``q``. A row that sees nothing is 0.
    lse : Tensor
        With ``return_lse`` only: natural logarithm of the sum of exponentials, ``[batch, query_heads, query_len]``, float32
        (float64 for float64 inputs); minus infinity for a row that sees nothing.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind, or dtypes or devices differ.
    ValueError
        If shapes do not fit, a value is out of range, or the named backend cannot do what is asked.

    Notes
    -----
    Chapter 02 derives the operation and chapter 05 the backends. Gradients reach q, k, v and, except with ``"triton"``, a
    floating mask; slopes are constants.
    """
    rules = check_rules(q, k, v, causal, scale, attention_mask, alibi_slopes, sliding_window, softcap)
    chosen = choose(q, k, v, rules, return_lse, backend)
    output, lse = RUNNERS[chosen.backend](q, k, v, rules)
    return (output, lse) if return_lse else output


def choose_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> BackendChoice:
    """Return the backend that ``attention(..., backend="auto")`` runs for these arguments, and why.

    Parameters and errors are those of :func:`attention`.
    """
    rules = check_rules(q, k, v, causal, scale, attention_mask, alibi_slopes, sliding_window, softcap)
    return choose(q, k, v, rules, return_lse, "auto")


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | Result:
    """Attention within each of several sequences that stand packed behind one another, without padding.

    Parameters
    ----------
    q : Tensor
        ``[total_queries, query_heads, head_dim]``.
    k, v : Tensor
        ``[total_keys, kv_heads, head_dim]`` and ``[total_keys, kv_heads, value_dim]``.
    cu_seqlens_q, cu_seqlens_k : Tensor
        Cumulative lengths, int32 or int64, ``[sequences + 1]``: sequence ``s`` is ``q[cu_seqlens_q[s]:cu_seqlens_q[s + 1]]``.
        They start at 0, never fall and end at the totals; a sequence may be empty.
    max_seqlen_q, max_seqlen_k : int, optional
        The longest lengths. On a card, giving both spares a wait for the device, and the cumulative lengths are then taken
        on trust.
    causal, scale, sliding_window, softcap, return_lse, backend
        As for :func:`attention`, in each sequence by itself.
    alibi_slopes : Tensor, optional
        ``[query_heads]`` or ``[sequences, query_heads]``.

    Returns
    -------
    output : Tensor
        ``[total_queries, query_heads, value_dim]`` in the dtype of ``q``.
    lse : Tensor
        With ``return_lse`` only, ``[total_queries, query_heads]``.

    Raises
    ------
    TypeError, ValueError
        As :func:`attention`, and if cumulative lengths do not fit the totals.
    """
    rules = check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, alibi_slopes, sliding_window, softcap)
    longest_q, longest_k = max_seqlen_q, max_seqlen_k
    if q.device.type == "cpu" or longest_q is None or longest_k is None:
        starts_q = check_starts("q", cu_seqlens_q, q.shape[0], longest_q)
        starts_k = check_starts("k", cu_seqlens_k, k.shape[0], longest_k)
        longest_q, longest_k = (max((b - a for a, b in pairwise(s)), default=0) for s in (starts_q, starts_k))
    if backend != "auto":
        choose(q, k, v, rules, return_lse, backend)
    if backend == "triton" or (backend == "auto" and packs(q, rules)):
        output, lse = run_packed(q, k, v, rules, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
        return (output, lse) if return_lse else output

    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    outputs, sums = [q.new_empty(0, q.shape[1], v.shape[-1])], [q.new_empty(0, q.shape[1], dtype=working)]
    pieces = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for sequence, ((start_q, end_q), (start_k, end_k)) in enumerate(pieces):
        q_one = q[start_q:end_q].transpose(0, 1)[None]
        k_one, v_one = (tensor[start_k:end_k].transpose(0, 1)[None] for tensor in (k, v))
        own = rules
        if rules.alibi_slopes is not None and len(rules.alibi_slopes) > 1:
            own = replace(rules, alibi_slopes=rules.alibi_slopes[sequence : sequence + 1])
        chosen = choose(q_one, k_one, v_one, own, return_lse, backend)
        output, lse = RUNNERS[chosen.backend](q_one, k_one, v_one, own)
        outputs.append(output[0].transpose(0, 1))
        if return_lse:
            sums.append(lse[0].transpose(0, 1))
    return (torch.cat(outputs), torch.cat(sums)) if return_lse else torch.cat(outputs)
