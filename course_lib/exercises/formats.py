"""Exercises of chapter 03: inputs to test with, right answers, and the answers that common mistakes lead to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import NormalDist

import torch
from torch.nn import functional

#: How far drawn numbers stay from the middle between two codes, in steps: right solutions that divide and right ones that
#: multiply by the reciprocal then round alike.
CLEAR = 0.35


def _generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


def _near_codes(codes: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return numbers beside whole codes, moved by less than `CLEAR`, except zeros and codes of the largest size."""
    moved = codes + CLEAR * (2 * torch.rand(codes.shape, generator=draw, dtype=torch.float64) - 1)
    fixed = (codes.abs() == codes.abs().amax(-1, keepdim=True)) | (codes == 0)
    return torch.where(fixed, codes.double(), moved)


def random_blocks(rng: Random) -> tuple[torch.Tensor, int, int]:
    """Draw numbers whose last block is short and one of whose blocks is zero, a block size, and bits."""
    draw = _generator(rng)
    block_size, bits = rng.choice([4, 5, 6, 8]), rng.choice([3, 4, 8])
    blocks, last = rng.randint(4, 6), rng.randint(2, block_size - 1)
    top = 2 ** (bits - 1) - 1
    codes = torch.randint(1 - top, top, (blocks, block_size), generator=draw)
    # The largest number of a block is positive here and negative there, and stands among the first two.
    codes[torch.arange(blocks), torch.randint(2, (blocks,), generator=draw)] = torch.tensor(
        [top * (-1) ** block for block in range(blocks)]
    )
    numbers = _near_codes(codes, draw) * (0.2 + torch.rand(blocks, 1, generator=draw, dtype=torch.float64)) / top
    numbers[1] = 0
    return numbers.flatten()[: (blocks - 1) * block_size + last].float(), block_size, bits


def restored(
    x: torch.Tensor, block_size: int, bits: int, *, top: int | None = None, signed: bool = False
) -> torch.Tensor:
    """Return what absmax quantisation in blocks leaves of a vector; the faults: another `top` code, a `signed` maximum."""
    blocks = functional.pad(x.double(), (0, -len(x) % block_size)).view(-1, block_size)
    top = top or 2 ** (bits - 1) - 1
    largest = blocks.amax(1, keepdim=True) if signed else blocks.abs().amax(1, keepdim=True)
    step = (largest / top).where(largest != 0, 1)
    return ((blocks / step).round().clamp(-top, top) * step).flatten()[: len(x)].float()


