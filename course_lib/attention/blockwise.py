"""Attention block by block: the online softmax, in memory that grows with the length and not with its square."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from course_lib.attention.rules import Rules, positions

#: Rows of scores in a block (the query heads of a group stand below one another); the fewest scores in a block, of one KV
#: head and of all; and its most columns. Chosen on a CPU: smaller blocks pay for more calls, and for threads that wait for one
#: another after each; larger ones leave the cache.
BLOCK_ROWS = 256
HEAD_SCORES = BLOCK_ROWS**2
ALL_SCORES = 2 * HEAD_SCORES
MOST_COLUMNS = 2048


def blockwise_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention without ever holding the whole matrix of scores, on any device. Chapter 05 derives it.

    Blocks of scores live one at a time, in the forward and in the backward pass, which computes them again. Half precisions are
    computed in float32 block by block, float64 in float64. Blocks that causality or window hide are skipped.

    Parameters
    ----------
    q, k, v : Tensor
        ``[batch, query_heads, query_len, head_dim]``, ``[batch, kv_heads, kv_len, head_dim]`` and
        ``[batch, kv_heads, kv_len, value_dim]``.
    rules : Rules
        What is seen, and how scores change.

    Returns
    -------
    output : Tensor
        ``[batch, query_heads, query_len, value_dim]`` in the inputs' dtype; 0 for a row that sees nothing.
    lse : Tensor
        Natural logarithm of the sum of exponentials, ``[batch, query_heads, query_len]``; minus infinity for such a row.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Rabe and Staats, "Self-attention does not need
    O(n^2) memory", 2021; Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _Blockwise.apply(q, k, v, rules.attention_mask, rules)  # type: ignore[no-untyped-call]
    return result


def update(
    scores: torch.Tensor, values: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, output: torch.Tensor
) -> None:
    """Take one more block of keys into a softmax that has seen others: the online softmax. Everything changes in place.

    Parameters
    ----------
    scores : Tensor
        ``[heads, rows, columns]``; becomes the exponentials.
    values : Tensor
        ``[heads, columns, value_dim]``.
    maximum : Tensor
        The highest score so far, ``[heads, rows, 1]``. It starts at the lowest finite number: minus infinity less
        itself would be NaN where every score is minus infinity.
    total : Tensor
        Sum of ``exp(score - maximum)`` so far, ``[heads, rows, 1]``; starts at 0.
    output : Tensor
        Sum of ``exp(score - maximum) * value`` so far, ``[heads, rows, value_dim]``; starts at 0.
    """
    highest = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
    shrink = maximum.sub_(highest).exp_()  # what was summed so far was relative to the old maximum
    scores.sub_(highest).exp_()
    total.mul_(shrink).add_(scores.sum(dim=-1, keepdim=True))
    output.mul_(shrink).baddbmm_(scores, values)
    maximum.copy_(highest)


class _Blocks:
    """One call cut into blocks, for both passes. A block is ``[batch * kv_heads, group * rows, columns]``."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, rules: Rules) -> None:
        self.batch, self.query_heads, self.query_len, _ = q.shape
        self.kv_heads, self.kv_len = k.shape[1], k.shape[2]
        self.group = self.query_heads // self.kv_heads
        self.working = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.mask, self.rules = mask, rules
        self.queries, self.keys = positions(self.query_len, self.kv_len, q.device)
        # The queries are scaled when they are read. Only at the edge of what is seen do causality and window matter.
        self.at_edge = dataclasses.replace(rules, scale=1.0)
        self.inside = dataclasses.replace(self.at_edge, causal=False, sliding_window=None)
        self.reshaped = rules.softcap is not None or rules.alibi_slopes is not None or mask is not None

    def rows(self) -> Iterator[slice]:
        """Yield blocks of query rows."""
        size = max(1, BLOCK_ROWS // self.group)
        for start in range(0, self.query_len, size):
            yield slice(start, min(start + size, self.query_len))

    def columns(self, rows: slice) -> Iterator[tuple[slice, bool]]:
        """Yield the blocks of keys that a row sees, and whether causality or window hides some of a block from another."""
        first, last = self.kv_len - self.query_len + rows.start, self.kv_len - self.query_len + rows.stop - 1
        # A query at i sees the keys from i - before to i + after.
        window = self.rules.sliding_window
        before = self.query_len + self.kv_len if window is None else window - 1
        after = 0 if self.rules.causal else before
        end = min(self.kv_len, last + after + 1)
        scores = max(HEAD_SCORES, ALL_SCORES // max(1, self.batch * self.kv_heads))
        size = max(1, min(MOST_COLUMNS, scores // (self.group * (last - first + 1))))
        for start in range(max(0, first - before), end, size):
            stop = min(start + size, end)
            yield slice(start, stop), start < last - before or stop - 1 > first + after

    def of_queries(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return rows of a tensor of queries, ``[batch * kv_heads, group * rows, size]``, in the working dtype."""
        heads, rows_of_group = self.batch * self.kv_heads, self.group * (rows.stop - rows.start)
        return x[:, :, rows].to(self.working).reshape(heads, rows_of_group, x.shape[-1])

    def of_keys(self, x: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return rows of K or V, ``[batch * kv_heads, columns, size]``, in the working dtype."""
        return x[:, :, columns].to(self.working).flatten(0, 1)

    def of_mask(self, x: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Return a block of a mask or its gradient, as a view. Axes of size 1 stay."""
        return x[:, :, rows if x.shape[2] > 1 else slice(None), columns if x.shape[3] > 1 else slice(None)]

    def by_head(self, block: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return a block as ``[batch, query_heads, rows, columns]``."""
        return block.view(self.batch, self.query_heads, rows.stop - rows.start, block.shape[-1])

    def shape(self, dots: torch.Tensor, rows: slice, columns: slice, edge: bool) -> torch.Tensor:
        """Return the scores that softmax sees: a new tensor, or `dots` itself where the rules change nothing."""
        if not (self.reshaped or edge):
            return dots
        mask = None if self.mask is None else self.of_mask(self.mask, rows, columns)
        rules = self.at_edge if edge else self.inside
        return rules.shape(self.by_head(dots, rows), self.queries[rows], self.keys[columns], mask).view_as(dots)


class _Blockwise(torch.autograd.Function):
    """The two passes. Between them live inputs, output, and each row's maximum and sum: nothing quadratic."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rules: Rules
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = _Blocks(q, k, mask, rules)
        heads, value_dim = blocks.batch * blocks.kv_heads, v.shape[-1]
        output = q.new_empty(*q.shape[:3], value_dim)
        maxima, totals = (q.new_empty(*q.shape[:3], 1, dtype=blocks.working) for _ in range(2))
        with torch.autocast(q.device.type, enabled=False):
            for rows in blocks.rows():
                queries = blocks.of_queries(q, rows) * rules.scale
                maximum = queries.new_full((heads, queries.shape[1], 1), torch.finfo(blocks.working).min)
                total = torch.zeros_like(maximum)
                summed = queries.new_zeros(heads, queries.shape[1], value_dim)
                for columns, edge in blocks.columns(rows):
                    dots = torch.bmm(queries, blocks.of_keys(k, columns).mT)
                    scores = blocks.shape(dots, rows, columns, edge)
                    update(scores, blocks.of_keys(v, columns), maximum, total, summed)
                # A row that sees nothing has summed nothing: 0 / 1. Any other has its maximum in the sum, at least 1.
                output[:, :, rows] = blocks.by_head(summed.div_(total.clamp(min=1)), rows)
                maxima[:, :, rows], totals[:, :, rows] = blocks.by_head(maximum, rows), blocks.by_head(total, rows)
        lse = (maxima + totals.log()).squeeze(-1)
        ctx.rules = dataclasses.replace(rules, attention_mask=None)
        ctx.save_for_backward(q, k, v, mask, output, maxima, totals)
        return output, lse

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor, lse_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for a second derivative, which blockwise attention has not; backend='reference' has one"
            )
        q, k, v, mask, output, maxima, totals = ctx.saved_tensors
        rules = ctx.rules
        blocks = _Blocks(q, k, mask, rules)
        heads = blocks.batch * blocks.kv_heads
        q_grad = torch.empty_like(q)
        k_grad = k.new_zeros(heads, *k.shape[2:], dtype=blocks.working)
        v_grad = v.new_zeros(heads, *v.shape[2:], dtype=blocks.working)
        mask_grad = torch.zeros_like(mask, dtype=blocks.working) if ctx.needs_input_grad[3] else None
        with torch.autocast(q.device.type, enabled=False):
            for rows in blocks.rows():
                queries = blocks.of_queries(q, rows) * rules.scale
                maximum, total = blocks.of_queries(maxima, rows), blocks.of_queries(totals, rows)
                # The weights are exp(score - maximum) / total. Dividing the gradients instead spares a pass over the block.
                # What comes back to a row that sees nothing is dropped, were it NaN.
                blind, total = total == 0, total.clamp(min=1)
                upstream = (blocks.of_queries(output_grad, rows) / total).masked_fill_(blind, 0)
                shift = (upstream * blocks.of_queries(output, rows)).sum(dim=-1, keepdim=True)
                shift -= (blocks.of_queries(lse_grad[..., None], rows) / total).masked_fill_(blind, 0)
                query_grad = torch.zeros_like(queries)
                for columns, edge in blocks.columns(rows):
                    keys, values = blocks.of_keys(k, columns), blocks.of_keys(v, columns)
                    dots = torch.bmm(queries, keys.mT)
                    weights = blocks.shape(dots, rows, columns, edge).sub_(maximum).exp_()
                    v_grad[:, columns].baddbmm_(weights.mT, upstream)
                    score_grad = torch.bmm(upstream, values.mT).sub_(shift).mul_(weights)
                    if mask_grad is not None:
                        part = blocks.of_mask(mask_grad, rows, columns)
                        part += blocks.by_head(score_grad, rows).sum_to_size(part.shape)
                    if rules.softcap is not None:
                        score_grad *= 1 - torch.tanh(dots / rules.softcap).square_()
                    query_grad.baddbmm_(score_grad, keys)
                    k_grad[:, columns].baddbmm_(score_grad.mT, queries)
                q_grad[:, :, rows] = blocks.by_head(query_grad.mul_(rules.scale), rows)
        if mask_grad is not None:
            mask_grad = mask_grad.to(mask.dtype)
        return q_grad, k_grad.view(k.shape).to(k.dtype), v_grad.view(v.shape).to(v.dtype), mask_grad, None
