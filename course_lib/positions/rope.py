"""Rotary positions: queries and keys are turned by angles in proportion to their position, so that scores see distances."""

from __future__ import annotations

import torch

from course_lib.kernels.rope_arguments import LAYOUTS, Layout, check_rope


def rope_cos_sin(
    position_ids: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the angles at given positions.

    Parameters
    ----------
    position_ids : Tensor
        Integers, ``[length]`` or, with positions of its own for each sequence, ``[batch, length]``.
    inv_freq : Tensor
        ``[pairs]``, radians per token, from :func:`course_lib.positions.rope_frequencies`.
    attention_factor : float
        Factor on both results, from there too.

    Returns
    -------
    cos, sin : Tensor
        float32 whatever the model's dtype, ``[..., length, pairs]``.
    """
    angles = position_ids[..., None].float() * inv_freq.float()
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout = "half") -> torch.Tensor:
    """Turn each pair of coordinates by its angle.

    Parameters
    ----------
    x : Tensor
        Queries or keys, ``[batch, heads, length, head_dim]`` or without leading axes.
    cos, sin : Tensor
        ``[length, pairs]`` or ``[batch, length, pairs]``, one column for each pair. With fewer pairs than ``head_dim / 2``, the
        first ``2 * pairs`` coordinates are turned and the rest pass.
    layout : str
        Which coordinates make a pair: ``"half"``, ``i`` and ``i + pairs`` (Llama in Transformers); ``"interleaved"``, ``2 i``
        and ``2 i + 1`` (the paper, GPT-J, Llama as published).

    Returns
    -------
    Tensor
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises
    ------
    ValueError
        If ``layout`` is unknown or the shapes do not fit.

    See Also
    --------
    course_lib.kernels.rope : The same in one pass over memory, queries and keys together, in place if wanted.

    References
    ----------
    Su et al., "RoFormer", 2021, equation 34.
    """
    check_rope(x, cos, sin, layout)
    pairs = cos.shape[-1]
    if cos.ndim == 3 and x.ndim == 4:
        cos, sin = cos[:, None], sin[:, None]
    working = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(working), sin.to(working)
    turned, rest = x[..., : 2 * pairs].to(working), x[..., 2 * pairs :]
    first, second = turned.chunk(2, dim=-1) if layout == "half" else (turned[..., 0::2], turned[..., 1::2])
    ends = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(ends, dim=-1) if layout == "half" else torch.stack(ends, dim=-1).flatten(-2)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def convert_rope_layout(
    weight: torch.Tensor, num_heads: int, source: Layout, target: Layout, *, rotary_dim: int | None = None
) -> torch.Tensor:
    """Reorder a projection of queries or keys, so that a model trained with one layout runs with the other.

    Parameters
    ----------
    weight : Tensor
        Weight ``[num_heads * head_dim, ...]`` or bias ``[num_heads * head_dim]`` of the projection.
    num_heads : int
        Heads of this projection: the key-value heads for keys.
    source, target : str
        Layouts as in :func:`apply_rope`.
    rotary_dim : int, optional
        Coordinates of a head that are turned; all by default.

    Returns
    -------
    Tensor
        The rows of ``weight`` in a new order; scores are unchanged when queries and keys are both converted.

    Raises
    ------
    ValueError
        If a layout is unknown, or sizes do not divide.
    """
    for name, layout in (("source", source), ("target", target)):
        if layout not in LAYOUTS:
            raise ValueError(f"{name} is {layout!r}; accepted are {', '.join(LAYOUTS)}")
    if num_heads < 1 or weight.shape[0] % num_heads:
        raise ValueError(f"num_heads is {num_heads}, which does not divide the {weight.shape[0]} rows of weight")
    head_dim = weight.shape[0] // num_heads
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if not 0 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}; an even number from 0 to head_dim, {head_dim}, is accepted")
    order = torch.arange(head_dim, device=weight.device)
    if source != target:
        turned = order[:rotary_dim]
        turned = turned.view(-1, 2).T if target == "half" else turned.view(2, -1).T
        order = torch.cat((turned.reshape(-1), order[rotary_dim:]))
    return weight.view(num_heads, head_dim, *weight.shape[1:])[:, order].reshape(weight.shape)
