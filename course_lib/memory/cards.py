"""Accelerator cards: how much memory they have and how fast they read it, from their makers' datasheets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("cards.json")


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes
    ----------
    name : str
        The maker's name with the memory size where there are several.
    memory_bytes : int
        The datasheet's gigabytes at 10**9 bytes each. What a card reports differs by some percent either way: an 80 GB
        A100 has 80 GiB, while a card that keeps error correction in its main memory, such as the T4 or the L40S, reports
        a little less than the datasheet. Not counted: the CUDA context, some hundred MiB, and fragmentation.
    bandwidth_bytes_per_second : int
        Peak rate of reading that memory.
    bfloat16 : bool
        Whether it computes in bfloat16; the others keep bfloat16 weights but want float16 arithmetic.
    source : str
        The datasheet's title.
    tensor_flops_per_second : int, optional
        Peak rate of dense 16-bit products with sums in float32, for the cards that chapter 05 draws; half of what a sheet
        states with sparsity.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: int
    bfloat16: bool
    source: str
    tensor_flops_per_second: int | None = None


@cache
def _cards() -> tuple[Card, ...]:
    rows = json.loads(_TABLE.read_text(encoding="utf-8"))
    found = [
        Card(
            r["name"],
            int(r["memory_gb"] * 1e9),
            int(r["bandwidth_gb_per_second"] * 1e9),
            r["bfloat16"],
            r["source"],
            int(r["tensor_tflops"] * 1e12) if "tensor_tflops" in r else None,
        )
        for r in rows
    ]
    return tuple(sorted(found, key=lambda card: (card.memory_bytes, card.bandwidth_bytes_per_second)))


def cards() -> list[Card]:
    """Return the known cards, smallest memory first.

    Returns
    -------
    list of Card
        A fresh list; compare an estimate with ``estimate.fits(card.memory_bytes)``.

    Notes
    -----
    Used in chapter 01 (notebooks/01-memory.ipynb).
    """
    return list(_cards())
