"""Exercises of chapter 04: inputs to test with, right answers, and the answers that common mistakes lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import torch

from course_lib.memory.counting import Model

Matrix = tuple[int, int, int]
SCHEMES = ("int8", "nf4", "nf4-double")
#: Bits that a layer may have, in the exercise on mixed widths.
WIDTHS = (2, 3, 4, 8)
#: How far numbers stay from the middle between two codes, in steps, whatever the rounding of a right solution.
CLEAR = 0.02


def _generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


# ---- Bytes of a model ----


def octocoder() -> tuple[list[Matrix], int]:
    """Return OctoCoder's linear matrices as (rows, columns, how many), and the number of its other parameters."""
    model = Model("octocoder")
    linear = [
        (weight.rows, weight.columns, count) for weight, count in model.weights.items() if weight.kind == "linear"
    ]
    return sorted(linear), model.parameters - sum(rows * columns * count for rows, columns, count in linear)


def random_model(rng: Random) -> tuple[list[Matrix], int, str]:
    """Draw matrices of odd sizes, a number of other parameters and a scheme."""
    matrices = [
        (2 * rng.randint(100, 400) + 1, 2 * rng.randint(50, 200) + 1, rng.randint(2, 9))
        for _ in range(rng.randint(1, 3))
    ]
    return matrices, rng.randint(10_000, 90_000), rng.choice(SCHEMES)


