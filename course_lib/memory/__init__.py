"""Memory: how much a model, its cache and its activations take, by arithmetic and by measurement.

Derived in chapter 01 (notebooks/01-memory.ipynb). Importing this needs neither torch nor transformers; `peak_memory` and
`flush` load torch when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.memory.advice import Advice, advise
from course_lib.memory.capacity import largest_context
from course_lib.memory.cards import Card, cards, find_card
from course_lib.memory.config import published_config, published_names
from course_lib.memory.counting import count_parameters, kv_cache_bytes
from course_lib.memory.estimate import MemoryEstimate, estimate
from course_lib.memory.step_cost import StepCost, step_cost
from course_lib.memory.units import attention_scores_bytes, bytes_to_giga_bytes, format_gib, weight_bytes

if TYPE_CHECKING:
    from course_lib.memory.measure import flush, peak_memory

__all__ = [
    "Advice",
    "Card",
    "MemoryEstimate",
    "StepCost",
    "advise",
    "attention_scores_bytes",
    "bytes_to_giga_bytes",
    "cards",
    "count_parameters",
    "estimate",
    "find_card",
    "flush",
    "format_gib",
    "kv_cache_bytes",
    "largest_context",
    "peak_memory",
    "published_config",
    "published_names",
    "step_cost",
    "weight_bytes",
]


def __getattr__(name: str) -> Any:
    if name in ("flush", "peak_memory"):
        from course_lib.memory import measure

        return getattr(measure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
