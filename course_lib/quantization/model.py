"""Quantising a model in place, and saying what that changed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from course_lib.quantization.calibration import calibrate
from course_lib.quantization.functional import check_options, check_tensor, quantize
from course_lib.quantization.gptq import quantize_compensated
from course_lib.quantization.linear import QuantizedEmbedding, QuantizedLinear
from course_lib.quantization.llm_int8 import THRESHOLD
from course_lib.quantization.metrics import TensorError, tensor_error
from course_lib.quantization.tensor import INTEGER_BITS, SCHEMES, QuantizedTensor

MODEL_SCHEMES = (*SCHEMES, "llm-int8", "bfloat16")
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class LayerReport:
    """A layer that was quantised: its weight's size in bytes before and after, and what the weight lost."""

    name: str
    bytes_before: int
    bytes_after: int
    error: TensorError


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantize_model` did.

    Attributes
    ----------
    scheme : str
        As it was asked for.
    layers : tuple of LayerReport
        The layers that were quantised, in the model's order.
    left_alone : dict of str to str
        Other modules with matrices, and why they were not.
    bytes_before, bytes_after : int
        All parameters and buffers of the model, what is shared counted once.
    """

    scheme: str
    layers: tuple[LayerReport, ...]
    left_alone: dict[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        snr = [layer.error.snr_db for layer in self.layers if math.isfinite(layer.error.snr_db)]
        heard = f", signal-to-noise {min(snr):.1f} to {max(snr):.1f} dB" if snr else ""
        lines = [
            f"{self.scheme}: {len(self.layers)} layers quantised{heard}",
            f"model: {self.bytes_before:,} bytes before, {self.bytes_after:,} after",
            *(f"left alone: {name} ({reason})" for name, reason in self.left_alone.items()),
        ]
        return "\n".join(lines)


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of a model, what is shared counted once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def quantize_model(
    model: M,
    scheme: str,
    *,
    block_size: int | str | None = None,
    zero_point: bool = False,
    double_quant: bool = False,
    calibration: Iterable[Any] | None = None,
    skip: Iterable[str] = ("lm_head",),
    tied: bool = False,
    embedding: str | None = None,
) -> M:
    """Replace the linear layers of a model by quantised ones, in place.

    Parameters
    ----------
    model : nn.Module
        A `DecoderLM`, a Transformers model, or any other: ``nn.Linear`` and GPT-2's ``Conv1D`` are replaced.
    scheme : {"int8", "int4", "int3", "int2", "nf4", "fp4", "llm-int8", "bfloat16"}
        As for `quantize`; ``"llm-int8"`` stores like int8 and multiplies as LLM.int8() does; ``"bfloat16"`` rounds weights to
        bfloat16 and leaves all between the layers in the model's dtype.
    block_size : int or {"row", "tensor"}, optional
        As for `quantize`; by default a row for int8 and 64 for others.
    zero_point, double_quant : bool
        As for `quantize`.
    calibration : iterable, optional
        Batches of token ids, or mappings of the model's keyword arguments. With them integer schemes round with error
        compensation (`quantize_compensated`), layer after layer; until all is done the original weights are kept too.
    skip : iterable of str
        Names of modules to leave alone, with all in them: a whole dotted name or a run of its parts.
    tied : bool
        Also quantise layers whose weight another module shares, such as a head tied to the embedding. The other module keeps
        the weight, so this takes memory and saves time.
    embedding : {None, "bfloat16"}
        Store embedding tables in bfloat16, each together with the heads tied to it, which no other option quantises; None leaves
        them as they are. Tables in `skip` stay.

    Returns
    -------
    nn.Module
        `model`, whose attribute ``quantization_report`` is a `QuantizationReport`.

    Raises
    ------
    TypeError, ValueError
        If an option or a weight is not accepted, or nothing is left to quantise; the model is then as it was.
    """
    if scheme == "bfloat16" and (block_size is not None or zero_point or double_quant or calibration is not None):
        raise ValueError("scheme 'bfloat16' takes no block_size, zero_point, double_quant or calibration")
    if block_size is None:
        block_size = "row" if scheme in ("int8", "llm-int8") else 64
    stored = _check(scheme, block_size, zero_point, double_quant, calibration is not None)
    skip = [skip] if isinstance(skip, str) else list(skip)
    targets, left_alone = choose_layers(model, skip, tied)
    tables = _choose_tables(model, skip, embedding)
    for name, module in (targets | tables).items():
        check_tensor(module.weight, f"{name}.weight")
    before, order = model_bytes(model), list(targets)
    reports: dict[str, LayerReport] = {}

    def replace(name: str, hessian: torch.Tensor | None) -> None:
        # Taken out of the targets, so that the memory of a weight is free once its layer is quantised.
        module = targets.pop(name)
        weight = matrix(module)
        if scheme == "bfloat16":
            kept = QuantizedTensor.in_bfloat16(weight)
        elif hessian is None:
            kept = quantize(weight, stored, block_size=block_size, zero_point=zero_point, double_quant=double_quant)
        else:
            kept = quantize_compensated(weight, hessian, stored, block_size=block_size, zero_point=zero_point)
        reports[name] = LayerReport(name, weight.nbytes, kept.nbytes, tensor_error(weight, kept.dequantize()))
        linear = QuantizedLinear(kept, module.bias, threshold=THRESHOLD if scheme == "llm-int8" else None)
        replace_module(model, module, linear)

    if calibration is None:
        for name in order:
            replace(name, None)
    else:
        originals = dict(targets)
        try:
            calibrate(model, originals, calibration, replace)
        except BaseException:
            for name in originals.keys() - targets.keys():
                replace_module(model, model.get_submodule(name), originals[name])
            raise
    for name, table in tables.items():
        kept = QuantizedTensor.in_bfloat16(table.weight)
        reports[name] = LayerReport(
            name, table.weight.nbytes, kept.nbytes, tensor_error(table.weight, kept.dequantize())
        )
        left_alone |= dict.fromkeys(_put_table(model, table, kept), f"uses the table of {name}, in bfloat16")
        del left_alone[name]
    layers = tuple(reports[name] for name in (*order, *tables))
    model.quantization_report = QuantizationReport(scheme, layers, left_alone, before, model_bytes(model))  # type: ignore[assignment]
    return model


def _check(scheme: str, block_size: int | str, zero_point: bool, double_quant: bool, calibrated: bool) -> str:
    """Raise a ValueError unless the options go together; return the scheme that weights are stored in."""
    stored = "int8" if scheme == "llm-int8" else scheme
    check_options(scheme, block_size, zero_point, double_quant, MODEL_SCHEMES)
    if scheme == "llm-int8" and (block_size != "row" or zero_point):
        raise ValueError(
            "scheme 'llm-int8' has one symmetric scale a row; block_size='row' and zero_point=False are accepted"
        )
    if calibrated and stored not in INTEGER_BITS:
        raise ValueError(f"calibration is for integer schemes; {scheme} rounds without")
    if calibrated and block_size == "tensor":
        raise ValueError("block_size is 'tensor'; with calibration a whole number and 'row' are accepted")
    return stored


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is exactly a linear layer: ``nn.Linear``, or the transposed ``Conv1D`` of Transformers."""
    return type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def matrix(module: Any) -> torch.Tensor:
    """Return the weight of a linear layer as ``[out_features, in_features]``, without its gradient."""
    weight: torch.Tensor = module.weight.detach()
    return weight if isinstance(module, nn.Linear) else weight.T


def choose_layers(model: nn.Module, skip: list[str], tied: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the linear layers to quantise by name, and of other modules with matrices the reason why not; see `quantize_model`."""
    owners: dict[int, list[str]] = defaultdict(list)
    modules = {name: module for name, module in model.named_modules() if name}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    targets: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name, module in modules.items():
        matrices = [p for p in module.parameters(recurse=False) if p.ndim > 1]
        if not matrices:
            continue
        sharing = [other for p in matrices for other in owners[id(p)] if other != name]
        if not is_linear(module):
            left[name] = f"{type(module).__name__}, not a linear layer"
        elif any(f".{part}." in f".{name}." for part in skip):
            left[name] = "in skip"
        elif sharing and not tied:
            left[name] = f"shares its weight with {', '.join(sharing)}"
        else:
            targets[name] = module
    if not targets:
        why = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "it has no linear layer"
        raise ValueError(f"model has nothing to quantise ({why})")
    return targets, left


def _choose_tables(model: nn.Module, skip: list[str], embedding: str | None) -> dict[str, nn.Embedding]:
    """Return the embedding tables to store in bfloat16, by name."""
    if embedding not in (None, "bfloat16"):
        raise ValueError(f"embedding is {embedding!r}; accepted are None and 'bfloat16'")
    tables = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and module.max_norm is None and not any(f".{s}." in f".{name}." for s in skip)
    }
    if embedding is not None and not tables:
        raise ValueError("embedding is 'bfloat16', and model has no nn.Embedding outside skip")
    return {} if embedding is None else tables


def _put_table(model: nn.Module, table: nn.Embedding, weight: QuantizedTensor) -> list[str]:
    """Replace an embedding, and the linear layers that share its table; return the names of those."""
    new = QuantizedEmbedding(weight)
    heads = {name: m for name, m in model.named_modules() if is_linear(m) and m.weight is table.weight}
    for head in heads.values():
        linear = QuantizedLinear(weight, head.bias)
        linear.codes = new.codes
        replace_module(model, head, linear)
    replace_module(model, table, new)
    return list(heads)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in another's place, wherever in the model it stands."""
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if module is old:
                setattr(parent, child, new.train(old.training))
