"""Keys and values as codes: how groups are quantised, cut and moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from course_lib.kernels.flash_decoding_arguments import Codes
from course_lib.memory.units import whole
from course_lib.quantization.packing import pack

BITS = {"int8": 8, "int4": 4}
PARTS = ("codes", "scale", "offset")

Axis = Literal["channel", "token"]


def check_options(scheme: Any, group_size: Any, residual_length: Any) -> int:
    """Return the bits of a scheme, or raise a ValueError for options that are not accepted."""
    if scheme not in BITS:
        raise ValueError(f"scheme is {scheme!r}; accepted are {', '.join(BITS)}")
    whole(group_size, "group_size", least=1)
    whole(residual_length, "residual_length")
    return BITS[scheme]


def encode(tensor: torch.Tensor, bits: int, group: int, axis: Axis) -> Codes:
    """Quantise keys or values, each group onto an even grid of its own from its least to its largest value.

    Parameters
    ----------
    tensor : Tensor
        Floating, ``[..., tokens, head_dim]``.
    bits : int
        8 or 4, of a code. At 4 bits the last of an odd number of channels is stored twice.
    group : int
        Tokens (axis ``"channel"``) or channels as stored (axis ``"token"``) that share a scale and an offset; it divides their
        number.
    axis : {"channel", "token"}
        Whether a group is one channel of neighbouring tokens, as suits keys, whose outliers keep to their channels, or neighbouring
        channels of one token, as suits values (KIVI: Liu et al., 2024; chapter 09 measures it).

    Returns
    -------
    Codes
        With constants in bfloat16, 32 bits a group: 0.5 bit a value in groups of 64.

    Notes
    -----
    The offset is rounded down and the scale up, and codes are those of the rounded constants. So none is clipped, and a value moves
    by at most half a step, or by a whole one where it would leave the range of its dtype. A group with NaN, an infinity, or a
    span that float32 cannot hold becomes NaN as a whole.
    """
    largest, steps = torch.finfo(tensor.dtype).max, 2**bits - 1
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if bits == 4 and tensor.shape[-1] % 2:
        tensor = torch.cat((tensor, tensor[..., -1:]), -1)
    last = -2 if axis == "channel" else -1
    grouped = torch.unflatten(tensor, last, (tensor.shape[last] // group, group))
    low, high = torch.aminmax(grouped, dim=last, keepdim=True)
    offset = low.bfloat16()
    offset = torch.where(offset > low, torch.nextafter(offset, torch.full_like(offset, -torch.inf)), offset)
    start = offset.to(tensor.dtype)
    width = high - start
    scale = (width / steps).bfloat16()
    short = scale.to(tensor.dtype) * steps < width
    scale = torch.where(short, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    step = scale.to(tensor.dtype)
    offset = offset.masked_fill(~(step.float() * steps).isfinite(), torch.nan)
    step = step.masked_fill(step == 0, 1)
    least, most = ((-largest - start) / step).ceil().clamp(min=0), ((largest - start) / step).floor().clamp(max=steps)
    found = ((grouped - start) / step).round().clamp(least, most).nan_to_num(0).to(torch.uint8)
    return Codes(pack(found.view(tensor.shape), bits), scale.squeeze(last), offset.squeeze(last), bits, group, axis)


def decode(codes: Codes, out: torch.Tensor) -> torch.Tensor:
    """Write what codes stand for.

    Parameters
    ----------
    codes : Codes
        Of whole groups of tokens.
    out : Tensor
        Floating, ``[..., tokens, head_dim]``, any strides.

    Returns
    -------
    Tensor
        `out`. It is computed in float32 at least, where a code times a scale has no rounding error: the result is the same to the
        last bit however it is computed.
    """
    working, stored = torch.promote_types(out.dtype, torch.float32), codes.codes.shape[-1] * 8 // codes.bits
    direct = working == out.dtype and stored == out.shape[-1]
    # Written in place where that is possible: on a CPU new memory costs more time than the arithmetic.
    values = out if direct else out.new_empty(*out.shape[:-1], stored, dtype=working)
    if codes.bits == 4:
        values[..., ::2], values[..., 1::2] = codes.codes >> 4, codes.codes & 15
    else:
        values.copy_(codes.codes)
    last = -2 if codes.axis == "channel" else -1
    grouped = torch.unflatten(values, last, (values.shape[last] // codes.group, codes.group))
    scale, offset = (constant.to(working).unsqueeze(last) for constant in (codes.scale, codes.offset))
    torch.addcmul(offset, grouped, scale, out=grouped)
    return out if direct else out.copy_(values[..., : out.shape[-1]])


def channel_group(head_dim: int, bits: int, most: int) -> int:
    """Return how many channels of a token share a scale: the largest divisor of those stored that is at most `most`."""
    stored = head_dim + head_dim % 2 if bits == 4 else head_dim
    return next(size for size in range(min(most, stored), 0, -1) if stored % size == 0)


def part(codes: Codes, start: int, end: int) -> Codes:
    """Return the tokens from `start` to `end`, at which groups begin and end: views of ``[batch, heads, tokens, ...]``."""
    size = codes.group if codes.axis == "channel" else 1
    here = slice(start // size, end // size)
    return replace(
        codes, codes=codes.codes[:, :, start:end], scale=codes.scale[:, :, here], offset=codes.offset[:, :, here]
    )


def changed(codes: Codes, change: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
    """Return codes, scales and offsets after a change that is the same for each."""
    return replace(codes, codes=change(codes.codes), scale=change(codes.scale), offset=change(codes.offset))


def write(codes: Codes, start: int, new: Codes) -> None:
    """Write whole groups of tokens over those from `start` on."""
    here = part(codes, start, start + new.codes.shape[2])
    for name in PARTS:
        getattr(here, name).copy_(getattr(new, name))


def moved(codes: Codes, start: int, end: int, room: int) -> Codes:
    """Return a copy of the tokens from `start` to `end`, at the beginning of buffers with room for `room` of them."""
    size = codes.group if codes.axis == "channel" else 1

    def empty(tensor: torch.Tensor, length: int) -> torch.Tensor:
        return tensor.new_empty(*tensor.shape[:2], length, tensor.shape[3])

    found = replace(
        codes,
        codes=empty(codes.codes, room),
        scale=empty(codes.scale, room // size),
        offset=empty(codes.offset, room // size),
    )
    write(found, 0, part(codes, start, end))
    return found
