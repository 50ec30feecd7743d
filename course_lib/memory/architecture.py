"""A model as a sum of parts: what it weighs and what it leaves in the cache both follow from one description.

A `Part` is a bag of weights and of cached tensors. Parts add up (a layer is attention plus feed-forward plus norms)
and multiply (a model is its layer times their number), so that a formula reads like the model. Derived in chapter 01
(notebooks/01-memory.ipynb) for weights and chapter 09 for caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["linear", "head", "embedding", "experts", "other"]


class Weight(NamedTuple):
    """One weight of ``rows * columns`` values.

    `kind` says what a quantiser does with it: it converts ``"linear"`` matrices only, and leaves the output head,
    the embeddings, stacked expert tensors and everything small (norms, biases) in 16 bit.
    """

    rows: int
    columns: int = 1
    kind: Kind = "other"

    @property
    def size(self) -> int:
        """Number of values."""
        return self.rows * self.columns


class Cached(NamedTuple):
    """Elements one layer keeps in the cache for each sequence of the batch.

    Parameters
    ----------
    per_token : int
        Elements stored for every token (keys and values together); 0 for a state.
    window : int or None
        Width of a sliding window: after a step `window - 1` tokens are kept. None keeps every token.
    fixed : int
        Elements that do not grow (convolution and recurrent states).
    float32 : bool
        Kept in float32 whatever the cache's data type.
    attention : bool
        Keys and values, which a quantised cache converts; other tensors stay as they are.
    products : int
        Multiplications of one query token, all query heads together, with one cached token that it sees: scores and output.
    """

    per_token: int = 0
    window: int | None = None
    fixed: int = 0
    float32: bool = False
    attention: bool = True
    products: int = 0

    def elements(self, sequence_length: int) -> int:
        """Elements held after `sequence_length` tokens of one sequence."""
        kept = sequence_length
        # A window of 1 keeps everything: Transformers slices [-window + 1:], which is [0:] there.
        if self.window is not None and self.window != 1:
            kept = min(sequence_length, self.window - 1)
        return self.per_token * kept + (self.fixed if sequence_length else 0)


@dataclass(frozen=True)
class Part:
    """Weights and cached tensors of a piece of a model, each with the number of times it occurs."""

    weights: Counter[Weight] = field(default_factory=Counter)
    cache: Counter[Cached] = field(default_factory=Counter)

    def __add__(self, other: Part) -> Part:
        return Part(self.weights + other.weights, self.cache + other.cache)

    def __mul__(self, times: int) -> Part:
        weights = Counter({weight: count * times for weight, count in self.weights.items()})
        return Part(weights, Counter({cached: count * times for cached, count in self.cache.items()}))

    __rmul__ = __mul__

    @property
    def parameters(self) -> int:
        """Number of parameters, each counted once."""
        return sum(weight.size * count for weight, count in self.weights.items())


NOTHING = Part()


def total(parts: Iterable[Part]) -> Part:
    """Return the sum of parts."""
    weights: Counter[Weight] = Counter()
    cache: Counter[Cached] = Counter()
    for part in parts:
        weights.update(part.weights)
        cache.update(part.cache)
    return Part(weights, cache)


def vector(size: int) -> Part:
    """Return `size` parameters that no quantiser touches: a norm's scale, a bias, a gate."""
    return Part(Counter({Weight(size): 1})) if size else NOTHING


def linear(inputs: int, outputs: int, bias: bool = False, kind: Kind = "linear") -> Part:
    """Return a matrix ``[outputs, inputs]`` and, with `bias`, a vector of `outputs`."""
    matrix = Part(Counter({Weight(outputs, inputs, kind): 1})) if inputs * outputs else NOTHING
    return matrix + vector(outputs * bias)


def embedding(entries: int, width: int) -> Part:
    """Return a table of `entries` vectors."""
    return Part(Counter({Weight(entries, width, "embedding"): 1})) if entries * width else NOTHING


def cached(per_token: int = 0, window: int | None = None, **kwargs: int | bool) -> Part:
    """Return one cached tensor (see `Cached`)."""
    return Part(cache=Counter({Cached(per_token, window, **kwargs): 1}))  # type: ignore[arg-type]
