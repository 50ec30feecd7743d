"""A quantised tensor: codes, what scales them, and how to get values back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from course_lib.quantization.packing import unpack

#: The bits of a code, and what the codes of each scheme are: steps of an even grid, or places in a table.
INTEGER_BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
TABLE_SCHEMES = ("nf4", "fp4")
SCHEMES = (*INTEGER_BITS, *TABLE_SCHEMES)


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """Codes and scales that stand for a floating-point tensor; `quantize` makes it.

    Attributes
    ----------
    scheme : str
        ``"int8"``, ``"int4"``, ``"int3"``, ``"int2"``, ``"nf4"`` or ``"fp4"``; ``"bfloat16"`` in layers of `quantize_model`.
    shape : torch.Size
        Of the tensor it stands for.
    dtype : torch.dtype
        Of the tensor it stands for, and what `dequantize` returns.
    block_size : int
        How many neighbours share a scale.
    codes : Tensor
        int8 and int2 to int4: ``[rows, bytes]``, each row packed for itself, in int8 signed and below in uint8. NF4 and FP4:
        uint8 ``[bytes]``, the flattened tensor with two codes a byte, bitsandbytes' layout without its last axis of 1. bfloat16:
        the values themselves, in the tensor's shape.
    scale : Tensor
        What a code is multiplied by. Integer schemes: float32 ``[rows, blocks]``, the size of a step. NF4 and FP4: ``[blocks]``,
        the largest magnitude of a block, float32, or uint8 codes under double quantisation. bfloat16: empty.
    zero_point : Tensor, optional
        The code of 0, like `scale` in shape and like `codes` in dtype; None where the grid is symmetric.
    scale_absmax, scale_offset : Tensor, optional
        Under double quantisation, float32 ``[ceil(blocks / 256)]`` and ``[]``: what scales the scales, and their mean.
    """

    scheme: str
    shape: torch.Size
    dtype: torch.dtype
    block_size: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None
    scale_absmax: torch.Tensor | None = None
    scale_offset: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is stored, by name."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def bits_per_value(self) -> float:
        """Stored bits for each value of the tensor it stands for, scales included; 0 for an empty tensor."""
        return 8 * self.nbytes / max(self.shape.numel(), 1)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """Return the same on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, **moved)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values that the codes stand for.

        Parameters
        ----------
        dtype : torch.dtype, optional
            Of the result; by default of the tensor that was quantised. Values are computed in float32 and rounded once.

        Returns
        -------
        Tensor
            `shape`, contiguous.
        """
        dtype = dtype or self.dtype
        if self.scheme == "bfloat16":
            return self.codes.to(dtype, copy=True).view(self.shape)
        # Imported late because both modules build this class.
        from course_lib.quantization import integer, table

        values: Callable[[QuantizedTensor], torch.Tensor] = (
            table.dequantize if self.scheme in TABLE_SCHEMES else integer.dequantize
        )
        if not self.shape.numel():
            return torch.zeros(self.shape, dtype=dtype, device=self.device)
        # A step that reaches beyond the largest value of the tensor may reach beyond the largest of its dtype.
        limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        return values(self).clamp_(-limit, limit).to(dtype).view(self.shape)

    @classmethod
    def in_bfloat16(cls, tensor: torch.Tensor) -> QuantizedTensor:
        """Return a tensor rounded to bfloat16, whatever its dtype; values beyond the largest stop there."""
        limit = torch.finfo(torch.bfloat16).max
        codes = tensor.detach().clamp(-limit, limit).to(torch.bfloat16).contiguous()
        return cls("bfloat16", tensor.shape, tensor.dtype, 1, codes, torch.empty(0, device=tensor.device))

    def unpacked(self) -> torch.Tensor:
        """Return the codes one an element: ``[rows, columns]``, or ``[values]`` for NF4 and FP4; uint8, of int8 int8."""
        if self.scheme in TABLE_SCHEMES:
            return unpack(self.codes, 4, self.shape.numel())
        rows = self.scale.shape[0]
        return unpack(self.codes, INTEGER_BITS[self.scheme], self.shape.numel() // rows if rows else 0)

    def __repr__(self) -> str:
        double = ", double quantisation" if self.scale_absmax is not None else ""
        zero = ", zero-point" if self.zero_point is not None else ""
        return (
            f"QuantizedTensor({self.scheme}, {list(self.shape)}, blocks of {self.block_size}{zero}{double}, "
            f"{self.nbytes} bytes for {str(self.dtype).removeprefix('torch.')})"
        )


TENSORS = tuple(f.name for f in fields(QuantizedTensor))[4:]
