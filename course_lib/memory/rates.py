"""How fast a machine reads and computes: from a card's datasheet, or fitted to steps that were timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from course_lib.memory.cards import Card, find_card
from course_lib.memory.step_cost import StepCost


@dataclass(frozen=True)
class Calibration:
    """Rates with which the time of a step follows from what it reads and computes.

    Attributes
    ----------
    bandwidth : float
        Bytes that are read in a second.
    flops_per_second : float
        Operations that are done in a second.
    overhead : float
        Seconds that every step takes besides.
    overlap : bool
        Whether reading and computing go on at the same time, so that the longer of the two counts (the roofline), or one after the
        other, so that their sum does.
    """

    bandwidth: float
    flops_per_second: float
    overhead: float = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not self.overhead >= 0:
            raise ValueError(f"overhead must be at least 0 seconds, got {self.overhead!r}")

    def seconds(self, cost: StepCost) -> float:
        """Return the time of a step."""
        reading, computing = cost.bytes / self.bandwidth, cost.flops / self.flops_per_second
        return self.overhead + (max(reading, computing) if self.overlap else reading + computing)


def datasheet(card: str | Card) -> Calibration:
    """Return the rates of a card's datasheet, which no program reaches: times from them are lower bounds.

    Parameters
    ----------
    card : str or Card
        A card, or its name (see `find_card`).

    Returns
    -------
    Calibration
        The roofline without overhead. How much of these rates a step reaches is not yet measured.

    Raises
    ------
    ValueError
        If no card has the name, or the table has no rate of arithmetic for it.
    """
    if not isinstance(card, Card):
        card = find_card(card)
    if card.tensor_flops_per_second is None:
        raise ValueError(f"card {card.name!r} has no rate of arithmetic in the table; pass a Calibration of your own")
    return Calibration(float(card.bandwidth_bytes_per_second), float(card.tensor_flops_per_second))


def calibrate(measurements: Iterable[tuple[StepCost, float]]) -> Calibration:
    """Fit a machine's rates to steps that were timed.

    Parameters
    ----------
    measurements : iterable of (StepCost, float)
        What each step reads and computes, and the seconds it took. Steps should differ in context, for the bytes, and in batch or
        query tokens, for the arithmetic.

    Returns
    -------
    Calibration
        Reading and computing one after the other. A rate is infinite where the best fit has no time for it.

    Raises
    ------
    ValueError
        If there are fewer than three measurements, or a time is not positive.

    Notes
    -----
    Least squares of relative errors, ``seconds = bytes / bandwidth + flops / flops_per_second + overhead``, none of the three terms
    negative. The best non-negative fit is an ordinary one of some of the terms (Lawson and Hanson, 1974), so all seven are tried.
    """
    rows = [(cost.bytes, cost.flops, 1.0, seconds) for cost, seconds in measurements]
    if len(rows) < 3:
        raise ValueError(f"measurements must be at least 3, got {len(rows)}")
    if not all(seconds > 0 for *_, seconds in rows):
        raise ValueError("measurements must hold positive seconds")
    best, least = [0.0, 0.0, 0.0], float("inf")
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = _fit([[row[i] / row[3] for i in chosen] for row in rows])
            if found is None or min(found) < 0:
                continue
            terms = [found[chosen.index(i)] if i in chosen else 0.0 for i in range(3)]
            error = sum((sum(t * row[i] for i, t in enumerate(terms)) / row[3] - 1) ** 2 for row in rows)
            if error < least:
                best, least = terms, error
    per_byte, per_flop, overhead = best
    return Calibration(_inverse(per_byte), _inverse(per_flop), overhead, overlap=False)


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else float("inf")


def _fit(rows: list[list[float]]) -> list[float] | None:
    """Solve for the terms that bring every row nearest to 1, by the normal equations; None if the rows do not decide."""
    count = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(count)]
    scaled = [[value / s for value, s in zip(row, scale, strict=True)] for row in rows]
    system = [
        [sum(row[i] * row[j] for row in scaled) for j in range(count)] + [sum(row[i] for row in scaled)]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda r: abs(system[r][i]))
        system[i], system[pivot] = system[pivot], system[i]
        if abs(system[i][i]) < 1e-12:
            return None
        for r in range(count):
            if r != i:
                factor = system[r][i] / system[i][i]
                system[r] = [a - factor * b for a, b in zip(system[r], system[i], strict=True)]
    return [system[i][count] / system[i][i] / scale[i] for i in range(count)]