def block_mistakes(x: torch.Tensor, block_size: int, bits: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about absmax quantisation in blocks lead to."""
    whole = len(x) // block_size * block_size
    right = restored(x, block_size, bits)
    step = _steps(x, block_size, bits)
    # A quotient that is a whole number may come out just below it.
    truncated = ((x.double() / step * (1 + 1e-6)).trunc() * step).nan_to_num(0.0).float()
    with_nan = right.clone()
    with_nan[step.isnan()] = torch.nan
    blocks = functional.pad(x.double(), (0, -len(x) % block_size)).view(-1, block_size)
    low = blocks.amin(1, keepdim=True)
    spread = ((blocks.amax(1, keepdim=True) - low) / (2**bits - 1)).clamp(min=1e-30)
    shifted = (((blocks - low) / spread).round() * spread + low).flatten()[: len(x)].float()
    return {
        "One scale is used for the whole vector; each block has its own.": restored(x, len(x), bits),
        "The largest code is one less than half the number of codes: for 8 bits 127, not 128.": restored(
            x, block_size, bits, top=2 ** (bits - 1)
        ),
        "The largest code is that of numbers without a sign: half of them are for negative numbers.": restored(
            x, block_size, bits, top=2**bits - 1
        ),
        "The largest value is taken, not the largest magnitude: a block's largest may be negative.": restored(
            x, block_size, bits, signed=True
        ),
        "Codes are cut off, not rounded to the nearest.": truncated,
        "A block of zeros gives NaN: its scale is zero, and nothing may be divided by it.": with_nan,
        "The last block is lost: it is shorter than the others.": right[:whole],
        "The numbers that fill up the last block are returned as well.": functional.pad(
            right, (0, -len(x) % block_size)
        ),
        "These are codes; multiply them by the scale.": (right.double() / step).nan_to_num(0.0).round().float(),
        "This grid reaches from the least to the largest value; a symmetric one is asked for.": shifted,
    }


def _steps(x: torch.Tensor, block_size: int, bits: int) -> torch.Tensor:
    """Return the step of each number, NaN in blocks of zeros."""
    blocks = functional.pad(x.double(), (0, -len(x) % block_size)).view(-1, block_size)
    step = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    each: torch.Tensor = step.where(step > 0, torch.nan).expand_as(blocks).flatten()[: len(x)]
    return each


def random_bytes(rng: Random) -> tuple[torch.Tensor, int]:
    """Draw packed rows of 4-bit codes, uint8 ``[rows, bytes]``, and an odd number of columns."""
    size = rng.randint(3, 6)
    packed = torch.randint(256, (rng.randint(2, 3), size), generator=_generator(rng), dtype=torch.uint8)
    packed[0, 0], packed[-1, 1] = 0x9A, 0x7C  # both signs, and halves that differ
    packed[:, -1] &= 0xF0  # the last byte of a row holds one code
    return packed, 2 * size - 1


def unpacked(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the signed codes of packed rows, int64 ``[rows, columns]``."""
    whole = packed.long()
    return _signed(torch.stack([whole >> 4, whole & 15], -1)).flatten(-2)[:, :columns]


def _signed(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes > 7, codes - 16, codes)


def unpack_mistakes(packed: torch.Tensor, columns: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about 4-bit codes lead to."""
    whole = packed.long()
    high, low = whole >> 4, whole & 15
    pairs = torch.stack([high, low], -1)
    one_by_one = _signed(pairs).flatten()
    return {
        "The low half of a byte is taken first; the first code is in the high half.": _signed(
            torch.stack([low, high], -1)
        ).flatten(-2)[:, :columns],
        "The signs are missing: codes above seven stand for negative numbers.": pairs.flatten(-2)[:, :columns],
        "The codes are moved by eight; these have a sign instead, in two's complement.": (pairs - 8).flatten(-2)[
            :, :columns
        ],
        "The first bit is taken for a sign and the rest for a magnitude; these are in two's complement.": torch.where(
            pairs > 7, 8 - pairs, pairs
        ).flatten(-2)[:, :columns],
        "The code that fills up a row is returned as well.": _signed(pairs).flatten(-2),
        "All high halves come first, then all low ones: the two of a byte are neighbours.": _signed(
            torch.cat([high, low], -1)
        )[:, :columns],
        "The rows are read as one: each row begins with a byte of its own.": one_by_one[: len(packed) * columns].view(
            -1, columns
        ),
        "The high half keeps its place in the byte: shift it down.": torch.stack(
            [whole & 240, _signed(low)], -1
        ).flatten(-2)[:, :columns],
    }


def random_activations(rng: Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Draw inputs ``[tokens, columns]`` with outlier columns, weight codes int8 ``[outputs, columns]``, their steps, a threshold."""
    draw = _generator(rng)
    tokens, columns, outputs = rng.randint(4, 6), rng.randint(8, 12), rng.randint(3, 5)
    codes = torch.randint(-100, 101, (tokens, columns), generator=draw)
    outliers = rng.sample(range(columns), 3)
    kept = [column for column in range(columns) if column not in outliers]
    codes[torch.arange(tokens), torch.tensor([kept[token % 3] for token in range(tokens)])] = 127
    inputs = _near_codes(codes, draw) * (0.5 + torch.rand(tokens, 1, generator=draw, dtype=torch.float64)) / 127
    threshold = rng.choice([3.0, 4.0, 6.0])
    # One outlier column is negative, one has a single large value, one has just the threshold.
    inputs[:, outliers[0]] = -threshold * (1.2 + torch.rand(tokens, generator=draw, dtype=torch.float64))
    inputs[rng.randrange(tokens), outliers[1]] = 3 * threshold
    inputs[rng.randrange(tokens), outliers[2]] = threshold
    weight = torch.randint(-127, 128, (outputs, columns), generator=draw, dtype=torch.int8)
    # Small steps make small products: where these cancel, a right solution in float32 is still within the comparison's 1e-6.
    steps = 1e-4 + 2e-4 * torch.rand(outputs, generator=draw)
    return inputs.float(), weight, steps, threshold


def mixed_product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    steps: torch.Tensor,
    threshold: float,
    *,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return LLM.int8()'s product, ``[tokens, outputs]``; the fault: other outlier `columns`, as a mask."""
    x, w = inputs.double(), weight.double() * steps.double()[:, None]
    large = (inputs.abs() >= threshold).any(0) if columns is None else columns
    regular = x.masked_fill(large, 0)
    return (_rounded(regular) @ w.T + x.masked_fill(~large, 0) @ w.T).float()


def _rounded(x: torch.Tensor, dim: int | None = 1) -> torch.Tensor:
    """Return x rounded to int8 with a scale for each row, each column (``dim=0``) or all."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    step = (largest / 127).where(largest > 0, torch.ones_like(largest))
    return (x / step).round() * step


def product_mistakes(
    inputs: torch.Tensor, weight: torch.Tensor, steps: torch.Tensor, threshold: float
) -> dict[str, torch.Tensor]:
    """Return what mistakes about outlier columns lead to."""
    x, w = inputs.double(), weight.double() * steps.double()[:, None]
    right = mixed_product(inputs, weight, steps, threshold)
    large = (inputs.abs() >= threshold).any(0)
    regular, outliers = x.masked_fill(large, 0), x.masked_fill(~large, 0)
    values = inputs.abs() >= threshold
    return {
        "No column is kept apart: the outliers take part in the scale of each row.": mixed_product(
            inputs, weight, steps, math.inf
        ),
        "The outlier columns are left out of the product; add theirs, in floating point.": (
            _rounded(regular) @ w.T
        ).float(),
        "The columns are found by value; large negative numbers are outliers too.": mixed_product(
            inputs, weight, steps, threshold, columns=(inputs >= threshold).any(0)
        ),
        "A magnitude of just the threshold is an outlier.": mixed_product(
            inputs, weight, steps, threshold, columns=(inputs.abs() > threshold).any(0)
        ),
        "A column is an outlier if any of its values is large, not only if all are.": mixed_product(
            inputs, weight, steps, threshold, columns=values.all(0)
        ),
        "Single values are kept apart; the whole column is.": (
            _rounded(x.masked_fill(values, 0)) @ w.T + x.masked_fill(~values, 0) @ w.T
        ).float(),
        "The scale of a row still counts its outliers: take it from the other columns.": (
            (x / (x.abs().amax(1, keepdim=True) / 127)).round().masked_fill(large, 0)
            * (x.abs().amax(1, keepdim=True) / 127)
            @ w.T
            + outliers @ w.T
        ).float(),
        "All rows share a scale; each row has its own.": (_rounded(regular, None) @ w.T + outliers @ w.T).float(),
        "Each column has a scale; each row has its own.": (_rounded(regular, 0) @ w.T + outliers @ w.T).float(),
        "Nothing is rounded: the other columns are multiplied as int8.": (x @ w.T).float(),
        "The outlier columns are rounded too, if apart; multiply them as they are.": (
            _rounded(regular) @ w.T + _rounded(outliers) @ w.T
        ).float(),
        "The steps of the weight are missing.": (right.double() / steps.double()).float(),
    }


def random_format(rng: Random) -> tuple[int, float]:
    """Draw the bits of a format, and the probability at which its distribution ends."""
    return rng.randint(2, 6), rng.uniform(0.93, 0.995)


def normal_levels(bits: int, tail: float) -> torch.Tensor:
    """Return a NormalFloat's levels, float32 ``[2**bits]``, ascending."""
    return _levels(2 ** (bits - 1), 2 ** (bits - 1) - 1, tail)


def _half(steps: int, tail: float, middle: bool = False) -> list[float]:
    """Return the quantiles of `steps` even steps of probability above one half, the largest first."""
    width = (tail - 0.5) / steps
    return [NormalDist().inv_cdf(tail - (step + 0.5 * middle) * width) for step in range(steps)]


def _levels(above: int, below: int, tail: float, *, divide: bool = True) -> torch.Tensor:
    levels = sorted([-x for x in _half(below, tail)] + [0.0] + _half(above, tail))
    largest = max(levels) if divide else 1.0
    return torch.tensor([level / largest for level in levels])


def level_mistakes(bits: int, tail: float) -> dict[str, torch.Tensor]:
    """Return what mistakes about a NormalFloat's levels lead to."""
    half = 2 ** (bits - 1)
    even = [NormalDist().inv_cdf(1 - tail + (2 * tail - 1) * i / (2 * half - 1)) for i in range(2 * half)]
    centres = sorted([-x for x in _half(half - 1, tail, True)] + [0.0] + _half(half, tail, True))
    return {
        "The levels are not divided by the largest.": _levels(half, half - 1, tail, divide=False),
        "The longer half is below zero; it belongs above.": _levels(half - 1, half, tail),
        "The probabilities are evenly spaced from end to end: zero is not among the levels.": torch.tensor(
            [level / max(even) for level in even]
        ),
        "The levels are evenly spaced: the probabilities are to be, not the levels.": torch.cat(
            [torch.linspace(-1, 0, half)[:-1], torch.linspace(0, 1, half + 1)]
        ),
        "Both halves have the same steps of probability: the shorter one needs wider steps, to reach the same end.": (
            _same_steps(half, tail)
        ),
        "Quantiles are taken from the middles of the steps; take them at their ends.": torch.tensor(
            [level / max(centres) for level in centres]
        ),
        "The negative levels come first: sort them.": torch.cat(
            [normal_levels(bits, tail)[half - 1 :], normal_levels(bits, tail)[: half - 1]]
        ),
        "There are two zeros, one from each half.": _levels(half - 1, half - 1, tail)[
            torch.tensor([*range(half), *range(half - 1, 2 * half - 1)])
        ],
    }


def _same_steps(half: int, tail: float) -> torch.Tensor:
    above = _half(half, tail)
    levels = sorted([-x for x in above[1:]] + [0.0] + above)
    return torch.tensor([level / max(levels) for level in levels])


#: A scheme: bits of a code, block size, bits of a scale, and the error that was measured.
Scheme = tuple[int, int, int, float]


def random_budget(rng: Random) -> tuple[list[tuple[int, int]], list[Scheme], int]:
    """Draw shapes of matrices whose columns are no whole number of blocks, schemes, and a budget that one of them just meets."""
    shapes = [(rng.randint(20, 90), rng.randint(40, 160) * 2 + 1) for _ in range(rng.randint(2, 4))]
    schemes: list[Scheme] = []
    for bits in rng.sample([2, 3, 4, 5, 6, 8], 4):
        block_size = rng.choice([16, 32, 64, 128])
        # The last digits keep two errors from being equal.
        error = round(2.0**-bits * rng.uniform(0.5, 1.6), 4) + len(schemes) * 1e-6
        schemes.append((bits, block_size, rng.choice([8, 16, 32]), error))
    sizes = [scheme_bytes(shapes, scheme) for scheme in schemes]
    if rng.random() < 0.15:
        return shapes, schemes, min(sizes) - 1
    return shapes, schemes, rng.choice(sizes) - rng.choice([0, 0, 1])


def scheme_bytes(shapes: Sequence[tuple[int, int]], scheme: Scheme, *, fault: str = "") -> int:
    """Return the bytes of matrices in a scheme; `fault` names a mistake: "floor", "flat", "gapless", "no scales" or "bits"."""
    bits, block_size, scale_bits, _ = scheme
    total = 0
    for rows, columns in shapes:
        blocks = rows * (columns // block_size if fault == "floor" else -(-columns // block_size))
        if fault == "flat":
            blocks = -(-rows * columns // block_size)
        code_bits = rows * (columns * bits if fault == "flat" else -(-columns * bits // 8) * 8)
        if fault == "gapless":
            code_bits = rows * columns * bits
        code_bytes = -(-code_bits // 8)
        scale_bytes = 0 if fault == "no scales" else blocks * scale_bits // (1 if fault == "bits" else 8)
        total += code_bytes + scale_bytes
    return total


def chosen(shapes: Sequence[tuple[int, int]], schemes: Sequence[Scheme], budget: int, *, fault: str = "") -> int:
    """Return the number of the scheme with the least error among those that fit, -1 if none does."""
    fitting = [i for i, scheme in enumerate(schemes) if scheme_bytes(shapes, scheme, fault=fault) <= budget]
    return min(fitting, key=lambda i: schemes[i][3], default=-1)


def choice_mistakes(shapes: Sequence[tuple[int, int]], schemes: Sequence[Scheme], budget: int) -> dict[str, int]:
    """Return what mistakes about a choice under a budget lead to."""
    sizes = [scheme_bytes(shapes, scheme) for scheme in schemes]
    fitting = [i for i, size in enumerate(sizes) if size <= budget]
    below = [i for i, size in enumerate(sizes) if size < budget]
    return {
        "The scales are forgotten.": chosen(shapes, schemes, budget, fault="no scales"),
        "A short last block has a scale too: round the number of blocks up.": chosen(
            shapes, schemes, budget, fault="floor"
        ),
        "Blocks end with each row; here they run on over the whole matrix.": chosen(
            shapes, schemes, budget, fault="flat"
        ),
        "Each row begins with a byte of its own: round the bytes of a row's codes up.": chosen(
            shapes, schemes, budget, fault="gapless"
        ),
        "The bits of the scales are taken for bytes.": chosen(shapes, schemes, budget, fault="bits"),
        "A scheme of just the budget fits.": min(below, key=lambda i: schemes[i][3], default=-1),
        "The scheme with most bits is taken; wanted is the least error.": max(
            fitting, key=lambda i: schemes[i][0], default=-1
        ),
        "The smallest scheme is taken; wanted is the least error among those that fit.": (
            min(fitting, key=sizes.__getitem__, default=-1)
        ),
        "The largest scheme that fits is taken; wanted is the least error.": max(
            fitting, key=sizes.__getitem__, default=-1
        ),
        "The budget is not looked at.": min(range(len(schemes)), key=lambda i: schemes[i][3]),
        "The largest error is taken, not the least.": max(fitting, key=lambda i: schemes[i][3], default=-1),
        "If nothing fits, return -1, not the smallest.": (
            chosen(shapes, schemes, budget) if fitting else min(range(len(schemes)), key=sizes.__getitem__)
        ),
        "Python counts from zero.": chosen(shapes, schemes, budget) + 1,
    }
