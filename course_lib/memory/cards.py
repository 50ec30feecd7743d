"""Accelerator cards: how much memory they have and how fast they read it, from their makers' datasheets."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from course_lib.memory.units import shown

_TABLE = Path(__file__).with_name("cards.json")
_MAKERS = re.compile(r"nvidia|amd|tesla|geforce|instinct|rtx")


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


def find_card(name: str, argument: str = "card") -> Card:
    """Return the card of a name, however it is written: "A100 40GB", "a100-40gb", "NVIDIA A100-SXM4-40GB".

    Parameters
    ----------
    name : str
        A name of `cards`, in any case; the maker's name, hyphens and spaces do not matter, nor does the form ("SXM4", "PCIe")
        of a card that is listed in one.
    argument : str
        The argument to name in an error.

    Returns
    -------
    Card

    Raises
    ------
    TypeError
        If the name is not a text.
    ValueError
        If no card has the name or several have; close ones are listed.
    """
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a card's name, got {shown(name)}")
    wanted = _plain(name)
    for asked in (wanted, re.sub("sxm|pcie", "", wanted)):
        found = [card for card in _cards() if asked and _plain(card.name) == asked]
        if found:
            return found[0]
    known = {card.name.lower(): card.name for card in _cards()}
    close = sorted(card.name for card in _cards() if wanted and _plain(card.name).startswith(wanted))
    close = close or [known[one] for one in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)]
    raise ValueError(f"{argument} must be one of {', '.join(close or known.values())}, ..., got {shown(name)}")


def _plain(name: str) -> str:
    """A card's name with nothing in it that differs from one way of writing it to another."""
    text = _MAKERS.sub("", re.sub(r"[\W_]", "", re.sub(r"sxm\d", "sxm", name.lower())))
    form = re.search("sxm|pcie", text)
    return text.replace(form[0], "") + form[0] if form else text
