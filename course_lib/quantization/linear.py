"""Layers whose weights are stored quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from course_lib.quantization import cpu
from course_lib.quantization.llm_int8 import int8_linear
from course_lib.quantization.table import tables
from course_lib.quantization.tensor import TENSORS, QuantizedTensor

#: The most rows that the kernel for cards multiplies; with more, the weight is dequantised for PyTorch's product.
FEW_ROWS_ON_A_CARD = 16


class _Quantized(nn.Module):
    """Holds a `QuantizedTensor`: its tensors as buffers, or codes in bfloat16, which layers may share, as a parameter."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.block_size = weight.scheme, weight.block_size
        self._shape, self._dtype = weight.shape, weight.dtype
        for name in TENSORS:
            if name == "codes" and weight.scheme == "bfloat16":
                self.codes = nn.Parameter(weight.codes, requires_grad=False)
            else:
                self.register_buffer(name, getattr(weight, name))

    @property
    def weight(self) -> QuantizedTensor:
        """The weight; its dtype is what the model was last cast to, and what `QuantizedTensor.dequantize` returns."""
        stored = {name: getattr(self, name) for name in TENSORS}
        if self.scheme == "bfloat16":
            stored["codes"] = stored["codes"].detach()
        return QuantizedTensor(self.scheme, self._shape, self._dtype, self.block_size, **stored)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> _Quantized:
        # Module.to(dtype) casts all that is floating. Scales rounded to 16 bits would be another quantisation.
        before = {name: tensor.detach() for name in TENSORS if (tensor := getattr(self, name)) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.codes.device)).dtype
        for name, kept in before.items():
            now = getattr(self, name)
            if now.dtype != kept.dtype:
                now.data = kept.to(now.device)
        return self


class QuantizedLinear(_Quantized):
    """``x @ weight.T + bias`` with a quantised weight.

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

    Few rows are multiplied by the codes themselves where there is a kernel for it: on a CPU with bfloat16, symmetric int8 with a
    scale a row and symmetric int4 in blocks of 32, 64, 128 or 256, which round inputs to bfloat16 (`course_lib.quantization.cpu`
    lists the sizes); on a card with `course_lib.kernels.quantized_matmul`. Otherwise the weight is dequantised for each product.
    """

    def __init__(
        self, weight: QuantizedTensor, bias: torch.Tensor | None = None, *, threshold: float | None = None
    ) -> None:
        super().__init__(weight)
        self.out_features, self.in_features = weight.shape
        self.threshold = threshold
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        #: Whether the buffers are in the form that products on the CPU want.
        self.packed = False
        self._joint: _Joint | None = None
        self._pack()

    @property
    def weight(self) -> QuantizedTensor:
        """The weight; its dtype is what the model was last cast to, and what `QuantizedTensor.dequantize` returns."""
        if self.packed and self.scheme == "int4":
            codes, scale = cpu.unpack_int4(self.codes, self.scale)
            return QuantizedTensor(self.scheme, self._shape, self._dtype, self.block_size, codes, scale)
        return super().weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for inputs ``[..., in_features]``."""
        if self.threshold is not None:
            return int8_linear(inputs, self.weight, self.bias, threshold=self.threshold)
        if self._multiplies(inputs):
            product = cpu.multiply(inputs, self.codes, self.scale, self.scheme, self.block_size)
            return product if self.bias is None else product + self.bias
        if inputs.is_cuda and inputs.numel() <= FEW_ROWS_ON_A_CARD * self.in_features:
            found = self._on_card(inputs)
            if found is not None:
                return found
        return functional.linear(inputs, self.weight.dequantize(inputs.dtype), self.bias)

    def _multiplies(self, inputs: torch.Tensor) -> bool:
        return self.packed and inputs.dtype in cpu.INPUTS and inputs.shape[-1] == self.in_features and inputs.is_cpu

    def _on_card(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the product of the kernel for cards, or None where it cannot run."""
        try:
            from course_lib.kernels.quantized_matmul import quantized_matmul, quantized_matmul_refusal
        except ImportError:  # there is no Triton for this machine
            return None
        if not inputs.numel() or quantized_matmul_refusal(inputs, self.scheme, self.bias):
            return None
        weight = self.weight
        options: dict[str, Any] = {"scheme": self.scheme, "shape": self._shape, "block_size": self.block_size}
        options |= weight.tensors | tables(self.scheme, weight.scale_absmax is not None, inputs.device)
        found: torch.Tensor = quantized_matmul(inputs, bias=self.bias, **options)
        return found

    # ---- the form of the buffers

    def _place(self) -> int:
        return (self._parameters if self.scheme == "bfloat16" else self._buffers)["codes"].data_ptr()  # type: ignore[union-attr, unused-ignore]

    def _pack(self) -> None:
        """Bring the buffers into the form for products on this machine's CPU, if it has one."""
        if self.threshold is None and not self.packed and cpu.takes(self.weight):
            self._keep(*cpu.pack(self.weight))
            self.packed = True

    def _unpack(self) -> None:
        weight, self.packed, self._joint = self.weight, False, None
        self._keep(weight.codes, weight.scale)

    def _keep(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        if isinstance(self.codes, nn.Parameter):
            self.codes.data = codes
        else:
            self.codes, self.scale = codes, scale

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        if self.packed and fn(torch.empty(0, device=self.codes.device)).device.type != "cpu":
            self._unpack()
        super()._apply(fn, recurse)
        self._pack()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packed and self.scheme == "int4":
            weight = self.weight
            destination[f"{prefix}codes"], destination[f"{prefix}scale"] = weight.codes, weight.scale

    def _load_from_state_dict(self, *arguments: Any) -> None:
        if self.packed:
            self._unpack()
        super()._load_from_state_dict(*arguments)
        self._pack()

    def __getstate__(self) -> dict[str, Any]:
        # What is packed for this processor may not be for the one that reads a pickle.
        state, weight = self.__dict__.copy(), self.weight
        if self.packed and self.scheme == "int4":
            state["_buffers"] = self._buffers | {"codes": weight.codes, "scale": weight.scale}
        return state | {"packed": False, "_joint": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))  # type: ignore[no-untyped-call]
        self._pack()

    def extra_repr(self) -> str:
        """Say what the layer is, in ``print(model)``."""
        llm = "" if self.threshold is None else f", LLM.int8() from {self.threshold}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme}, block_size={self.block_size}{llm}"
        )