def stored_bytes(
    matrices: Sequence[Matrix],
    rest: int,
    scheme: str,
    *,
    up: Callable[[int, int], int] = lambda count, size: -(-count // size),
    rest_bytes: int = 2,
    row_scale: int = 4,
    block_scale: int = 4,
    double: tuple[int, int] = (4, 4),
) -> int:
    """Return the bytes of a quantised model; the faults: how counts are divided, and the bytes of rest and scales.

    `double` are the bytes that double quantisation adds: for each 256 scales, and for each matrix.
    """
    total = rest_bytes * rest
    for rows, columns, count in matrices:
        size = rows * columns
        if scheme == "int8":
            total += count * (size + row_scale * rows)
            continue
        blocks = up(size, 64)
        scales = block_scale * blocks if scheme == "nf4" else blocks + double[0] * up(blocks, 256) + double[1]
        total += count * (up(size, 2) + scales)
    return total


def bytes_mistakes(matrices: Sequence[Matrix], rest: int, scheme: str) -> dict[str, float]:
    """Return what mistakes about the bytes of a quantised model lead to."""

    def counted(matrices: Sequence[Matrix] = matrices, rest: int = rest, scheme: str = scheme, **faults: object) -> int:
        return stored_bytes(matrices, rest, scheme, **faults)  # type: ignore[arg-type]

    weights = sum(rows * columns * count for rows, columns, count in matrices)
    return {
        "One matrix of each shape is counted; there are `count` of them.": counted([(r, c, 1) for r, c, _ in matrices]),
        "The scales are missing.": counted(row_scale=0, block_scale=0, double=(0, 0))
        - (scheme == "nf4-double") * sum(count * -(-r * c // 64) for r, c, count in matrices),
        "A scale for each column: in int8 it is one for each row.": counted(
            [(r, c, n) if scheme != "int8" else (c, r, n) for r, c, n in matrices]
        ),
        "One scale for each matrix: in int8 it is one for each row.": counted(row_scale=0)
        + (scheme == "int8") * 4 * sum(n for _, _, n in matrices),
        "Last blocks are lost: a short one needs a scale like any other, so round up.": counted(
            up=lambda count, size: count // size if size > 2 else -(-count // size)
        ),
        "The last code of a matrix is lost: half a byte cannot be stored, so round up.": counted(
            up=lambda count, size: count // size if size == 2 else -(-count // size)
        ),
        "Nothing is rounded up: bytes, blocks and scales come whole.": counted(up=lambda count, size: count / size),
        "Each code takes a byte here; in four bits two share one.": counted(
            up=lambda count, size: count if size == 2 else -(-count // size)
        ),
        "The scales of double quantisation still take four bytes here; they are codes of one byte.": counted()
        + (scheme == "nf4-double") * 3 * sum(n * -(-r * c // 64) for r, c, n in matrices),
        "The scales of the scales are missing: one float32 for each 256.": counted(double=(0, 4)),
        "The mean that was taken off the scales is missing: one float32 for each matrix.": counted(double=(4, 0)),
        "Double quantisation is ignored.": counted(scheme=scheme.removesuffix("-double")),
        "The other parameters are quantised too; they keep their 16 bits.": counted(rest_bytes=1)
        - (scheme != "int8") * (rest // 2),
        "The other parameters are missing.": counted(rest=0),
        "The other parameters are counted in float32; they have 16 bits.": counted(rest_bytes=4),
        "This is the size in 16 bits: nothing is quantised.": 2 * (weights + rest),
    }


# ---- Where dequantising stops paying ----


def random_processor(rng: Random) -> tuple[int, int, int, int]:
    """Draw operations and bytes a second, bits of a weight and operations to unpack one.

    Operations a byte are whole and those of unpacking odd, so that the two times are never equal.
    """
    bandwidth = rng.randint(20, 4000) * 10**9
    bits, unpack = rng.choice([2, 3, 4, 8]), rng.choice([3, 5, 7, 9, 11])
    balance = rng.choice([rng.randint(1, 4), rng.randint(8, 300)])
    return bandwidth * balance, bandwidth, bits, unpack


def break_even(flops: int, bandwidth: int, bits: int, unpack: int) -> int:
    """Return the least number of rows at which quantised weights are slower, by their formula; `bits` do not matter."""
    return max(1, -(-(2 * flops - unpack * bandwidth) // (2 * bandwidth)))


def break_even_mistakes(flops: int, bandwidth: int, bits: int, unpack: int) -> dict[str, float]:
    """Return what mistakes about the break-even lead to."""
    balance, right = flops // bandwidth, break_even(flops, bandwidth, bits, unpack)
    return {
        "Unpacking is free here; it takes operations, too.": balance,
        "This is where the quantised product stops being bound by memory; it is ahead for longer.": max(
            1, -(-(bits * balance - 8 * unpack) // 16)
        ),
        "One row too few: there the quantised product still is faster.": right - 1,
        "One row too many.": right + 1,
        "A weight takes two operations for each row: multiply and add.": max(1, 2 * balance - unpack),
        "Unpacking is paid once for a weight, not once for each row.": max(1, -(-2 * balance // (2 + unpack))),
        "Weights of 16 bits are two bytes; one is counted.": max(1, -(-(balance - unpack) // 2)),
        "The bits of a weight are counted as bytes.": max(1, -(-(16 * balance - unpack) // 2)),
        "There is no product without a row: the least is one.": -(-(2 * balance - unpack) // 2),
        "Unpacking makes it slower, so fewer rows are enough, not more.": balance + -(-unpack // 2),
    }


# ---- Rounding that makes up for its errors ----


def random_layer(rng: Random) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Draw weights ``[rows, columns]``, the inverse of a Hessian and the size of a step.

    Drawn anew until no number that a right solution rounds is near the middle of two codes, and common mistakes show.
    """
    draw = _generator(rng)
    while True:
        rows, columns = rng.randint(2, 3), rng.randint(4, 6)
        inputs = torch.randn(4 * columns, columns, generator=draw, dtype=torch.float64)
        inputs += 1.5 * torch.randn(4 * columns, 1, generator=draw, dtype=torch.float64)  # columns go together
        hessian = inputs.T @ inputs / len(inputs)
        weights = torch.randn(rows, columns, generator=draw)
        inverse, step = hessian.inverse().float(), rng.choice([0.25, 0.5])
        seen: list[torch.Tensor] = []
        right = compensated(weights, inverse, step, seen=seen)
        apart = torch.cat(seen) / step
        wrong = (
            compensated(weights, inverse, step, eliminate=False),
            compensated(weights, inverse, step, divide=False),
            (weights / step).round() * step,
        )
        if ((apart - apart.floor() - 0.5).abs() > CLEAR).all() and not any(torch.equal(right, each) for each in wrong):
            return weights, inverse, step


def compensated(
    weights: torch.Tensor,
    inverse: torch.Tensor,
    step: float,
    *,
    sign: int = -1,
    divide: bool = True,
    eliminate: bool = True,
    onto: str = "later",
    order: int = 1,
    seen: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return weights rounded to whole steps, column after column, each error passed on to the columns after it.

    The faults: the `sign` of what is passed on; `divide` it by the diagonal; `eliminate` a column that is done from the
    inverse; `onto` which columns ("later", "next" or "all") it goes; the `order` of columns.
    """
    w, h = weights.double().clone(), inverse.double().clone()
    columns = range(w.shape[1])[::order]
    for place, column in enumerate(columns):
        if seen is not None:
            seen.append(w[:, column].clone())
        rounded = (w[:, column] / step).round() * step
        error = (w[:, column] - rounded) / (h[column, column] if divide else 1)
        later = {"later": columns[place + 1 :], "next": columns[place + 1 : place + 2], "all": columns}[onto]
        for other in later:
            w[:, other] += sign * error * h[column, other]
        w[:, column] = rounded
        if eliminate:
            h = h - h[:, [column]] * h[[column]] / h[column, column]
    return w.float()


def compensation_mistakes(weights: torch.Tensor, inverse: torch.Tensor, step: float) -> dict[str, torch.Tensor]:
    """Return what mistakes about error compensation lead to."""
    right = compensated(weights, inverse, step)
    plain = (weights.double() / step).round() * step
    error = weights.double() - plain
    at_once = weights.double() - (error / inverse.double().diagonal()) @ inverse.double().triu(1)
    return {
        "Nothing is passed on: this is plain rounding.": plain.float(),
        "The errors are added where they are to be taken off: mind the sign.": compensated(
            weights, inverse, step, sign=1
        ),
        "The error is not divided by the diagonal of the inverse.": compensated(weights, inverse, step, divide=False),
        "The inverse is that of all columns throughout; take a column that is done out of it.": compensated(
            weights, inverse, step, eliminate=False
        ),
        "Only the next column makes up for an error; all later ones do.": compensated(
            weights, inverse, step, onto="next"
        ),
        "Columns that are done are changed again: these numbers are no whole steps.": compensated(
            weights, inverse, step, onto="all", eliminate=False
        ),
        "The columns are taken from the last to the first.": compensated(weights, inverse, step, order=-1),
        "All errors are found before any is passed on; each column's counts what came to it.": (
            (at_once / step).round() * step
        ).float(),
        "These are codes; multiply them by the step.": right / step,
        "The errors are passed on and the weights not rounded.": _unrounded(weights, inverse, step),
    }


def _unrounded(weights: torch.Tensor, inverse: torch.Tensor, step: float) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    compensated(weights, inverse, step, seen=seen)
    return torch.stack(seen, 1).float()


# ---- What the quantised model says differently ----


def random_logits(rng: Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw logits of two models, float32 ``[tokens, vocabulary]``, and which tokens count.

    The logits are around 100, where an exponential overflows, in 64ths, which float32 holds exactly there; the divergence is
    large enough for four digits of it to survive any order of operations.
    """
    draw = _generator(rng)
    while True:
        tokens, vocabulary = rng.randint(4, 6), rng.randint(5, 9)
        shape = (tokens, vocabulary)
        base = torch.randint(-128, 129, shape, generator=draw)
        reference = base + 64 * torch.randint(96, 112, (tokens, 1), generator=draw)
        other = (
            base
            + torch.randint(-96, 97, shape, generator=draw)
            + 64 * torch.randint(96, 112, (tokens, 1), generator=draw)
        )
        counts = torch.rand(tokens, generator=draw) < 0.6
        inputs = (reference / 64, other / 64, counts)
        if 0 < int(counts.sum()) < tokens and float(divergence(*inputs)) > 0.3:
            return inputs


def divergence(reference: torch.Tensor, other: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean Kullback-Leibler divergence of the tokens that count, in nats, float32 ``[]``."""
    return _per_token(reference, other)[counts].mean().float()


def _per_token(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def divergence_mistakes(reference: torch.Tensor, other: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what mistakes about the divergence lead to."""
    each, back = _per_token(reference, other), _per_token(other, reference)
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    right = each[counts].mean()
    entropy = -(p.exp() * q).sum(-1)
    return {
        "The two are swapped: the reference's probabilities weigh the logarithms.": back[counts].mean(),
        "This is the mean of both directions; one is asked for.": ((each + back) / 2)[counts].mean(),
        "All tokens count here, padding as well.": each.mean(),
        "The sum is divided by all tokens, not by those that count.": each[counts].sum() / len(counts),
        "The tokens are added up; their mean is asked for.": each[counts].sum(),
        "The tokens that count are left out, and the others kept.": each[~counts].mean(),
        "The mean is taken over the vocabulary too: there the terms are added up.": right / reference.shape[-1],
        "The sign is wrong: a divergence is never negative.": -right,
        "These are bits; nats are asked for: the natural logarithm.": right / torch.tensor(2.0).log(),
        "This is the cross-entropy: the reference's own entropy is to be taken off.": entropy[counts].mean(),
        "These are logits, not logarithms of probabilities: normalise them.": (
            (p.exp() * (reference.double() - other.double())).sum(-1)[counts].mean()
        ),
        "The exponential overflows: take off the largest logit before, or use log_softmax.": right * torch.nan,
        "Probabilities are subtracted here, not their logarithms.": (p.exp() * (p.exp() - q.exp()))
        .sum(-1)[counts]
        .mean(),
        "Both weights and logarithms are the quantised model's.": (q.exp() * (p - q)).sum(-1)[counts].mean(),
        "This is one divergence for each token; return their mean.": each[counts],
    }


# ---- Bits where they matter ----


def random_layers(rng: Random) -> tuple[list[int], list[list[int]], int]:
    """Draw sizes of layers, the error of each at each width, and a budget in bytes for which the best choice is the only one.

    One of three shortcuts, taken in turn by chance, does not find it; every other time it takes just the budget.
    """
    shortcut, exact = rng.choice(["greedy by byte", "greedy", "largest error"]), rng.random() < 0.5
    while True:
        layers = rng.randint(3, 5)
        sizes = [16 * rng.randint(1, 40) for _ in range(layers)]
        scales = [10 ** rng.uniform(0.5, 2.5) for _ in range(layers)]
        errors = [[1 + int(scale * rng.uniform(0.7, 1.3) * part) for part in (16, 4, 1, 0.02)] for scale in scales]
        if any(sorted(each, reverse=True) != each for each in errors):
            continue
        least, most = sum(sizes) * 2 // 8, sum(sizes)
        budget = rng.randint(least, most)
        fitting = [chosen for chosen in product(WIDTHS, repeat=layers) if _fits(sizes, chosen, budget)]
        costs = sorted(_cost(sizes, errors, chosen)[::-1] for chosen in fitting)
        if len(costs) < 2 or costs[0][0] == costs[1][0]:
            continue
        if shortcut == "largest error":
            found = _least_largest(errors, fitting)
        else:
            found = _greedy(sizes, errors, budget, by_byte=shortcut == "greedy by byte")
        if not torch.equal(found, widths(sizes, errors, budget)):
            return sizes, errors, costs[0][1] // 8 if exact else budget


def _cost(sizes: Sequence[int], errors: Sequence[Sequence[int]], widths: Sequence[int]) -> tuple[int, int]:
    """Return bits and error of a choice of widths."""
    bits = sum(size * width for size, width in zip(sizes, widths, strict=True))
    return bits, sum(error[WIDTHS.index(width)] for error, width in zip(errors, widths, strict=True))


def _fits(sizes: Sequence[int], widths: Sequence[int], budget: float) -> bool:
    return sum(size * width for size, width in zip(sizes, widths, strict=True)) <= 8 * budget


def widths(sizes: Sequence[int], errors: Sequence[Sequence[int]], budget: int) -> torch.Tensor:
    """Return the bits of each layer that give the least error within a budget of bytes, int64 ``[layers]``."""
    every = product(WIDTHS, repeat=len(sizes))
    best = min((chosen for chosen in every if _fits(sizes, chosen, budget)), key=lambda c: _cost(sizes, errors, c)[1])
    return torch.tensor(best)


def width_mistakes(sizes: Sequence[int], errors: Sequence[Sequence[int]], budget: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about widths under a budget lead to."""
    every = list(product(WIDTHS, repeat=len(sizes)))
    even = [w for w in WIDTHS if _fits(sizes, [w] * len(sizes), budget)]

    def best(chosen: list[tuple[int, ...]], key: Callable[[tuple[int, ...]], object]) -> torch.Tensor:
        return torch.tensor(min(chosen, key=key, default=(WIDTHS[0],) * len(sizes)))  # type: ignore[arg-type]

    fitting = [chosen for chosen in every if _fits(sizes, chosen, budget)]
    below = [chosen for chosen in every if sum(s * w for s, w in zip(sizes, chosen, strict=True)) < 8 * budget]
    count = [c for c in every if sum(c) * sum(sizes) <= 8 * budget * len(sizes)]

    def error(chosen: tuple[int, ...]) -> int:
        return _cost(sizes, errors, chosen)[1]

    return {
        "All layers have the same width here; some can spare bits for others.": torch.tensor([even[-1]] * len(sizes)),
        "Each layer takes what is left, from the first on: a later one may need it more.": _in_order(sizes, budget),
        "The step that saves most error is taken first, whatever it costs; a cheaper one may do more for its bytes.": (
            _greedy(sizes, errors, budget, by_byte=False)
        ),
        "The step that saves most for its bytes is taken first, which may leave bytes over: compare whole choices.": (
            _greedy(sizes, errors, budget, by_byte=True)
        ),
        "The budget is in bytes and a width in bits: eight bits make a byte.": best(
            [c for c in every if _fits(sizes, c, budget / 8)],
            error,
        ),
        "The widths alone are added up: a bit costs a large layer more bytes.": best(count, error),
        "The budget is ignored.": torch.tensor([WIDTHS[-1]] * len(sizes)),
        "A choice that takes just the budget fits.": best(below, error),
        "The choice that fills the budget is not always the one of least error.": best(
            fitting, lambda c: (-_cost(sizes, errors, c)[0], error(c))
        ),
        "The largest error of a layer is made least here; their sum is asked for.": _least_largest(errors, fitting),
        "These are places in the list of widths, not widths.": torch.tensor(
            [WIDTHS.index(int(w)) for w in widths(sizes, errors, budget)]
        ),
    }


def _in_order(sizes: Sequence[int], budget: int) -> torch.Tensor:
    chosen = [WIDTHS[0]] * len(sizes)
    for layer in range(len(sizes)):
        for width in WIDTHS:
            if _fits(sizes, [*chosen[:layer], width, *chosen[layer + 1 :]], budget):
                chosen[layer] = width
    return torch.tensor(chosen)


def _least_largest(errors: Sequence[Sequence[int]], fitting: Sequence[Sequence[int]]) -> torch.Tensor:
    def costs(chosen: Sequence[int]) -> list[int]:
        each = [error[WIDTHS.index(width)] for error, width in zip(errors, chosen, strict=True)]
        return [max(each), sum(each)]

    return torch.tensor(min(fitting, key=costs))


def _greedy(sizes: Sequence[int], errors: Sequence[Sequence[int]], budget: int, *, by_byte: bool) -> torch.Tensor:
    chosen = [0] * len(sizes)
    while True:
        gains = []
        for layer, place in enumerate(chosen):
            tried = [*chosen[:layer], place + 1, *chosen[layer + 1 :]]
            if place + 1 < len(WIDTHS) and _fits(sizes, [WIDTHS[p] for p in tried], budget):
                saved = errors[layer][place] - errors[layer][place + 1]
                bits = sizes[layer] * (WIDTHS[place + 1] - WIDTHS[place])
                gains.append((saved / bits if by_byte else saved, -layer))
        if not gains:
            return torch.tensor([WIDTHS[place] for place in chosen])
        chosen[-max(gains)[1]] += 1
