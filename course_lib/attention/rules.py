"""What a query may see and how a score is changed before softmax: the semantics that every backend shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rules:
    """The rules of one attention call, checked and in normal form.

    A score is ``q . k * scale``, then capped, then lowered by ALiBi, then raised by the additive mask; what causality, window or
    boolean mask hide becomes minus infinity.

    Attributes
    ----------
    scale : float
        Factor on the dot products.
    causal : bool
        A query sees its own position and earlier ones. The last query stands at the last key.
    sliding_window : int, optional
        A query at ``i`` sees keys ``j > i - W`` (causal) or ``|i - j| < W``.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes : Tensor, optional
        float32, ``[1 or batch, query_heads]``, on the device of the queries.
    attention_mask : Tensor, optional
        Boolean (True attends) or floating (added), four axes, each 1 or that of ``[batch, query_heads, query_len, kv_len]``.
    """

    scale: float
    causal: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return what causality and window hide.

        Parameters
        ----------
        queries, keys : Tensor
            Integer positions, ``[rows]`` and ``[columns]``; queries count from the end of the keys.

        Returns
        -------
        Tensor or None
            Boolean, ``[rows, columns]``, True where hidden; None where neither rule applies.
        """
        ahead = keys - queries[:, None]
        hidden = ahead > 0 if self.causal else None
        if self.sliding_window is not None:
            reach = min(self.sliding_window, 2**62)  # a window may be greater than any position, and than an int64
            far = (ahead if self.causal else -ahead.abs()) <= -reach
            hidden = far if hidden is None else hidden | far
        return hidden

    def shape(
        self, scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the scores that softmax sees.

        Parameters
        ----------
        scores : Tensor
            Dot products, ``[batch, query_heads, rows, columns]``.
        queries, keys : Tensor
            Their positions, see :meth:`hidden`.
        mask : Tensor or None
            The part of ``attention_mask`` for these rows and columns.

        Returns
        -------
        Tensor
            The shape and dtype of ``scores``; minus infinity where a key is hidden.
        """
        scores = scores * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi_slopes is not None:
            distance = (queries[:, None] - keys).abs().to(scores.dtype)
            scores = scores - self.alibi_slopes.to(scores.dtype)[:, :, None, None] * distance
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask.to(scores.dtype)
        hidden = self.hidden(queries, keys)
        if mask is not None and mask.dtype == torch.bool:
            hidden = ~mask if hidden is None else hidden | ~mask
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def positions(query_len: int, kv_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of queries and keys: the last query stands at the last key."""
    return torch.arange(kv_len - query_len, kv_len, device=device), torch.arange(kv_len, device=device)
