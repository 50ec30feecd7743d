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
    import numpy as np

    rows = [(cost.bytes, cost.flops, 1.0, seconds) for cost, seconds in measurements]
    if len(rows) < 3:
        raise ValueError(f"measurements must be at least 3, got {len(rows)}")
    if not all(seconds > 0 for *_, seconds in rows):
        raise ValueError("measurements must hold positive seconds")
    # Each row divided by its time, so that 1 is to be reached, and each column by its largest number.
    table = np.array(rows, dtype=float)
    table = table[:, :3] / table[:, 3:]
    scale = np.abs(table).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(3), float("inf")
    for chosen in (list(some) for count in (1, 2, 3) for some in combinations(range(3), count)):
        terms = np.zeros(3)
        found, _, rank, _ = np.linalg.lstsq(table[:, chosen] / scale[chosen], np.ones(len(rows)), rcond=1e-10)
        if rank < len(chosen) or found.min() < 0:
            continue
        terms[chosen] = found / scale[chosen]
        error = float(((table @ terms - 1) ** 2).sum())
        if error < least:
            best, least = terms, error
    per_byte, per_flop, overhead = best.tolist()
    return Calibration(_inverse(per_byte), _inverse(per_flop), overhead, overlap=False)


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else float("inf")
