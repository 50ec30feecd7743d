"""Sizes: how many bytes a number of values takes, and how to say so.

Everything is an integer number of bytes; a text for people is always GiB (2**30 bytes). Derived in chapter 01
(notebooks/01-memory.ipynb).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

GIB = 2**30
MOST = 2**63 - 1  # the largest size that a tensor's dimension can have

# Bits per value. Names of less than eight bits count the codes alone; constants are counted where the scheme is known.
DTYPE_BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "int3": 3,
    "int2": 2,
    "nf4": 4,
    "fp4": 4,
}
_ALIASES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def dtype_name(dtype: Any, *, argument: str = "dtype", accepted: Collection[str] = DTYPE_BITS) -> str:
    """Return the canonical name of a data type.

    Parameters
    ----------
    dtype : str or torch.dtype
        A name such as ``"bfloat16"`` (``"bf16"``, ``"fp16"`` and ``"fp32"`` are understood) or a ``torch.dtype``.
    argument : str
        The argument to name in an error.
    accepted : collection of str
        The names that make sense there.

    Returns
    -------
    str
        A key of ``DTYPE_BITS``.

    Raises
    ------
    ValueError
        If no data type has that name, or it is not among the accepted.
    """
    name = str(dtype).lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in accepted:
        raise ValueError(f"{argument} must be one of {', '.join(accepted)} or a torch.dtype, got {shown(dtype)}")
    return name


def whole(value: Any, argument: str, *, least: int = 0, most: int | None = MOST) -> int:
    """Return `value` as an int, or raise a ValueError that names `argument` and what it accepts.

    A NumPy integer, or whatever else Python takes for an index, is a whole number; a bool is not.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{argument} must be a whole number of at least {least}, got {shown(value)}")
    if most is not None and number > most:
        raise ValueError(f"{argument} must be a whole number of at most {most}, got {shown(value)}")
    return number


def seed_number(seed: Any) -> int:
    """Return `seed` as an int that PyTorch's generators take, or raise a ValueError."""
    return whole(seed, "seed", least=-(2**63), most=2**64 - 1)


def shown(value: Any) -> str:
    """Return `value` as an error names it: in one line, and short, however long the value is."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a longer number"
    # Both ends, for a path says most at its end.
    return text if len(text) <= 80 else f"{text[:45]}...{text[-25:]}"


def weight_bytes(num_parameters: int, dtype: Any) -> int:
    """Bytes that a number of parameters takes in memory.

    Parameters
    ----------
    num_parameters : int
        How many values, zero or more.
    dtype : str or torch.dtype
        Their data type.

    Returns
    -------
    int
        ``num_parameters * bits / 8``, rounded up to a whole byte.

    Raises
    ------
    ValueError
        If `num_parameters` is not a whole number of at least 0 or `dtype` is unknown.

    Notes
    -----
    Derived in chapter 01 (notebooks/01-memory.ipynb): X billion parameters take about 4X GB in float32 and 2X GB in
    bfloat16.
    """
    return -(-whole(num_parameters, "num_parameters", most=None) * DTYPE_BITS[dtype_name(dtype)] // 8)


def attention_scores_bytes(num_heads: int, sequence_length: int, dtype: Any = "bfloat16", batch_size: int = 1) -> int:
    """Bytes of the score matrices ``[batch, heads, sequence, sequence]`` that plain attention writes out for one layer.

    Parameters
    ----------
    num_heads : int
        Query heads of the layer.
    sequence_length : int
        Queries, and keys, per sequence.
    dtype : str or torch.dtype
        Data type of a score.
    batch_size : int
        Sequences at a time.

    Returns
    -------
    int
        ``batch_size * num_heads * sequence_length**2`` values, in bytes.

    Raises
    ------
    ValueError
        If a count is not a whole number of at least 0 or `dtype` is unknown.

    Notes
    -----
    Derived in chapters 01 and 02 (notebooks/01-memory.ipynb for this one): the quadratic term that
    flash attention never writes.
    """
    heads, length = whole(num_heads, "num_heads"), whole(sequence_length, "sequence_length")
    return weight_bytes(whole(batch_size, "batch_size") * heads * length * length, dtype)


def bytes_to_giga_bytes(n: float) -> float:
    """Return `n` bytes in GiB (units of 2**30 bytes), as the name of the optimisation guide has it.

    Parameters
    ----------
    n : int or float
        A number of bytes.

    Returns
    -------
    float
        ``n / 2**30``; infinity where no float is that large.
    """
    try:
        return n / GIB
    except OverflowError:
        return float("inf")


def format_gib(n: float) -> str:
    """Return `n` bytes as a text in GiB with two decimals, for example ``"28.90 GiB"``."""
    return f"{bytes_to_giga_bytes(n):,.2f} GiB"
