"""Rounding onto an even grid of integers: int8, int4, int3 and int2, symmetric or with a zero-point."""

from __future__ import annotations

from typing import NamedTuple

import torch

from course_lib.quantization.packing import pack, split
from course_lib.quantization.tensor import INTEGER_BITS, QuantizedTensor


class Grid(NamedTuple):
    """An even grid for each block: value = (code - zero) * scale, codes 0 to ``2**bits - 1``, all float32 ``[..., 1]``."""

    scale: torch.Tensor
    inverse: torch.Tensor
    zero: torch.Tensor
    bits: int

    def block(self, index: int) -> Grid:
        """Return the grid of one block of each row, each tensor ``[rows]``."""
        return Grid(self.scale[:, index, 0], self.inverse[:, index, 0], self.zero[:, index, 0], self.bits)

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """Return the code of the nearest step for each value, in the values' dtype."""
        return ((values * self.inverse).round() + self.zero).clamp_(0, 2**self.bits - 1)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """Return what codes stand for."""
        return (codes - self.zero) * self.scale


def fit(blocks: torch.Tensor, bits: int, zero_point: bool) -> Grid:
    """Return the grid of each block.

    Parameters
    ----------
    blocks : Tensor
        Floating point ``[..., block_size]``.
    bits : int
        Of a code.
    zero_point : bool
        Whether the grid reaches from the least to the largest value, 0 included, so that it wastes no code on a lopsided
        block; otherwise it reaches as far below 0 as above.

    Returns
    -------
    Grid
        A block of zeros has scale 0, and its codes stand for 0. At 4 bits a scale is rounded to bfloat16, in which fused kernels
        take it: it moves by one part in 500, of which the largest codes make a 70th of a step.
    """
    if zero_point:
        steps = 2**bits - 1
        low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
        # Divided before they are subtracted: the range of float32's largest values is no float32.
        scale = _brief(high / steps - low / steps, bits)
        inverse = _inverse(scale)
        return Grid(scale, inverse, (-low * inverse).round(), bits)
    steps = 2 ** (bits - 1) - 1
    absmax = blocks.abs().amax(-1, keepdim=True)
    scale = _brief(absmax / steps, bits)
    # steps / absmax, not 1 / scale: this is how bitsandbytes rounds int8 rows, and ties depend on it.
    inverse = _inverse(scale) if bits == 4 else _inverse(absmax, steps)
    return Grid(scale, inverse, torch.full_like(absmax, 2 ** (bits - 1)), bits)


def _brief(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scales of 4 bits as bfloat16 has them, but for those so near to 0 that it has fewer digits for them."""
    short = scale.bfloat16().to(scale.dtype)
    return torch.where((short - scale).abs() <= scale / 256, short, scale) if bits == 4 else scale


def _inverse(size: torch.Tensor, numerator: int = 1) -> torch.Tensor:
    """Return `numerator / size`, and 0 where that is too large, so that blocks of zeros have the codes of 0."""
    inverse = numerator / size
    return inverse.where(inverse.isfinite(), 0)


def store(
    codes: torch.Tensor, grid: Grid, shape: torch.Size, dtype: torch.dtype, scheme: str, size: int, zero_point: bool
) -> QuantizedTensor:
    """Return codes ``[rows, columns]`` and their grid ``[rows, blocks, 1]`` as they are kept."""
    if scheme == "int8":
        kept, zero = (codes - 128).to(torch.int8), (grid.zero - 128).to(torch.int8)
    else:
        kept, zero = pack(codes, INTEGER_BITS[scheme]), grid.zero.to(torch.uint8)
    return QuantizedTensor(
        scheme, shape, dtype, size, kept, grid.scale.squeeze(-1), zero.squeeze(-1) if zero_point else None
    )


def quantize(tensor: torch.Tensor, scheme: str, block_size: int | str, zero_point: bool) -> QuantizedTensor:
    """Quantise a finite tensor; blocks run along the last axis and end with it. See `course_lib.quantization.quantize`."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    if block_size == "tensor":
        columns = tensor.numel()
    size = max(columns, 1) if isinstance(block_size, str) else min(block_size, max(columns, 1))
    rows = tensor.numel() // columns if columns else 0
    matrix = tensor.reshape(rows, columns).float()
    blocks = split(matrix, size)
    grid = fit(blocks, INTEGER_BITS[scheme], zero_point)
    codes = grid.codes(blocks).flatten(1)[:, :columns]
    return store(codes, grid, tensor.shape, tensor.dtype, scheme, size, zero_point)


def dequantize(tensor: QuantizedTensor) -> torch.Tensor:
    """Return the values in float32, ``[rows, columns]``."""
    bits = INTEGER_BITS[tensor.scheme]
    zero = 0 if tensor.scheme == "int8" else 2 ** (bits - 1)
    codes = tensor.unpacked()
    blocks = split(codes.float(), tensor.block_size)
    blocks.sub_(zero if tensor.zero_point is None else tensor.zero_point[..., None].float())
    return blocks.mul_(tensor.scale[..., None]).flatten(1)[:, : codes.shape[1]]
