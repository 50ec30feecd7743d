"""Products with quantised weights on a CPU: PyTorch's fused kernels for few rows, float32 for many.

A single row uses each weight once, so reading the weights takes the time and fewer bits take less of it; many rows use a weight often,
and then it pays to make float32 of it first. Chapter 04 measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from course_lib.quantization.tensor import QuantizedTensor

#: The most rows that a fused kernel multiplies. kernels/decode_on_cpu.py measures where it stops paying: beyond these, on processors
#: with AVX512 and without.
FEW_ROWS = {"int4": 32, "int8": 32, "bfloat16": 4}
#: The inputs that are multiplied here; those of float16 would lose digits on their way to bfloat16.
INPUTS = (torch.float32, torch.bfloat16)
#: Rows of a weight that PyTorch's packing orders among themselves, at most.
PANEL = 64
_ATEN: Any = torch.ops.aten


def takes(weight: QuantizedTensor) -> bool:
    """Tell whether `multiply` can use a weight on this machine, after `pack`."""
    if (
        weight.device.type != "cpu"
        or len(weight.shape) != 2
        or weight.zero_point is not None
        or not weight.codes.numel()
    ):
        return False
    rows, columns = weight.shape
    if weight.scheme == "bfloat16":
        return True
    if weight.scheme == "int8":  # PyTorch's kernel reads 16 columns at a time, beyond the end or misaligned if it must
        return weight.scale.shape == (rows, 1) and columns % 32 == 0 and _trusted("int8")
    return (
        weight.scheme == "int4"
        and weight.block_size in (32, 64, 128, 256)
        and columns % weight.block_size == 0
        and rows % PANEL == 0
        and torch.equal(weight.scale.bfloat16().float(), weight.scale)
        and _trusted("int4")
    )


def pack(weight: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale of a weight as `multiply` wants them, in as many bytes.

    int4 becomes PyTorch's order of codes, which depends on the processor, and ``[blocks, rows, 2]`` in bfloat16: each block's scale,
    and 0 for what its codes stand around. All else is as it was.
    """
    if weight.scheme != "int4":
        return _aligned(weight.codes), weight.scale
    codes = _ATEN._convert_weight_to_int4pack_for_cpu(weight.unpacked().int(), 1)
    scale = weight.scale.T.bfloat16()
    return codes, torch.stack((scale, torch.zeros_like(scale)), -1)


