"""What chapters and workbench share to measure: times that can be compared, how a quantity grows, and the card that it is."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.memory import Card, cards

if TYPE_CHECKING:
    import torch


def card_of(device_name: str) -> Card | None:
    """Return the card of the table that PyTorch's name of a device means, or None.

    Parameters
    ----------
    device_name : str
        As ``torch.cuda.get_device_name()`` gives it: ``"NVIDIA A100-SXM4-80GB"`` is the ``"A100 80GB SXM"``.

    Notes
    -----
    A name with more in it, such as a laptop's variant or a slice of a card, means none of the table.
    """
    for said, meant in (("-", " "), ("SXM4", "SXM"), ("SXM2", "SXM"), ("PCIE", "PCIe"), ("80GB HBM3", "SXM")):
        device_name = device_name.replace(said, meant)
    words = set(device_name.split()) - {"NVIDIA", "Tesla", "GeForce", "AMD", "Instinct", "Generation"}
    for card in cards():
        named = set(card.name.split())
        if named == words or named == words - {"SXM", "PCIe"}:
            return card
    return None


class Terms(NamedTuple):
    """A quantity at the greatest size that was measured, as the sum of a constant, a linear and a quadratic part."""

    constant: float
    linear: float
    quadratic: float

    @property
    def quadratic_share(self) -> float:
        """The quadratic part of the whole."""
        return self.quadratic / sum(self)


def terms(measured: Mapping[int, float]) -> Terms:
    """Fit ``a + b N + c N**2`` by least squares.

    Parameters
    ----------
    measured : mapping of int to float
        What was measured at each of at least three sizes. An exponent would mislead where a constant is a large part.
    """
    import numpy as np

    sizes = np.array(list(measured), dtype=float)
    quadratic, linear, constant = np.polyfit(sizes / sizes.max(), list(measured.values()), 2)
    return Terms(float(constant), float(linear), float(quadratic))


def exponent(measured: Mapping[int, float]) -> float:
    """Return the power of the size with which a quantity grows: the slope of a line through the logarithms.

    Parameters
    ----------
    measured : mapping of int to float
        What was measured at each of at least two sizes, greater than 0.
    """
    logarithms = ([math.log(number) for number in numbers] for numbers in (measured.keys(), measured.values()))
    return statistics.linear_regression(*logarithms).slope


def fastest(call: Callable[[], Any], rounds: int = 4) -> float:
    """Return the fastest of several calls in seconds, by the clock, after one call to warm up.

    What disturbs a machine makes calls slower and never faster. On a CUDA card a call lasts until the card is done with it; for
    calls of less than a tenth of a millisecond use :func:`medians`, which leaves the launching out.

    Parameters
    ----------
    call : callable
        What to time.
    rounds : int
        How often it is timed.
    """
    import torch

    def finish() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    call()
    found = []
    for _ in range(rounds):
        finish()
        start = time.perf_counter()
        call()
        finish()
        found.append(time.perf_counter() - start)
    return min(found)


def medians(calls: dict[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """Time calls on a CUDA card.

    Parameters
    ----------
    calls : dict of str to callable
        Each has run before, so that nothing is compiled now. They take turns, so that a card that warms up or slows down favours
        none, and each finds the card's cache empty.
    rounds : int
        How often each is called.

    Returns
    -------
    dict of str to float
        Median seconds on the card; the time to launch is not part of them.
    """
    import torch

    emptied = torch.empty(2**29, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            emptied.zero_()  # takes so long that the call is queued before its turn comes
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs) for name, pairs in events.items()}
