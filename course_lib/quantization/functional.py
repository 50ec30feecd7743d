"""The one call that quantises a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from course_lib.memory.units import whole
from course_lib.quantization import integer, table
from course_lib.quantization.tensor import INTEGER_BITS, SCHEMES, QuantizedTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(
    tensor: torch.Tensor,
    scheme: str,
    *,
    block_size: int | str = 64,
    zero_point: bool = False,
    double_quant: bool = False,
) -> QuantizedTensor:
    """Store a tensor in few bits.

    Parameters
    ----------
    tensor : Tensor
        float32, float16 or bfloat16 of any shape and strides, finite.
    scheme : {"int8", "int4", "int3", "int2", "nf4", "fp4"}
        An even grid of integers, NF4's quantiles of the normal distribution, or FP4's floating-point levels.
    block_size : int or {"row", "tensor"}
        How many neighbours share a scale: a number, a whole row of the last axis, or all. Blocks of integer schemes end with
        each row, those of NF4 and FP4 run on over the flattened tensor, as bitsandbytes' do; the last may be shorter.
    zero_point : bool
        For integer schemes: a grid from the least to the largest value of a block instead of one symmetric about 0; it costs
        a byte a block.
    double_quant : bool
        For NF4 and FP4: store the scales in 8 bits, with a float32 for each 256 of them. At blocks of 64 this takes 0.127
        instead of 0.5 bit a value.

    Returns
    -------
    QuantizedTensor
        On the tensor's device.

    Raises
    ------
    TypeError
        If `tensor` is no tensor, or of another dtype.
    ValueError
        If values are NaN or infinite, or an option is not accepted.

    Notes
    -----
    A value moves by at most half a step of its grid. NF4, FP4 and double quantisation give bitsandbytes' codes and scales bit
    for bit; int8 with ``block_size="row"`` gives those of its vector-wise int8. Derived in chapter 03.

    Examples
    --------
    >>> weight = torch.randn(256, 256)
    >>> quantize(weight, "nf4", double_quant=True).bits_per_value
    4.12744140625
    """
    check_options(scheme, block_size, zero_point, double_quant)
    check_tensor(tensor)
    with torch.no_grad():
        if scheme in INTEGER_BITS:
            return integer.quantize(tensor, scheme, block_size, zero_point)
        return table.quantize(tensor, scheme, block_size, double_quant)


def check_options(
    scheme: Any, block_size: Any, zero_point: bool, double_quant: bool, accepted: Sequence[str] = SCHEMES
) -> None:
    """Raise a ValueError unless `quantize` takes these options."""
    if scheme not in accepted:
        raise ValueError(f"scheme is {scheme!r}; accepted are {', '.join(accepted)}")
    if isinstance(block_size, str):
        if block_size not in ("row", "tensor"):
            raise ValueError(f"block_size is {block_size!r}; accepted are a whole number, 'row' and 'tensor'")
    else:
        whole(block_size, "block_size", least=1)
    integers = scheme not in ("nf4", "fp4")
    if zero_point and not integers:
        raise ValueError(f"zero_point=True is for integer schemes; {scheme} has a fixed table of levels")
    if double_quant and integers:
        raise ValueError(f"double_quant=True is for nf4 and fp4, not {scheme}")


def check_tensor(tensor: Any, argument: str = "tensor") -> None:
    """Raise unless `quantize` takes this tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{argument} is {kind}; a tensor of float32, float16 or bfloat16 is needed")
    wrong = tensor.numel() - int(tensor.isfinite().sum())
    if wrong:
        raise ValueError(
            f"{argument} has {wrong} of {tensor.numel()} values that are NaN or infinite; all must be finite"
        )
