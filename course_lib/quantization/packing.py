"""Codes of fewer than eight bits, packed into bytes without gaps."""

from __future__ import annotations

import torch
from torch.nn import functional


def split(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``[..., count]`` as ``[..., ceil(count / size), size]``, the last part filled up with zeros."""
    padded = functional.pad(tensor, (0, -tensor.shape[-1] % size))
    return padded.view(*tensor.shape[:-1], padded.shape[-1] // size, size)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last axis, the first into the highest bits, as bitsandbytes packs four bits.

    Parameters
    ----------
    codes : Tensor
        Integers ``[..., count]`` from 0 to ``2**bits - 1``.
    bits : int
        1 to 8.

    Returns
    -------
    Tensor
        uint8 ``[..., ceil(count * bits / 8)]``; bits left over at the end are 0.
    """
    count = codes.shape[-1]
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 4:
        padded = functional.pad(codes.to(torch.uint8), (0, count % 2))
        return padded[..., ::2] << 4 | padded[..., 1::2]
    # Eight codes fill `bits` whole bytes, whatever `bits` is.
    words = split(codes.long(), 8)
    words = (words << torch.arange(7, -1, -1, device=codes.device) * bits).sum(-1)
    parts = words[..., None] >> torch.arange(bits - 1, -1, -1, device=codes.device) * 8 & 255
    filled: torch.Tensor = parts.flatten(-2)[..., : -(-count * bits // 8)].to(torch.uint8)
    return filled


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Undo `pack`.

    Parameters
    ----------
    packed : Tensor
        uint8 ``[..., ceil(count * bits / 8)]``.
    bits, count : int
        Of each code, and of codes along the last axis.

    Returns
    -------
    Tensor
        uint8 ``[..., count]``.
    """
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed >> 4, packed & 15], -1).flatten(-2)[..., :count]
    words = split(packed.long(), bits)
    words = (words << torch.arange(bits - 1, -1, -1, device=packed.device) * 8).sum(-1)
    codes = words[..., None] >> torch.arange(7, -1, -1, device=packed.device) * bits & 2**bits - 1
    unpacked: torch.Tensor = codes.flatten(-2)[..., :count].to(torch.uint8)
    return unpacked
