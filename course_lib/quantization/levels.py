"""The levels that 4-bit codes and quantised scales stand for, each table derived where it is needed."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import torch

#: The probability at which NF4's normal distribution is cut off, bitsandbytes' own: the mean of 1 - 1/32 and 1 - 1/30.
_NF4_TAIL = 0.9677083


@cache
def nf4_levels() -> torch.Tensor:
    """Return NF4's 16 levels by code, ascending.

    Returns
    -------
    Tensor
        float32 ``[16]`` from -1 to 1 with an exact 0 at code 7, equal to bitsandbytes' bit for bit. Shared: do not write to it.

    Notes
    -----
    Quantiles of the normal distribution, divided by the largest: a code is used about as often as any other when weights are
    normal. Eight steps of probability lie above zero and seven below, so that zero itself is a level. QLoRA (arXiv:2305.14314,
    section 3); derived in chapter 03.
    """

    def half(steps: int) -> list[float]:
        # bitsandbytes spaces the probabilities in float32, and the last bits of the levels depend on it.
        return [NormalDist().inv_cdf(p) for p in torch.linspace(_NF4_TAIL, 0.5, steps + 1)[:-1].tolist()]

    levels = torch.tensor(sorted([-x for x in half(7)] + [0.0] + half(8)), dtype=torch.float32)
    return levels / levels.max()


@cache
def fp4_levels() -> torch.Tensor:
    """Return FP4's 16 levels by code: sign, two bits of exponent, one of mantissa.

    Returns
    -------
    Tensor
        float32 ``[16]`` from -1 to 1, not ascending; codes 0 and 8 are both 0. Equal to bitsandbytes' bit for bit. Shared: do
        not write to it.

    Notes
    -----
    bitsandbytes counts exponents downwards: 1, 2, 3 mean 8, 4, 2, and a mantissa bit adds a half. Exponent 0 has no leading
    one, and its only value is 2**-4, far below the rest: FP4 has a level next to zero where another step would have been due.
    """
    magnitudes = [
        (1 + mantissa / 2) * 2.0 ** (4 - exponent) if exponent else mantissa / 2 * 2.0**-3
        for exponent in range(4)
        for mantissa in range(2)
    ]
    levels = torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in magnitudes], dtype=torch.float32)
    return levels / levels.max()


@cache
def dynamic_levels() -> torch.Tensor:
    """Return the 256 levels of bitsandbytes' dynamic 8-bit type, which holds the scales in double quantisation.

    Returns
    -------
    Tensor
        float32 ``[256]``, ascending from -0.993 to 1 with an exact 0 at code 127. Shared: do not write to it.

    Notes
    -----
    Seven decades, 10**-7 to 1, each with twice as many levels as the one below: the bits that a smaller exponent leaves free
    refine the fraction. Dettmers, arXiv:1511.04561.
    """
    magnitudes = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        magnitudes.append(10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2))
    positive = torch.cat(magnitudes)
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0])]).sort().values
