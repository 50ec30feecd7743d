"""ALiBi: instead of an encoding, each head lowers a score in proportion to the distance between query and key."""

from __future__ import annotations

import math

import torch


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return each head's slope: how much a score falls per token of distance.

    For a power of two the slopes are the geometric sequence that starts at and has the ratio ``2 ** (-8 / num_heads)``. For any
    other count they are those of the power of two below, followed by every other slope of the power of two above.

    Parameters
    ----------
    num_heads : int
        Query heads of the whole layer. A device that holds some of the heads takes its part of this tensor: slopes
        belong to global heads.

    Returns
    -------
    Tensor
        float32, ``[num_heads]``, all in (0, 1).

    Raises
    ------
    ValueError
        If ``num_heads`` is less than one.

    References
    ----------
    Press, Smith and Lewis, "Train Short, Test Long", 2022, section 3, and the authors' code for other counts.
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"num_heads is {num_heads!r}; a whole number of at least 1 is needed")
    below = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (head + 1) / below) for head in range(below)]
    between = [2.0 ** (-4 * (head + 1) / below) for head in range(0, 2 * below, 2)]
    return torch.tensor(slopes + between[: num_heads - below], dtype=torch.float32)


def alibi_bias(num_heads: int, query_len: int, kv_len: int) -> torch.Tensor:
    """Return the bias that ALiBi adds to the scores: minus slope times distance.

    Parameters
    ----------
    num_heads, query_len, kv_len : int
        Sizes; the queries are the last ``query_len`` of the ``kv_len`` positions.

    Returns
    -------
    Tensor
        float32, ``[num_heads, query_len, kv_len]``: quadratic in the length. Attention kernels compute it block by block
        from :func:`alibi_slopes` instead.

    Raises
    ------
    ValueError
        If a size is negative, or ``num_heads`` less than one.
    """
    for name, size in (("query_len", query_len), ("kv_len", kv_len)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"{name} is {size!r}; a whole number of at least 0 is needed")
    queries = torch.arange(kv_len - query_len, kv_len)
    distance = (queries[:, None] - torch.arange(kv_len)).abs()
    return -alibi_slopes(num_heads)[:, None, None] * distance
