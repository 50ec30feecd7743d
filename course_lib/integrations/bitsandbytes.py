"""bitsandbytes beside ours: models that it quantises, in a few lines, and their layers exchanged for ours.

`from_bitsandbytes` and `to_bitsandbytes` convert single weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from course_lib.integrations.bitsandbytes_layers import (
    as_dtype,
    check_on_cpu,
    empty_layer,
    from_bitsandbytes,
    import_bitsandbytes,
    silence_cast_warning,
    to_bitsandbytes,
)
from course_lib.quantization.functional import check_tensor
from course_lib.quantization.linear import QuantizedLinear
from course_lib.quantization.llm_int8 import THRESHOLD
from course_lib.quantization.model import choose_layers, matrix, replace_module
from course_lib.quantization.tensor import TABLE_SCHEMES

__all__ = [
    "bitsandbytes_model_bytes",
    "check_on_cpu",
    "from_bitsandbytes",
    "load_with_bitsandbytes",
    "quantize_with_bitsandbytes",
    "replace_bitsandbytes",
    "silence_cast_warning",
    "to_bitsandbytes",
]

SCHEMES = ("int8", *TABLE_SCHEMES)
M = TypeVar("M", bound=nn.Module)


def load_with_bitsandbytes(
    name: str,
    scheme: str,
    *,
    double_quant: bool = False,
    compute_dtype: str | torch.dtype | None = None,
    threshold: float = THRESHOLD,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """Load a model that bitsandbytes quantises on the way, by Transformers' ``BitsAndBytesConfig``.

    Parameters
    ----------
    name : str
        ``"smollm2-135m"``, which never asks the hub; a hub id; or a folder that ``save_pretrained`` wrote.
    scheme : {"int8", "nf4", "fp4"}
        LLM.int8(), or four bits in blocks of 64.
    double_quant : bool
        With four bits: store the scales in 8 bits.
    compute_dtype : str or torch.dtype, optional
        With four bits: what weights are dequantised to for a product; by default `dtype`.
    threshold : float
        With int8: magnitude from which an activation is an outlier; 0 multiplies all in int8.
    dtype : str or torch.dtype, optional
        Of what is not quantised; by default what `course_lib.machine.choose` says.
    device : str or torch.device, optional
        By default what `course_lib.machine.choose` says.

    Returns
    -------
    model : transformers.PreTrainedModel
        In evaluation mode. Its output head, embeddings, norms and biases are not quantised.
    tokenizer : transformers.PreTrainedTokenizerBase

    Raises
    ------
    ImportError
        If bitsandbytes is not installed.
    ValueError
        If an option is not accepted, or bitsandbytes would multiply a layer wrongly on a CPU (see `check_on_cpu`).
    OSError
        If Transformers finds no such model.

    Notes
    -----
    Chapter 04 measures what it gives.
    """
    import_bitsandbytes()
    _check_scheme(scheme, double_quant)
    from transformers import BitsAndBytesConfig

    from course_lib.machine import choose
    from course_lib.models.zoo import PACKAGED, fetch, own_memory, read

    chosen = choose()
    rest, place = as_dtype(dtype, "dtype") or chosen.dtype, chosen.device if device is None else torch.device(device)
    if scheme == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=scheme,
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=as_dtype(compute_dtype, "compute_dtype") or rest,
        )
    packaged = name == PACKAGED
    source = str(fetch(name)) if packaged else name
    with torch.compiler.set_stance("force_eager"):
        model, tokenizer = read(
            source, ask_hub=not packaged, dtype=rest, device_map={"": place}, quantization_config=config
        )
    for module_name, module in model.named_modules():
        if place.type == "cpu" and getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            check_on_cpu(module_name, module.weight.quant_state.shape)
    if place.type == "cpu":
        own_memory(model)
    return model.eval(), tokenizer


def quantize_with_bitsandbytes(
    model: M,
    scheme: str,
    *,
    double_quant: bool = False,
    compute_dtype: str | torch.dtype | None = None,
    threshold: float = THRESHOLD,
    skip: Iterable[str] = ("lm_head",),
) -> M:
    """Replace the linear layers of a model in memory by bitsandbytes' own, in place.

    For models that ``from_pretrained`` cannot load, such as a `DecoderLM`.

    Parameters
    ----------
    model : nn.Module
        Any; the layers are those that `course_lib.quantization.quantize_model` would take, on the model's device.
    scheme, double_quant, threshold
        As for `load_with_bitsandbytes`.
    compute_dtype : str or torch.dtype, optional
        As there; by default bitsandbytes takes the dtype of the first inputs.
    skip : iterable of str
        Names of modules to leave alone, as for `quantize_model`.

    Returns
    -------
    nn.Module
        `model`.

    Raises
    ------
    ImportError, TypeError, ValueError
        If bitsandbytes is not installed, or an option or a weight is not accepted; the model is then as it was.
    """
    bnb = import_bitsandbytes()
    _check_scheme(scheme, double_quant)
    as_dtype(compute_dtype, "compute_dtype")
    targets, _ = choose_layers(model, [skip] if isinstance(skip, str) else list(skip), tied=False)
    weights = {}
    for name, module in targets.items():
        weights[name] = matrix(module)
        check_tensor(weights[name], f"{name}.weight")
        if scheme != "int8" and weights[name].device.type == "cpu":
            check_on_cpu(name, weights[name].shape)
    for name, module in targets.items():
        weight = weights.pop(name)
        layer = empty_layer(bnb, scheme, weight.shape, module.bias, double_quant, compute_dtype, threshold)
        if scheme == "int8":
            # It quantises on the way from the CPU to a device, and only there.
            stored = bnb.nn.Int8Params(weight.cpu(), requires_grad=False)
        else:
            options = {"compress_statistics": double_quant, "quant_type": scheme, "module": layer}
            stored = bnb.nn.Params4bit(weight, requires_grad=False, **options)
        with torch.compiler.set_stance("force_eager"):
            layer.weight = stored.to(weight.device)
        replace_module(model, module, layer)
    return model


def replace_bitsandbytes(model: M) -> M:
    """Replace bitsandbytes' layers of a model by `QuantizedLinear` with the same codes and scales, in place.

    Parameters
    ----------
    model : nn.Module
        As `load_with_bitsandbytes` or `quantize_with_bitsandbytes` leaves it.

    Returns
    -------
    nn.Module
        `model`, which needs bitsandbytes no longer, and which `course_lib.quantization.save_quantized` writes.

    Raises
    ------
    ImportError, TypeError, ValueError
        If bitsandbytes is not installed, or a layer not quantised yet, or the model has none; it is then as it was.
    """
    bnb = import_bitsandbytes()
    theirs = [module for module in model.modules() if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))]
    if not theirs:
        raise ValueError("model has no layer of bitsandbytes; load_with_bitsandbytes makes some")
    weights = [from_bitsandbytes(layer) for layer in theirs]
    for layer, weight in zip(theirs, weights, strict=True):
        # A threshold of 0 keeps no column apart there, and an infinite one none here.
        threshold = (layer.state.threshold or math.inf) if weight.scheme == "int8" else None
        replace_module(model, layer, QuantizedLinear(weight, layer.bias, threshold=threshold))
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    return model


def bitsandbytes_model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model, with those that bitsandbytes keeps beside its parameters: scales and tables.

    ``model.get_memory_footprint()`` and `course_lib.quantization.model_bytes` see parameters and buffers alone, which leaves
    out half a bit for each four-bit weight.
    """
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        weight = getattr(module, "weight", None)
        for holder in (weight, getattr(module, "state", None)):
            tensors.append(getattr(holder, "SCB", None))
        state = getattr(weight, "quant_state", None)
        for holder in (state, getattr(state, "state2", None)):
            tensors += [getattr(holder, name, None) for name in ("absmax", "code", "offset")]
    return sum({(t.data_ptr(), t.dtype): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}.values())


def _check_scheme(scheme: Any, double_quant: bool) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; accepted are {', '.join(SCHEMES)}")
    if double_quant and scheme == "int8":
        raise ValueError("double_quant=True is for nf4 and fp4, not int8")
