"""Products of few tokens with float32 weights on a CPU, and the order of weights in memory that makes them fast.

A token uses each weight once, so reading them takes the time. PyTorch multiplies a single row on one core, and half as fast if the
weights lie output by output. Here most lie input by input, those with the same inputs side by side, and a product is cut into parts
that all cores share. Only strides tell of it: shapes, values and sharing of the parameters are as they were.

For some rows more, PyTorch copies all weights into an order of its own first. Parts that fit into a core's cache it multiplies as they
lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from course_lib.quantization.linear import together

#: The most rows that are multiplied in parts, beyond which PyTorch's own way is as fast, and the most outputs of a part.
FEW_ROWS, WIDEST = 128, 192


def lay_out(*layers: nn.Module) -> None:
    """Bring the weights of linear layers with the same inputs into the order for a single row.

    Weights with fewer outputs than inputs lie output by output, for that is faster then.

    Parameters
    ----------
    layers : nn.Module
        Nothing happens unless each is a plain ``nn.Linear`` in float32 on the CPU.
    """
    linear: Any = layers
    if any(type(layer) is not nn.Linear or not _fits(layer.weight) for layer in linear):
        return
    sizes = [layer.out_features for layer in linear]
    if sum(sizes) < linear[0].in_features:
        for layer in linear:
            layer.weight.data = layer.weight.data.contiguous()
        return
    outputs, width = sum(sizes), linear[0].in_features
    # Rows that are a multiple of 1 KiB apart would push one another out of the processor's cache: then a line more lies between.
    joint = torch.empty(width, outputs if outputs % 256 else outputs + 16, dtype=torch.float32, device="cpu")[
        :, :outputs
    ]
    for layer, part in zip(linear, joint.split_with_sizes(sizes, 1), strict=True):
        layer.weight.data = part.copy_(layer.weight.detach().t()).t()


def product(inputs: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return what each of several linear layers makes of the same inputs, by one product where their weights allow it.

    Parameters and result are those of :func:`course_lib.quantization.linear.together`, which serves quantised layers.

    Notes
    -----
    Only products of which no gradient is asked are changed.
    """
    if _planned(inputs):
        rows = inputs.numel() // inputs.shape[-1]
        if 0 < rows <= FEW_ROWS or len(layers) > 1:
            plan = _plan(layers)
            if plan is not None and plan.weight is not None:
                return plan.product(inputs, rows, layers)
    return together(inputs, *layers) if len(layers) > 1 else (layers[0](inputs),)


def is_single(hidden: torch.Tensor) -> bool:
    """Tell whether this is one token ``[1, 1, width]`` in float32 on a CPU, of which no gradient is asked."""
    return hidden.shape[:-1] == (1, 1) and _planned(hidden)


def forget_plans(model: nn.Module) -> None:
    """Let go of the views of weights that `product` keeps with layers."""
    for module in model.modules():
        module.__dict__.pop("_plan", None)


class _Plan:
    """Weights of layers that lie in memory as one, and how their product is cut; kept with the first layer.

    Attributes
    ----------
    places, threads
        What it was made for: each weight's address, and the number of cores.
    weight : Tensor or None
        ``[out_features, in_features]``, a view of the layers' own, if they lie as one.
    single : Tensor
        The same for a single row, ``[parts, in_features, out_features]``. Each part takes a share of the inputs, and results are
        added, or it makes a share of the outputs.
    few : Tensor or None
        For few rows, in parts that make a share of the outputs each; None where their number has no divisor of that size.
    """

    def __init__(self, layers: tuple[Any, ...], places: list[int]) -> None:
        self.places, self.threads = places, torch.get_num_threads()
        self.sizes = [layer.out_features for layer in layers]
        self.biased = any(layer.bias is not None for layer in layers)
        self.weight: torch.Tensor | None = None
        first, width, outputs = layers[0].weight.detach(), layers[0].in_features, sum(self.sizes)
        outer, inner = first.stride()
        before = 0
        for layer, place in zip(layers, places, strict=True):
            if not _fits(layer.weight) or layer.weight.stride() != (outer, inner) or place != places[0] + 4 * before:
                return
            before += layer.out_features
        self.shared = outer == 1 and (len(layers) == 1 or inner >= outputs)
        if not self.shared and (inner != 1 or len(layers) > 1):
            return
        self.weight = first.as_strided((outputs, width), (outer, inner))
        # As many parts as there are cores, if they divide the size.
        size = width if self.shared else outputs
        parts = next(n for n in range(self.threads, 0, -1) if size % n == 0)
        if self.shared:
            self.single = self.weight.t().unflatten(0, (parts, -1))
        else:
            self.single = self.weight.unflatten(0, (parts, -1)).transpose(1, 2)
        shares = [n for n in range(WIDEST, 63, -16) if outputs % n == 0] if torch.backends.mkl.is_available() else []  # type: ignore[no-untyped-call]
        share = next((n for n in shares if outputs // n % self.threads == 0), next(iter(shares), None))
        self.few = None if share is None else self.weight.unflatten(0, (-1, share)).transpose(1, 2)

    def product(self, inputs: torch.Tensor, rows: int, layers: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Multiply ``[..., in_features]``, so many rows."""
        assert self.weight is not None
        if inputs.shape[:-1] == (1, 1):
            parts = len(self.single)
            if self.shared:
                found = torch.bmm(inputs.view(parts, 1, -1), self.single)
                found = found.sum(0, keepdim=True) if parts > 1 else found
            else:
                found = torch.bmm(inputs.expand(parts, 1, -1), self.single).view(1, 1, -1)
        elif self.few is not None and 0 < rows <= FEW_ROWS:
            parted = torch.bmm(inputs.reshape(1, rows, -1).expand(len(self.few), -1, -1), self.few)
            found = parted.transpose(0, 1).reshape(*inputs.shape[:-1], -1)
        else:
            found = functional.linear(inputs, self.weight)
        outputs = found.split_with_sizes(self.sizes, -1) if len(layers) > 1 else (found,)
        if not self.biased:
            return outputs
        return tuple(out if one.bias is None else out + one.bias for out, one in zip(outputs, layers, strict=True))

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the layers has weights of its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


def _planned(inputs: torch.Tensor) -> bool:
    return _fits(inputs) and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu


def _plan(layers: tuple[nn.Module, ...]) -> _Plan | None:
    """Return the plan for layers, or None if something else is to multiply: a quantised layer, or one with hooks."""
    places = []
    for layer in layers:
        if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        places.append(layer._parameters["weight"].data_ptr())  # type: ignore[union-attr]
    plan: _Plan | None = layers[0].__dict__.get("_plan")
    # While a plan holds its weights, no others can have their address.
    if plan is None or plan.places != places or plan.threads != torch.get_num_threads():
        plan = layers[0].__dict__["_plan"] = _Plan(layers, places)
    return plan