def unpack_int4(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `pack` for int4: return codes ``[rows, columns / 2]`` and scale ``[rows, blocks]`` of a `QuantizedTensor`."""
    rows = _ordered(codes).T
    return rows[:, ::2] << 4 | rows[:, 1::2], scale[..., 0].T.float().contiguous()


def multiply(
    inputs: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scheme: str, block_size: int
) -> torch.Tensor:
    """Return ``inputs @ weight.T``.

    Parameters
    ----------
    inputs : Tensor
        float32 or bfloat16 ``[..., columns]``, on the CPU.
    codes, scale : Tensor
        Of a weight ``[rows, columns]``, from `pack`.
    scheme, block_size
        Of that weight.

    Returns
    -------
    Tensor
        ``[..., rows]`` in the inputs' dtype. Up to `FEW_ROWS` inputs are rounded to bfloat16, as are their products, which are
        added in float32. More inputs, and those that need a gradient, are multiplied in float32.
    """
    count = inputs.numel() // inputs.shape[-1]
    few = 0 < count <= FEW_ROWS[scheme] and not (inputs.requires_grad and torch.is_grad_enabled())
    return (fused if few else dense)(inputs, codes, scale, scheme, block_size)


def fused(inputs: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scheme: str, block_size: int) -> torch.Tensor:
    """Multiply as `multiply` does few rows."""
    rows = _aligned(inputs.bfloat16().reshape(-1, inputs.shape[-1]))
    if scheme == "int4":
        product = _ATEN._weight_int4pack_mm_for_cpu(rows, codes, block_size, scale.contiguous())
    elif scheme == "int8":
        # Ones in place of scales, which the kernel would want in bfloat16.
        product = torch._weight_int8pack_mm(rows, codes, _ones(len(codes))) * scale[:, 0]
    else:
        product = _without_onednn(functional.linear, rows, codes)
    product = product.float() if inputs.dtype == torch.float32 else product.bfloat16()
    found: torch.Tensor = product.view(*inputs.shape[:-1], len(codes))
    return found


def dense(inputs: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scheme: str, block_size: int) -> torch.Tensor:
    """Multiply as `multiply` does many rows."""
    rows = inputs.float()
    if scheme == "bfloat16":
        product = functional.linear(rows, codes.float())
    elif scheme == "int8":
        product = functional.linear(rows, codes.float()) * scale[:, 0]
    else:
        blocks = _ordered(codes, torch.float32).view(-1, block_size, len(codes))
        product = rows @ blocks.sub_(8).mul_(scale[:, None, :, 0].float()).flatten(0, 1)
    return product.to(inputs.dtype)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps that starts where the kernels' loads may; one out of the middle of a file may not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 64 else tensor


def _ordered(codes: torch.Tensor, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return int4 codes out of PyTorch's packing, one an element, transposed: ``[columns, rows]``."""
    layout = _layout()
    assert layout is not None, "packed only where the layout is known"
    panel, order = layout
    rows, half = codes.shape
    packed = codes.view(rows // panel, 2 * half, panel // 2)
    found = codes.new_empty(2 * half, rows // panel, 2, panel // 2, dtype=dtype)
    found[:, :, 0] = (packed & 15).transpose(0, 1)
    found[:, :, 1] = (packed >> 4).transpose(0, 1)
    found = found.view(2 * half, -1, panel)
    return (found if order is None else found[..., order]).flatten(1)


@cache
def _layout() -> tuple[int, torch.Tensor | None] | None:
    """Find out how PyTorch packs int4 on this processor, by packing the numbers of rows, half of their digits at a time.

    Returns
    -------
    panel, order : int, Tensor or None
        Rows that are packed together: for each column, bytes whose low halves and then whose high halves belong to the rows of
        which `order` picks them, None where they stand in order. None for both if it is packed in another way.
    """
    rows, columns = torch.arange(PANEL), 32
    digits = []
    for digit in (rows & 15, rows >> 4):
        packed = _ATEN._convert_weight_to_int4pack_for_cpu(digit.int()[:, None].repeat(1, columns), 1).flatten()
        digits.append((packed & 15, packed >> 4))
    low, high = (digits[0][half].long() + 16 * digits[1][half].long() for half in (0, 1))
    for panel in (64, 32, 16):
        shape = (PANEL // panel, columns, panel // 2)
        found = torch.cat((low.view(shape), high.view(shape)), -1)
        places = found[0, 0].argsort()
        expected = found[0, 0] + torch.arange(0, PANEL, panel)[:, None, None]
        if torch.equal(found[0, 0][places], rows[:panel]) and torch.equal(found, expected.expand_as(found)):
            return panel, None if torch.equal(places, rows[:panel]) else places
    return None


@cache
def _trusted(scheme: str) -> bool:
    """Compare the fused kernel with the plain product once in a process: it is no public part of PyTorch."""
    columns, block_size, blocks = (64, 64, 1) if scheme == "int8" else (128, 32, 4)
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2 * PANEL, 64), generator=draw, dtype=torch.uint8)
    scale = torch.rand(2 * PANEL, blocks, generator=draw).bfloat16().float()
    stored = codes.view(torch.int8) if scheme == "int8" else codes
    weight = QuantizedTensor(scheme, torch.Size((2 * PANEL, columns)), torch.float32, block_size, stored, scale)
    inputs = torch.randn(4, columns, generator=draw)
    try:
        if scheme == "int4" and _layout() is None:
            return False
        packed = pack(weight)
        if scheme == "int4" and not all(map(torch.equal, unpack_int4(*packed), (codes, scale))):
            return False
        fused = torch.cat([multiply(rows, *packed, scheme, block_size) for rows in (inputs[:1], inputs[1:])])
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = inputs.double() @ weight.dequantize(torch.float64).T
    return bool((fused - exact).norm() < 0.01 * exact.norm())


@cache
def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def _without_onednn(call: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    """Call while PyTorch does without oneDNN, which copies a bfloat16 weight into an order of its own each time it multiplies."""
    backend: Any = torch._C
    before = backend._get_mkldnn_enabled()
    backend._set_mkldnn_enabled(False)
    try:
        return call(*arguments)
    finally:
        backend._set_mkldnn_enabled(before)
