"""What the studies of the workbench share: times that can be compared, and what a card can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def bound_seconds(device_name: str, flop: int, moved_bytes: int) -> float | None:
    """Return the least time in which a card can do work, arithmetic and traffic overlapping; None where they are not known.

    Parameters
    ----------
    device_name : str
        As for :func:`card_of`.
    flop : int
        Operations of matrix products in 16 bit.
    moved_bytes : int
        Bytes that must travel between memory and chip.
    """
    card = card_of(device_name)
    if card is None or card.tensor_flops_per_second is None:
        return None
    return max(flop / card.tensor_flops_per_second, moved_bytes / card.bandwidth_bytes_per_second)


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
