"""Exercises of chapter 07: inputs to test with, right answers, and the answers that common mistakes lead to."""

from __future__ import annotations

import math
from random import Random

import torch


def wavelengths(head_dim: int, base: float) -> torch.Tensor:
    """Return after how many tokens each pair has made a turn, float64 ``[head_dim / 2]``."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    return 2 * math.pi * base ** (2 * pairs / head_dim)


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Turn rows of ``[length, head_dim]``: dimension ``i`` makes a pair with ``i + head_dim / 2``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * (2 * math.pi / wavelengths(x.shape[-1], base))
    first, second = x[:, :half], x[:, half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def random_rope(rng: Random) -> tuple[int, float]:
    """Draw a head's size and the base of its frequencies."""
    return rng.choice([16, 32, 64, 80, 96, 128]), float(rng.randint(8_000, 900_000))


# ---- position interpolation ---------------------------------------------------------------------------------------


def angles(length: int, trained: int, head_dim: int, base: float) -> torch.Tensor:
    """Return the angles of position interpolation, ``[length, head_dim / 2]``."""
    return _angles(torch.arange(length) / max(1.0, length / trained), head_dim, base)


def _angles(positions: torch.Tensor, head_dim: int, base: float) -> torch.Tensor:
    return positions[:, None].double() * (2 * math.pi / wavelengths(head_dim, base))


