"""The angles of rotary positions, as trained and stretched to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

#: The names that ``rope_type`` may have: Transformers', and ``ntk`` for the fixed form of what ``dynamic`` adapts.
ROPE_TYPES = ("default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "proportional")


def rope_frequencies(
    head_dim: int,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
) -> tuple[torch.Tensor, float]:
    """Return how fast each pair of coordinates turns.

    Parameters
    ----------
    head_dim : int
        Size of a head.
    base : float
        Pair ``i`` of ``dim / 2`` turns by ``base ** (-2 i / dim)`` radians per token.
    scaling : mapping, optional
        A model's ``rope_parameters`` as Transformers keeps them: ``rope_type``, what that type needs (``factor``,
        ``original_max_position_embeddings``, ...), ``partial_rotary_factor``; its ``rope_theta`` replaces ``base``.
    max_position_embeddings : int, optional
        The model's length; ``dynamic`` needs it, ``yarn`` and ``longrope`` where they have no ``factor``.
    seq_len : int, optional
        Length of the sequence, for the types that depend on it: ``dynamic`` and ``longrope``.

    Returns
    -------
    inv_freq : Tensor
        float32, ``[pairs]``, radians per token.
    attention_factor : float
        What cosines and sines are multiplied by.

    Raises
    ------
    ValueError
        If the type is unknown, a key it needs is missing, or a value is out of range.

    References
    ----------
    Su et al. 2021 (RoPE); Chen et al. 2023 (linear); bloc97 and emozilla 2023 (NTK-aware, dynamic); Peng et al. 2023 (YaRN);
    Ding et al. 2024 (LongRoPE); Grattafiori et al. 2024 (Llama 3).
    """
    keys = dict(scaling or {})
    rope_type = keys.get("rope_type", keys.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type is {rope_type!r}; accepted are {', '.join(ROPE_TYPES)}")

    def need(name: str) -> Any:
        if keys.get(name) is None:
            raise ValueError(f"scaling lacks {name!r}, which rope_type {rope_type!r} needs")
        return keys[name]

    theta = keys.get("rope_theta")
    base = float(base if theta is None else theta)
    if not base > 0:
        raise ValueError(f"base is {base}; a positive number is needed")
    part = keys.get("partial_rotary_factor")
    part = 1.0 if part is None else part
    if not 0 < part <= 1:
        raise ValueError(f"partial_rotary_factor is {part}; a number above 0 and at most 1 is needed")
    dim = head_dim if rope_type == "proportional" else int(head_dim * part)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"head_dim is {head_dim}, of which {dim} coordinates turn; an even number of at least 2 is needed"
        )

    plain = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    if rope_type == "default":
        return plain, 1.0
    if rope_type == "linear":
        return plain / need("factor"), 1.0
    if rope_type == "proportional":
        turning = int(part * head_dim // 2)
        plain[turning:] = 0.0
        return plain / keys.get("factor", 1.0), 1.0
    if rope_type in ("ntk", "dynamic"):
        factor = need("factor")
        stretch = float(factor)
        if rope_type == "dynamic":
            if max_position_embeddings is None:
                raise ValueError("max_position_embeddings is None, and rope_type 'dynamic' needs it")
            length = max(seq_len or 0, max_position_embeddings)
            stretch = factor * length / max_position_embeddings - (factor - 1)
        # The slowest pair ends up slower by exactly `stretch`, the fastest is unchanged.
        larger = base * stretch ** (dim / (dim - 2)) if dim > 2 else base
        return 1.0 / larger ** (torch.arange(0, dim, 2).float() / dim), 1.0
    if rope_type == "llama3":
        return _llama3(
            plain, *map(need, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
        ), 1.0

    original = need("original_max_position_embeddings")
    factor = keys.get("factor")
    if factor is None:
        if max_position_embeddings is None:
            raise ValueError(
                f"scaling lacks 'factor' and max_position_embeddings is None; {rope_type!r} needs one of them"
            )
        factor = max_position_embeddings / original
    attention_factor = keys.get("attention_factor")
    if rope_type == "yarn":
        if attention_factor is None:
            up, down = keys.get("mscale"), keys.get("mscale_all_dim")
            attention_factor = _mscale(factor, up) / _mscale(factor, down) if up and down else _mscale(factor, 1.0)
        fast, slow = keys.get("beta_fast") or 32, keys.get("beta_slow") or 1
        return _yarn(plain, base, factor, fast, slow, original, keys.get("truncate", True)), float(attention_factor)
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    stretches = need("long_factor" if seq_len and seq_len > original else "short_factor")
    if len(stretches) != dim // 2:
        raise ValueError(
            f"long_factor and short_factor need {dim // 2} values, one for each pair; {len(stretches)} are given"
        )
    return plain / torch.tensor(stretches, dtype=torch.float32), float(attention_factor)


def _llama3(plain: torch.Tensor, factor: float, low: float, high: float, original: int) -> torch.Tensor:
    """Leave pairs alone that turn more than ``high`` times in the original length, slow those below ``low``, blend between."""
    turns = original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / factor)


def _yarn(
    plain: torch.Tensor, base: float, factor: float, fast: float, slow: float, original: int, truncate: bool
) -> torch.Tensor:
    """Leave pairs alone that turn more than ``fast`` times in the original length, slow those below ``slow``, blend between."""
    dim = 2 * len(plain)
    # The (fractional) pair that makes a given number of turns in the original length.
    first, last = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    slowed = ((torch.arange(dim // 2).float() - first) / (last - first)).clamp(0, 1)
    return plain * (1 - slowed) + plain / factor * slowed


def _mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor on the scores' square root."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
