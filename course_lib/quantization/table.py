"""Rounding to the nearest of 16 levels, block by block: NF4 and FP4 in bitsandbytes' layout, and its double quantisation."""

from __future__ import annotations

from functools import cache

import torch

from course_lib.quantization.levels import dynamic_levels, fp4_levels, nf4_levels
from course_lib.quantization.packing import pack
from course_lib.quantization.tensor import TABLE_SCHEMES, QuantizedTensor

#: How many scales share one, under double quantisation.
SCALE_BLOCK = 256

#: bitsandbytes divides by no less, so that a block of zeros has no NaN.
_SMALLEST = 1e-38


def levels(scheme: str) -> torch.Tensor:
    """Return the levels of ``"nf4"`` or ``"fp4"`` by code, float32 ``[16]``."""
    return nf4_levels() if scheme == "nf4" else fp4_levels()


@cache
def tables(scheme: str, double_quant: bool, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tables of values that `course_lib.kernels.quantized_matmul` looks codes and scales up in, by argument."""
    found = {"levels": levels(scheme).to(device)} if scheme in TABLE_SCHEMES else {}
    return found | ({"scale_levels": dynamic_levels().to(device)} if double_quant else {})


@cache
def _nearest(scheme: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The midpoints between ascending levels, and the code of each level in that order."""
    order = levels(scheme).argsort(stable=True)
    ascending = levels(scheme)[order]
    return ((ascending[:-1] + ascending[1:]) / 2).to(device), order.to(torch.uint8).to(device)


def quantize(tensor: torch.Tensor, scheme: str, block_size: int | str, double_quant: bool) -> QuantizedTensor:
    """Quantise a finite tensor; blocks run over the flattened tensor. See `course_lib.quantization.quantize`."""
    flat = tensor.reshape(-1).float()
    size = {"row": tensor.shape[-1] if tensor.ndim else 1, "tensor": flat.numel()}.get(str(block_size), block_size)
    size = max(int(size), 1)
    count = flat.numel()
    whole = count // size * size
    blocks, rest = flat[:whole].view(-1, size), flat[whole:]
    absmax = blocks.abs().amax(-1)
    scaled = (blocks * (1 / absmax.clamp(min=_SMALLEST))[:, None]).view(-1)
    if rest.numel():
        # bitsandbytes divides here and multiplies by the reciprocal above; codes at a midpoint depend on it.
        last = rest.abs().amax().clamp(min=_SMALLEST)
        absmax, scaled = torch.cat([absmax, last[None]]), torch.cat([scaled, rest / last])
    midpoints, order = _nearest(scheme, flat.device)
    # An odd count is filled up with a zero, and zero's code is not 0 in NF4.
    codes = order[
        torch.bucketize(torch.nn.functional.pad(scaled.clamp_(-1, 1), (0, count % 2)), midpoints, out_int32=True)
    ]
    packed = pack(codes, 4)
    if not double_quant:
        return QuantizedTensor(scheme, tensor.shape, tensor.dtype, size, packed, absmax)
    offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())
    scale, scale_absmax = _quantize_scales(absmax - offset)
    return QuantizedTensor(
        scheme, tensor.shape, tensor.dtype, size, packed, scale, scale_absmax=scale_absmax, scale_offset=offset
    )


def _quantize_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise centred scales to `dynamic_levels` in blocks: uint8 ``[count]`` and float32 ``[blocks]``."""
    blocks = torch.nn.functional.pad(scales, (0, -scales.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    absmax = blocks.abs().amax(-1)
    scaled = blocks * (1 / absmax)[:, None]
    # bitsandbytes' CPU kernel looks codes up in a table over 2**16 even steps of [-1, 1], which this repeats.
    steps = 2**16 - 1
    scaled = ((scaled.clamp(-1, 1) + 1) * 0.5 * steps + 0.5).floor()
    scaled = -1 + 2 * scaled / steps
    table = dynamic_levels().to(scales.device)
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True)
    codes = codes.where(absmax[:, None] > 0, 0).to(torch.uint8)
    return codes.view(-1)[: scales.numel()], absmax


def scales(tensor: QuantizedTensor) -> torch.Tensor:
    """Return the scale of each block in float32, double quantisation undone, ``[blocks]``."""
    if tensor.scale_absmax is None or tensor.scale_offset is None:
        return tensor.scale
    table = dynamic_levels().to(tensor.device)
    each = tensor.scale_absmax.repeat_interleave(SCALE_BLOCK)[: tensor.scale.numel()]
    return table[tensor.scale.int()] * each + tensor.scale_offset


def dequantize(tensor: QuantizedTensor) -> torch.Tensor:
    """Return the values in float32, flat."""
    values = levels(tensor.scheme).to(tensor.device)[tensor.unpacked().int()]
    count, size, scale = values.numel(), tensor.block_size, scales(tensor)
    whole = count // size * size
    values[:whole].view(-1, size).mul_(scale[: count // size, None])
    values[whole:].mul_(scale[count // size :])
    return values