def angles_mistakes(length: int, trained: int, head_dim: int, base: float) -> dict[str, torch.Tensor]:
    """Return what mistakes in position interpolation lead to."""
    positions, factor = torch.arange(length), max(1.0, length / trained)
    return {
        "Nothing is interpolated: positions beyond the trained length keep angles that training never showed.": _angles(
            positions, head_dim, base
        ),
        "Positions are multiplied by the factor; they must be divided by it.": _angles(positions * factor, head_dim, base),
        "Positions are rounded to whole numbers, so that neighbours share one: leave the fractions.": _angles(
            torch.floor(positions / factor), head_dim, base
        ),
        "The base is multiplied by the factor, which slows every pair by another amount: divide the positions.": _angles(
            positions, head_dim, base * factor
        ),
        "A short text is stretched: where the length fits, nothing may change.": _angles(
            positions * (trained / length), head_dim, base
        ),
        "The exponent is -i / head_dim; pair i has -2 i / head_dim.": positions[:, None].double()
        / factor
        * base ** (-torch.arange(head_dim // 2, dtype=torch.float64) / head_dim),
        "The factor is a whole number here; length / trained need not be one.": _angles(
            positions / max(1, length // trained), head_dim, base
        ),
    }  # fmt: skip


# ---- the base of NTK-aware scaling --------------------------------------------------------------------------------


def ntk_base(base: float, head_dim: int, factor: float) -> float:
    """Return the base with which the slowest pair is slower by exactly the factor."""
    return float(base * factor ** (head_dim / (head_dim - 2)))


def ntk_base_mistakes(base: float, head_dim: int, factor: float) -> dict[str, float]:
    """Return what mistakes about the base lead to."""
    return {
        "The base itself is multiplied by the factor: the slowest pair has an exponent just below 1, so that is too little.": (
            base * factor
        ),
        "The exponent is upside down: it is above 1.": base * factor ** ((head_dim - 2) / head_dim),
        "The exponent counts pairs in its denominator: the slowest of them has exponent (head_dim - 2) / head_dim.": (
            base * factor ** (head_dim / (head_dim // 2 - 1))
        ),
        "This would slow the slowest pair by the factor squared.": base * factor ** (2 * head_dim / (head_dim - 2)),
        "The base is raised to the power; only the factor is.": (base * factor) ** (head_dim / (head_dim - 2)),
        "A larger base turns more slowly: multiply, do not divide.": base / factor ** (head_dim / (head_dim - 2)),
    }


# ---- scaling by parts ---------------------------------------------------------------------------------------------


def by_parts(
    head_dim: int, base: float, trained: int, factor: float, few_turns: float, many_turns: float
) -> torch.Tensor:
    """Return the wavelengths after scaling by parts, ``[head_dim / 2]``."""
    wave = wavelengths(head_dim, base)
    keep = ((trained / wave - few_turns) / (many_turns - few_turns)).clamp(0, 1)
    return wave / (keep + (1 - keep) / factor)


def by_parts_mistakes(
    head_dim: int, base: float, trained: int, factor: float, few_turns: float, many_turns: float
) -> dict[str, torch.Tensor]:
    """Return what mistakes in scaling by parts lead to."""
    wave = wavelengths(head_dim, base)

    def kept(turns: torch.Tensor) -> torch.Tensor:
        return (turns - few_turns) / (many_turns - few_turns)

    share = kept(trained / wave).clamp(0, 1)
    radians = kept(trained * 2 * math.pi / wave).clamp(0, 1)
    return {
        "Every pair is slowed: those with many turns must keep their wavelength.": wave * factor,
        "No pair is slowed.": wave,
        "Fast and slow are exchanged: pairs with many turns are the ones to leave alone.": wave
        / (1 - share + share / factor),
        "Wavelengths are blended; frequencies must be, and a wavelength is one over a frequency.": wave
        * (share + (1 - share) * factor),
        "The turns lack 2 pi: a pair turns by one radian in wavelength / (2 pi) tokens.": wave
        / (radians + (1 - radians) / factor),
        "The share that is kept must stay between 0 and 1.": wave
        / (kept(trained / wave) + (1 - kept(trained / wave)) / factor),
        "There is no transition: pairs between few and many turns are blended.": torch.where(
            trained / wave > few_turns, wave, wave * factor
        ),
        "There is no transition: pairs between few turns and many are blended.": torch.where(
            trained / wave > many_turns, wave, wave * factor
        ),
    }


def random_parts(rng: Random) -> tuple[int, float, int, float, float, float]:
    """Draw a head, a base, a trained length, a factor and the two numbers of turns."""
    head_dim, base = random_rope(rng)
    few = rng.choice([1.0, 2.0])
    return head_dim, base, rng.choice([2048, 4096, 8192]), rng.uniform(2, 40), few, few * rng.choice([8.0, 16.0, 32.0])


# ---- dynamic NTK and a cache --------------------------------------------------------------------------------------


def stretched_base(length: int, base: float, trained: int, head_dim: int) -> float:
    """Return the base of dynamic NTK for a text of some length, with a factor of 1."""
    return float(base * max(1.0, length / trained) ** (head_dim / (head_dim - 2)))


def decode_scores(q: torch.Tensor, k: torch.Tensor, base: float, trained: int) -> torch.Tensor:
    """Return row by row the scores of each token's query with its own and all earlier keys; 0 for later keys."""
    length, head_dim = q.shape
    positions = torch.arange(length)
    scores = torch.zeros(length, length, dtype=q.dtype)
    for now in range(length):
        new = stretched_base(now + 1, base, trained, head_dim)
        turned = rotate(k[: now + 1], positions[: now + 1], new)
        scores[now, : now + 1] = turned @ rotate(q[now : now + 1], positions[now : now + 1], new)[0]
    return scores


def decode_mistakes(q: torch.Tensor, k: torch.Tensor, base: float, trained: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about dynamic NTK with a cache lead to."""
    length, head_dim = q.shape
    positions = torch.arange(length)
    bases = [stretched_base(now + 1, base, trained, head_dim) for now in range(length)]

    def each(x: torch.Tensor, bases: list[float]) -> torch.Tensor:
        return torch.cat([rotate(x[at : at + 1], positions[at : at + 1], bases[at]) for at in range(length)])

    def unclamped(now: int) -> float:
        return float(base * ((now + 1) / trained) ** (head_dim / (head_dim - 2)))

    def same(one: float) -> torch.Tensor:
        return (rotate(q, positions, one) @ rotate(k, positions, one).T).tril()

    shrunk = [unclamped(now) for now in range(length)]
    late = [stretched_base(now, base, trained, head_dim) for now in range(length)]

    def right_with(bases: list[float]) -> torch.Tensor:
        rows = [
            rotate(k, positions, bases[now]) @ rotate(q[now : now + 1], positions[now : now + 1], bases[now])[0]
            for now in range(length)
        ]
        return torch.stack(rows).tril()

    return {
        "Bases are mixed, as you found it: each key keeps the base of the step that stored it.": (
            (each(q, bases) @ each(k, bases).T).tril()
        ),
        "The base of the whole text is used from the start: a step must not know how long the text will become.": same(
            bases[-1]
        ),
        "The base never changes: that is no scaling at all.": same(base),
        "The base shrinks for short texts: up to the trained length nothing may change.": right_with(shrunk),
        "The base lags behind by a token: the text holds the new token, too.": right_with(late),
        "A query sees later keys: row n has n + 1 scores and then zeros.": torch.stack(
            [
                rotate(k, positions, bases[now]) @ rotate(q[now : now + 1], positions[now : now + 1], bases[now])[0]
                for now in range(length)
            ]
        ),
    }


def random_decode(rng: Random) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    """Draw queries and keys ``[length, head_dim]`` in float64, a base, and a trained length that the text exceeds."""
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    length, head_dim = rng.randint(10, 14), rng.choice([8, 12, 16])
    q, k = torch.randn(2, length, head_dim, generator=draw, dtype=torch.float64)
    return q, k, float(rng.randint(100, 2000)), rng.randint(4, 6)


# ---- the factor that reaches a length -----------------------------------------------------------------------------


def ntk_factor(head_dim: int, base: float, trained: int, target: int) -> float:
    """Return the smallest NTK-aware factor with which no pair that saw less than a turn turns further than it did."""
    first = _first_slow(head_dim, base, trained)
    return 1.0 if first is None else float((target / trained) ** ((head_dim - 2) / (2 * first)))


def _first_slow(head_dim: int, base: float, length: float) -> int | None:
    slow = (wavelengths(head_dim, base) > length).nonzero()
    return int(slow[0]) if len(slow) else None


def ntk_factor_mistakes(head_dim: int, base: float, trained: int, target: int) -> dict[str, float]:
    """Return what mistakes about the factor lead to."""
    ratio = target / trained

    def needed(first: int | None) -> float:
        return float(ratio ** ((head_dim - 2) / (2 * first))) if first else 1.0

    first = _first_slow(head_dim, base, trained)
    inverse = float(ratio ** (2 * first / (head_dim - 2))) if first else 1.0
    return {
        "This is the ratio of the lengths: it serves the slowest pair alone, and the ones before it go too far.": ratio,
        "Turns are counted over the target: which angles a pair has seen depends on the trained length.": needed(
            _first_slow(head_dim, base, target)
        ),
        "Turns are counted without 2 pi: a turn takes 2 pi radians.": needed(
            _first_slow(head_dim, base, trained * 2 * math.pi)
        ),
        "The exponent is upside down: pairs in the middle are slowed by less than the factor, so it must be larger.": inverse,
        "The last pair with a full turn is taken; the first without one is needed.": needed(first - 1 if first else None),
        "The slowness of pair i is factor ** (2 i / (head_dim - 2)); you have head_dim in its place.": (
            float(ratio ** (head_dim / (2 * first))) if first else 1.0
        ),
        "Every pair has made a full turn here, so nothing has to change: the factor is 1.": 1.0 if first else ratio,
    }  # fmt: skip


def random_target(rng: Random) -> tuple[int, float, int, int]:
    """Draw a head, a base, a trained length that leaves some pairs short of a turn, and a longer target."""
    head_dim, base = random_rope(rng)
    trained = rng.randint(500, 5000)
    return head_dim, base, trained, round(trained * rng.uniform(2, 12))
