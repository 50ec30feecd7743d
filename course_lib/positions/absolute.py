"""Absolute positions: a vector for each place in the sequence, added to the token's embedding."""

from __future__ import annotations

import torch
from torch import nn


def sinusoidal_embedding(positions: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sinusoidal encoding of positions: sines in the even columns, cosines in the odd ones.

    Column pair ``i`` turns by ``10000 ** (-2 i / dim)`` radians per token.

    Parameters
    ----------
    positions : Tensor
        Integers or floats of any shape ``[...]``.
    dim : int
        Width of the encoding, even.

    Returns
    -------
    Tensor
        float32, ``[..., dim]``.

    Raises
    ------
    ValueError
        If ``dim`` is odd or less than 2.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 2 or dim % 2:
        raise ValueError(f"dim is {dim!r}; an even number of at least 2 is needed")
    pairs = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    # In float64: a float32 product of position and frequency is off by 1e-3 at a hundred thousand tokens.
    angles = positions.double()[..., None] * 10000.0 ** (-pairs / dim)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


class LearnedPositions(nn.Embedding):
    """A learned vector for each of a fixed number of positions.

    Parameters
    ----------
    max_position_embeddings : int
        Number of positions; there is no vector for a later one.
    dim : int
        Width.
    """

    def __init__(self, max_position_embeddings: int, dim: int) -> None:
        super().__init__(max_position_embeddings, dim)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Look positions up.

        Parameters
        ----------
        positions : Tensor
            Integers ``[...]``.

        Returns
        -------
        Tensor
            ``[..., dim]``.

        Raises
        ------
        ValueError
            If a position has no vector.
        """
        if positions.numel():
            first, last = (int(end) for end in positions.aminmax())
            if first < 0 or last >= self.num_embeddings:
                wrong = first if first < 0 else last
                raise ValueError(
                    f"positions holds {wrong}; this model has learned positions 0 to {self.num_embeddings - 1}"
                )
        return super().forward(positions)
