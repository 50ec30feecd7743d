"""What a server's configuration leaves for the cache on a card, computed while the book is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from course_lib.memory import bytes_to_giga_bytes, estimate, find_card, kv_cache_bytes

from .pieces import table

HEAD = (
    "Model",
    "Card",
    "For the server",
    "Weights",
    "A step",
    "A block",
    "Blocks",
    "Tokens",
    "Longest texts at a time",
)


class ServingSizes(SphinxDirective):  # type: ignore[misc]
    """``{serving-sizes} FILE``: a row for each ``MODEL on CARD`` in the option ``rows``, separated by commas."""

    required_arguments = 1
    option_spec = {"rows": directives.unchanged_required}  # noqa: RUF012 - docutils' own form

    def run(self) -> list[nodes.Node]:
        """Compute the table anew in every build, since any part of the library may have changed."""
        self.env.note_reread()
        settings = yaml.safe_load((Path(self.env.srcdir) / self.arguments[0]).read_text("utf-8"))
        pairs = [tuple(part.strip().split(" on ")) for part in self.options["rows"].split(",")]
        try:
            rows = [sizes(settings, model, card) for model, card in pairs]
        except (ValueError, KeyError) as error:
            raise self.error(f"serving-sizes: {error}") from None
        return [table(HEAD, rows, "course-status")]


def sizes(settings: Mapping[str, Any], model: str, card_name: str) -> Sequence[str]:
    """Return a row of the table: what a configuration of ``vllm serve`` leaves for a model's cache on a card.

    Parameters
    ----------
    settings : mapping
        Of the configuration: ``gpu-memory-utilization``, ``block-size``, ``max-model-len`` and ``max-num-batched-tokens``.
    model : str
        As for :func:`course_lib.memory.estimate`; weights and cache in bfloat16.
    card_name : str
        A card's name, see `find_card`.
    """
    block_size, longest = settings["block-size"], settings["max-model-len"]
    step = estimate(model, dtype="bfloat16", prompt_tokens=settings["max-num-batched-tokens"], new_tokens=0)
    working = step.activations + step.workspace
    served = int(settings["gpu-memory-utilization"] * find_card(card_name).memory_bytes)
    block = kv_cache_bytes(model, block_size, dtype="bfloat16")
    blocks = max(0, (served - step.weights - working) // block)
    tokens = blocks * block_size
    giga = [f"{bytes_to_giga_bytes(number):.2f} GiB" for number in (served, step.weights, working)]
    texts = f"{tokens / longest:.1f}" if blocks else "none: it does not fit"
    return [model, card_name, *giga, f"{block / 2**20:.2f} MiB", f"{blocks:,}", f"{tokens:,}", texts]
