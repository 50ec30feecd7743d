"""A linear layer whose weight is stored quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from course_lib.quantization.llm_int8 import int8_linear
from course_lib.quantization.tensor import TENSORS, QuantizedTensor


class QuantizedLinear(nn.Module):
    """``x @ weight.T + bias`` with a quantised weight, which is dequantised for each product.

    Parameters
    ----------
    weight : QuantizedTensor
        ``[out_features, in_features]``. Its tensors become buffers, so they move and are saved with the model; a change of
        dtype leaves them as they are.
    bias : Tensor, optional
        ``[out_features]``, in floating point.
    threshold : float, optional
        Multiply as LLM.int8() does, with this threshold of outliers; the weight must be int8 with a scale a row.

    Notes
    -----
    Results are in the inputs' dtype. Gradients reach the inputs and the bias, not the weight.
    """

    codes: torch.Tensor

    def __init__(
        self, weight: QuantizedTensor, bias: torch.Tensor | None = None, *, threshold: float | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.scheme, self.block_size, self.threshold = weight.scheme, weight.block_size, threshold
        self._dtype = weight.dtype
        for name in TENSORS:
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)

    @property
    def weight(self) -> QuantizedTensor:
        """The weight; its dtype is what the model was last cast to, and what `QuantizedTensor.dequantize` returns."""
        shape = torch.Size((self.out_features, self.in_features))
        return QuantizedTensor(
            self.scheme, shape, self._dtype, self.block_size, *(getattr(self, name) for name in TENSORS)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for inputs ``[..., in_features]``."""
        if self.threshold is not None:
            return int8_linear(inputs, self.weight, self.bias, threshold=self.threshold)
        return functional.linear(inputs, self.weight.dequantize(inputs.dtype), self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        # Module.to(dtype) casts every floating buffer. Scales rounded to 16 bits would be another quantisation.
        before = {name: self._buffers[name] for name in TENSORS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.codes.device)).dtype
        for name, kept in before.items():
            now = self._buffers[name]
            if kept is not None and now is not None and now.dtype != kept.dtype:
                self._buffers[name] = kept.to(now.device)
        return self

    def extra_repr(self) -> str:
        """Say what the layer is, in ``print(model)``."""
        llm = "" if self.threshold is None else f", LLM.int8() from {self.threshold}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme}, block_size={self.block_size}{llm}"
        )
