"""Exercises of chapter 06: inputs to test with, right answers, and the answers that common mistakes lead to."""

from __future__ import annotations

import math
from random import Random

import torch

from course_lib.kernels.rope_arguments import Layout
from course_lib.positions import alibi_slopes, apply_rope

# Small numbers: an angle in float32 may be off by 1e-5 in a right solution, and the comparison allows 1e-6.
SMALL = 0.01


def random_rotation(rng: Random, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, float, Layout]:
    """Draw small x ``[heads, length, head_dim]`` and positions, not in order and none of them 0, with a base."""
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    heads, length, head_dim = rng.randint(2, 3), rng.randint(4, 6), rng.choice([8, 12, 16])
    x = SMALL * torch.randn(heads, length, head_dim, generator=draw)
    return x, torch.tensor(rng.sample(range(7, 60), length)), rng.choice([100.0, 500.0, 2000.0]), layout


def rotated(
    x: torch.Tensor, positions: torch.Tensor, base: float, layout: Layout, *, step: float = 2.0
) -> torch.Tensor:
    """Return the rotated tensor, in the shape of `x`; pair i turns by ``base ** (-step * i / head_dim)`` for each position."""
    exponents = step * torch.arange(x.shape[-1] // 2, dtype=torch.float64) / x.shape[-1]
    angles = positions[:, None].double() * base**-exponents
    return apply_rope(x.double(), angles.cos(), angles.sin(), layout).float()


def rotation_mistakes(x: torch.Tensor, positions: torch.Tensor, base: float, layout: Layout) -> dict[str, torch.Tensor]:
    """Return what mistakes about a rotation lead to."""
    other: Layout = "half" if layout == "interleaved" else "interleaved"
    right = rotated(x, positions, base, layout)
    ends = (-1, 2) if layout == "interleaved" else (2, x.shape[-1] // 2)
    moved = right.reshape(*x.shape[:-1], *ends).mT
    return {
        "These are the pairs of the other layout.": rotated(x, positions, base, other),
        "The rotation goes the wrong way round: the sines have the other sign.": rotated(x, -positions, base, layout),
        "The exponent is -2 * i / head_dim, where i counts pairs; the 2 is missing.": rotated(
            x, positions, base, layout, step=1.0
        ),
        "The exponent is -2 * i / head_dim, where i counts pairs; here it counts coordinates.": rotated(
            x, positions, base, layout, step=4.0
        ),
        "Every pair turns as fast as the first: the angle must fall from pair to pair.": rotated(
            x, positions, base, layout, step=0.0
        ),
        "The positions are ignored: row j stands at positions[j], not at j.": rotated(
            x, torch.arange(len(positions)), base, layout
        ),
        "Positions count from 0: here each is one too many.": rotated(x, positions + 1, base, layout),
        "Rotated, but the coordinates are not in their old places: in this layout the ends of a pair stand elsewhere.": moved.flatten(
            -2
        ),
        "Nothing is rotated.": x,
    }


def random_heads(rng: Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Draw small q and k ``[batch, length, heads, head_dim]``, ascending positions that do not start at 0, and a base."""
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    batch, length, heads = rng.randint(1, 2), rng.randint(5, 7), rng.randint(3, 4)
    q, k = math.sqrt(SMALL) * torch.randn(2, batch, length, heads, rng.choice([8, 12, 16]), generator=draw)
    first = rng.randint(3, 40)
    return q, k, torch.arange(first, first + length), rng.choice([50.0, 100.0, 500.0])


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    base: float,
    *,
    step: float = 2.0,
    mixed: bool = False,
    backwards: bool = False,
    layout: Layout = "interleaved",
) -> torch.Tensor:
    """Return the scores of rotated queries and keys, ``[batch, heads, length, length]``, right or with faults.

    The faults: frequencies with another `step`, `mixed` tokens and heads, keys that turn `backwards`, pairs of another `layout`.
    """
    batch, length, heads, head_dim = q.shape
    split = [x.reshape(batch, heads, length, head_dim) if mixed else x.transpose(1, 2) for x in (q, k)]
    places = (positions, -positions if backwards else positions)
    rotated_q, rotated_k = (rotated(x, p, base, layout, step=step) for x, p in zip(split, places, strict=True))
    return rotated_q @ rotated_k.mT / math.sqrt(head_dim)


def score_mistakes(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, base: float) -> dict[str, torch.Tensor]:
    """Return what the faults of the scores, alone and together, lead to."""
    inputs = (q, k, positions, base)
    right = scores(*inputs)
    root = math.sqrt(q.shape[-1])
    unturned = scores(q, k, torch.zeros_like(positions), base)
    by_token = [rotated(x.transpose(1, 2), positions, base, "interleaved").transpose(1, 2) for x in (q, k)]
    return {
        "This is the function as you found it: there are three faults in it.": scores(
            *inputs, step=1.0, mixed=True, backwards=True
        ),
        "Frequencies: the exponent lacks its 2.": scores(*inputs, step=1.0),
        "Axes: reshape mixes tokens with heads; transpose swaps the axes.": scores(*inputs, mixed=True),
        "Direction: queries and keys must turn the same way, or scores depend on the sum of their positions.": scores(
            *inputs, backwards=True
        ),
        "Frequencies and axes: the exponent lacks its 2, and reshape mixes tokens with heads.": scores(
            *inputs, step=1.0, mixed=True
        ),
        "Frequencies and direction: the exponent lacks its 2, and the keys turn against the queries.": scores(
            *inputs, step=1.0, backwards=True
        ),
        "Axes and direction: reshape mixes tokens with heads, and the keys turn against the queries.": scores(
            *inputs, mixed=True, backwards=True
        ),
        "The scores are not divided by the square root of head_dim.": right * root,
        "The scores are divided by head_dim; its square root is needed.": right / root,
        "These are the pairs of the other layout: here neighbours make a pair.": scores(*inputs, layout="half"),
        "Nothing is rotated: the scores know no positions.": unturned,
        "Queries and keys have changed places: queries stand in the rows.": right.mT,
        "This compares the heads of one token with each other: put the heads in front of the tokens first.": (
            by_token[0] @ by_token[1].mT / root
        ),
        "The positions are counted from 0 for the queries, or for the keys, and taken as given for the other.": (
            _from_zero(*inputs)
        ),
    }


def _from_zero(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Return the scores of queries at their positions and keys that are counted from 0."""
    places = (positions, torch.arange(len(positions)))
    turned = [rotated(x.transpose(1, 2), p, base, "interleaved") for x, p in zip((q, k), places, strict=True)]
    return turned[0] @ turned[1].mT / math.sqrt(q.shape[-1])


def right_slopes(num_heads: int) -> torch.Tensor:
    """Return the slopes of any number of heads, ``[num_heads]``."""
    return alibi_slopes(num_heads)


def slope_mistakes(num_heads: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about slopes lead to."""
    below = 1 << (num_heads.bit_length() - 1)
    above = below if below == num_heads else 2 * below
    missing = num_heads - below
    right = alibi_slopes(num_heads)

    def sequence(length: int, first: int = 1) -> torch.Tensor:
        return 2.0 ** (-8 * torch.arange(first, first + length, dtype=torch.float64) / length).float()

    doubled = sequence(2 * below)
    return {
        "The formula of powers of two is used for every number.": sequence(num_heads),
        "These are the first slopes of the power of two above; the first are those of the power of two below.": sequence(
            above
        )[:num_heads],
        "The missing slopes are the second, fourth, sixth; those are there already. Take the first, third, fifth.": torch.cat(
            [sequence(below), doubled[1::2][:missing]]
        ),
        "The missing slopes are taken one after the other; take every other one.": torch.cat(
            [sequence(below), doubled[:missing]]
        ),
        "The slopes are sorted: those of the power of two come first, then the missing ones.": right.sort(
            descending=True
        ).values,
        "The missing slopes come last, not first.": torch.cat([doubled[0::2][:missing], sequence(below)]),
        "The first slope is 2 ** (-8 / n), not 1.": torch.cat([sequence(below, 0), doubled[0::2][:missing]]),
        "Slopes are positive: a score is lowered by slope times distance.": -right,
    }


def right_shift(dim: int, steps: int) -> torch.Tensor:
    """Return the matrix that moves a sinusoidal encoding by `steps` positions, ``[dim, dim]``."""
    return _shift(dim, steps)


def _shift(dim: int, steps: int, *, step: float = 2.0, cosines: bool = True) -> torch.Tensor:
    """Return blocks of two by two on the diagonal, pair i turned by ``10000 ** (-step * i / dim)`` for each position."""
    angles = steps * 10000.0 ** (-step * torch.arange(dim // 2, dtype=torch.float64) / dim)
    even, odd = torch.arange(0, dim, 2), torch.arange(1, dim, 2)
    matrix = torch.eye(dim, dtype=torch.float64)
    if cosines:
        matrix[even, even] = matrix[odd, odd] = angles.cos()
    matrix[even, odd], matrix[odd, even] = angles.sin(), -angles.sin()
    return matrix.float()


def shift_mistakes(dim: int, steps: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about the matrix lead to."""
    right = _shift(dim, steps)
    halves = torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2))).argsort()
    order = halves.argsort()
    return {
        "This moves the other way: the sines have the other sign, or the matrix is transposed.": right.T,
        "The exponent is -2 * i / dim, where i counts pairs; the 2 is missing.": _shift(dim, steps, step=1.0),
        "The exponent is -2 * i / dim, where i counts pairs; here it counts columns.": _shift(dim, steps, step=4.0),
        "Sine and cosine of a pair are neighbours here; this is the matrix for all sines first, then all cosines.": right[
            order
        ][:, order],
        "A matrix of one step: it must go all the steps.": _shift(dim, 1),
        "The diagonal is 1: a long shift needs the cosines.": _shift(dim, steps, cosines=False),
        "This is the identity: it moves nothing.": torch.eye(dim),
        "Both sines have the same sign: one of the two must be negative.": right.triu() + right.triu(1).T,
        "Sines and cosines have changed places: no step would leave everything in place.": (
            right.reshape(-1, 2, dim).flip(1).reshape(dim, dim)
        ),
    }


def random_rotary_model(rng: Random) -> tuple[int, float, float, int]:
    """Draw head_dim, base, the part that rotates, and a length at which often one more token would complete a turn."""
    head_dim, part = rng.choice([32, 64, 96, 128]), rng.choice([0.25, 0.5, 1.0])
    base = float(rng.randint(8, 900) * 1000)
    rotary_dim = int(head_dim * part)
    pair = rng.randint(1, rotary_dim // 2 - 1)
    turn = 2 * math.pi * base ** (2 * pair / rotary_dim)  # tokens, at no whole number
    return head_dim, base, part, math.ceil(turn) if rng.random() < 0.5 else rng.randint(200, 40_000)


def unseen(head_dim: int, base: float, rotary_part: float, length: int) -> int:
    """Return how many rotary pairs turned by less than a full turn at the largest distance."""
    return _below(int(head_dim * rotary_part), base, length - 1)


def _below(rotary_dim: int, base: float, distance: float, *, exponent_dim: float | None = None) -> int:
    width = exponent_dim or rotary_dim
    return sum(distance * base ** (-2 * pair / width) < 2 * math.pi for pair in range(rotary_dim // 2))


def unseen_mistakes(head_dim: int, base: float, rotary_part: float, length: int) -> dict[str, float]:
    """Return what mistakes about pairs without a full turn lead to."""
    rotary_dim = int(head_dim * rotary_part)
    right = unseen(head_dim, base, rotary_part, length)
    return {
        "The largest distance is one less than the length.": _below(rotary_dim, base, length),
        "These are the pairs that did complete a turn.": rotary_dim // 2 - right,
        "Coordinates are counted; two of them make a pair.": 2 * right,
        "The whole head is taken to rotate: only a part of it does.": _below(head_dim, base, length - 1),
        "The exponent has head_dim below; the pairs share rotary_dim.": _below(
            rotary_dim, base, length - 1, exponent_dim=head_dim
        ),
        "The exponent is -2 * i / rotary_dim; the 2 is missing.": _below(
            rotary_dim, base, length - 1, exponent_dim=2 * rotary_dim
        ),
        "A full turn is 2 pi; this is half of one.": _below(rotary_dim, base, 2 * (length - 1)),
        "A full turn is 2 pi radians; this compares with 1.": _below(rotary_dim, base, 2 * math.pi * (length - 1)),
        "Coordinates that do not rotate are counted: they have no position and no angle.": right
        + (head_dim - rotary_dim) // 2,
    }