class QuantizedEmbedding(_Quantized):
    """A table of embeddings in bfloat16, whose rows come out in the dtype that the model was last cast to.

    Parameters
    ----------
    weight : QuantizedTensor
        ``[num_embeddings, embedding_dim]``, of scheme ``"bfloat16"``.
    """

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ``[..., embedding_dim]`` for integers ``[...]``."""
        return functional.embedding(ids, self.codes).to(self._dtype)

    def extra_repr(self) -> str:
        """Say what the layer is, in ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme}"


class _Joint:
    """The weights of several layers in one storage, of which theirs become parts."""

    def __init__(self, layers: tuple[QuantizedLinear, ...]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.scheme, self.block_size = layers[0].scheme, layers[0].block_size
        self.biased = any(layer.bias is not None for layer in layers)
        self.codes = torch.cat([layer.codes for layer in layers])
        rows = 1 if layers[0].scheme == "int4" else 0
        self.scale = torch.cat([layer.scale for layer in layers], rows)
        scales = self.scale.split_with_sizes(self.sizes, rows) if self.scale.numel() else [self.scale] * len(layers)
        for layer, codes, scale in zip(layers, self.codes.split_with_sizes(self.sizes), scales, strict=True):
            layer._keep(codes, scale)
        self.places = [layer._place() for layer in layers]


def together(inputs: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return what each of several linear layers makes of the same inputs, by one product where their weights allow it.

    One product of a few rows is faster than several: each has a fixed cost, which is much of a small one's time. Layers that are
    quantised alike are brought into one storage at the first call; it takes no more memory, and what they compute is the same.

    Parameters
    ----------
    inputs : Tensor
        ``[..., in_features]``.
    layers : nn.Module
        Linear layers, quantised or not.

    Returns
    -------
    tuple of Tensor
        ``[..., out_features]`` of each.
    """
    joint = _join(inputs, layers)
    if joint is None:
        return tuple(layer(inputs) for layer in layers)
    product = cpu.multiply(inputs, joint.codes, joint.scale, joint.scheme, joint.block_size)
    parts = product.split_with_sizes(joint.sizes, -1)
    if not joint.biased:
        return parts
    biases: list[Any] = [layer.bias for layer in layers]
    return tuple(part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True))


def _join(inputs: torch.Tensor, layers: tuple[nn.Module, ...]) -> _Joint | None:
    quantised = cast(tuple[QuantizedLinear, ...], layers)
    if any(type(layer) is not QuantizedLinear or layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return None
    if not quantised[0]._multiplies(inputs):
        return None
    joint = quantised[0]._joint
    # A weight that was moved or loaded since is no longer where the joint one holds it.
    if joint is None or joint.places != [layer._place() for layer in quantised]:
        kinds = {(layer.packed, layer.scheme, layer.block_size, layer.in_features) for layer in quantised}
        joint = quantised[0]._joint = _Joint(quantised) if len(kinds) == 1 else None
    return joint
