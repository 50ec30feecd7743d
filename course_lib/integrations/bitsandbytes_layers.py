"""A layer of bitsandbytes and a `QuantizedTensor` of ours: the same codes and scales, either way."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from course_lib.quantization.functional import DTYPES
from course_lib.quantization.levels import dynamic_levels
from course_lib.quantization.llm_int8 import THRESHOLD
from course_lib.quantization.table import SCALE_BLOCK, levels
from course_lib.quantization.tensor import TABLE_SCHEMES, QuantizedTensor

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def from_bitsandbytes(layer: nn.Module) -> QuantizedTensor:
    """Return the weight of a bitsandbytes layer as ours, codes and scales as they are.

    Parameters
    ----------
    layer : bitsandbytes.nn.Linear4bit or Linear8bitLt
        Quantised, that is, moved to a device.

    Returns
    -------
    QuantizedTensor
        On the layer's device, sharing its memory where the layout is the same. An int8 weight's dtype is float16, which
        bitsandbytes rounds to before it quantises.

    Raises
    ------
    TypeError
        If the layer is none of the two, or not quantised yet.

    Notes
    -----
    On a CPU with AVX512-BF16 bitsandbytes rounds the scales of four-bit weights to bfloat16 at the first forward pass and
    undoes double quantisation. Convert before it for the scales that it quantised to; after it they are those that it
    multiplies by.
    """
    weight = getattr(layer, "weight", None)
    state = getattr(weight, "quant_state", None)
    if isinstance(weight, torch.Tensor) and state is not None:
        return _from_four_bits(weight.data, state)
    absmax = getattr(weight, "SCB", None)
    if absmax is None:
        absmax = getattr(getattr(layer, "state", None), "SCB", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.int8 or absmax is None:
        raise TypeError(f"layer is {type(layer).__name__}; a quantised Linear4bit or Linear8bitLt is needed")
    return QuantizedTensor(
        "int8", weight.shape, torch.float16, weight.shape[1], weight.data, absmax.float().view(-1, 1) / 127
    )


def to_bitsandbytes(
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    compute_dtype: str | torch.dtype | None = None,
    threshold: float = THRESHOLD,
) -> nn.Module:
    """Return a bitsandbytes layer that has our codes and scales.

    Parameters
    ----------
    weight : QuantizedTensor
        ``[out_features, in_features]``: NF4 or FP4 in blocks of a size that bitsandbytes has, or int8 with one symmetric scale
        a row.
    bias : Tensor, optional
        ``[out_features]``.
    compute_dtype, threshold
        As for `quantize_with_bitsandbytes`.

    Returns
    -------
    bitsandbytes.nn.Linear4bit or Linear8bitLt
        On the weight's device, in evaluation mode; `from_bitsandbytes` gives the weight back, exactly.

    Raises
    ------
    ImportError, ValueError
        If bitsandbytes is not installed, or cannot hold the weight.
    """
    bnb = import_bitsandbytes()
    rowwise = weight.scheme == "int8" and weight.zero_point is None and weight.scale.shape == (*weight.shape[:1], 1)
    if len(weight.shape) != 2 or not (rowwise or (weight.scheme in TABLE_SCHEMES and weight.block_size in BLOCK_SIZES)):
        raise ValueError(
            f"weight is {weight}; a matrix in nf4 or fp4 with blocks of {', '.join(map(str, BLOCK_SIZES))}, or in int8 with one "
            "symmetric scale a row, is what bitsandbytes holds"
        )
    double = weight.scale_absmax is not None
    layer: nn.Module = empty_layer(bnb, weight.scheme, weight.shape, bias, double, compute_dtype, threshold)
    if rowwise:
        codes = weight.codes
        layer.weight = bnb.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=_absmax(weight.scale[:, 0]))
        return layer.eval()
    if weight.device.type == "cpu":
        check_on_cpu("weight", weight.shape, weight.block_size)
    scales = None
    if double:
        scales = bnb.functional.QuantState(
            weight.scale_absmax, code=dynamic_levels().to(weight.device), blocksize=SCALE_BLOCK, dtype=torch.float32
        )
    state = bnb.functional.QuantState(
        weight.scale,
        shape=weight.shape,
        code=levels(weight.scheme).to(weight.device),
        blocksize=weight.block_size,
        quant_type=weight.scheme,
        dtype=weight.dtype,
        offset=weight.scale_offset,
        state2=scales,
    )
    layer.weight = bnb.nn.Params4bit(
        weight.codes.view(-1, 1),
        requires_grad=False,
        quant_state=state,
        blocksize=weight.block_size,
        compress_statistics=double,
        quant_type=weight.scheme,
        module=layer,
        bnb_quantized=True,
    )
    layer.quant_state = state
    return layer.eval()


def check_on_cpu(name: str, shape: Iterable[int], block_size: int = 64) -> None:
    """Raise a ValueError for a four-bit weight ``[out_features, in_features]`` that bitsandbytes would get wrong on a CPU.

    Its kernels there take a wrong scale where a row is no whole number of blocks, and some need rows in thirty-twos.
    """
    rows, columns = shape
    if columns % block_size or rows % 32:
        raise ValueError(
            f"{name} has shape {[rows, columns]}; on a CPU bitsandbytes multiplies four-bit weights rightly only where "
            f"out_features is a multiple of 32 and in_features of the block size, {block_size}"
        )


def silence_cast_warning() -> None:
    """Drop bitsandbytes' remark that int8 inputs are cast to float16, which it makes for each layer and token; no other.

    The other functions here call this; do so yourself if you use ``BitsAndBytesConfig`` without them.
    """
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_cast_warning)


def _is_no_cast_warning(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def import_bitsandbytes() -> Any:
    """Return the module bitsandbytes, its cast warning silenced, or raise an ImportError of one sentence."""
    silence_cast_warning()
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(
            "bitsandbytes is needed here and not installed; it comes with course_lib except on macOS, for which it has no build"
        ) from error
    return bitsandbytes


def as_dtype(value: Any, argument: str) -> torch.dtype | None:
    """Return a dtype given as such or by its name; None for None. Raise a ValueError that names `argument` for others."""
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if found is not None and found in DTYPES:
        return found  # type: ignore[no-any-return]
    if value is None:
        return None
    raise ValueError(f"{argument} is {value!r}; accepted are float32, float16 and bfloat16")


def empty_layer(
    bnb: Any,
    scheme: str,
    shape: torch.Size,
    bias: torch.Tensor | None,
    double_quant: bool,
    compute_dtype: str | torch.dtype | None,
    threshold: float,
) -> Any:
    """Return a layer of bitsandbytes without a weight."""
    options: dict[str, Any] = {"bias": bias is not None, "device": "meta"}
    if scheme == "int8":
        layer = bnb.nn.Linear8bitLt(shape[1], shape[0], has_fp16_weights=False, threshold=threshold, **options)
    else:
        options |= {
            "compute_dtype": as_dtype(compute_dtype, "compute_dtype"),
            "compress_statistics": double_quant,
            "quant_type": scheme,
        }
        layer = bnb.nn.Linear4bit(shape[1], shape[0], **options)
    if bias is not None:
        # A copy: bitsandbytes casts it in place to the dtype of its inputs.
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer


def _from_four_bits(packed: torch.Tensor, state: Any) -> QuantizedTensor:
    shape, size = state.shape, state.blocksize
    if getattr(state, "packing_format_for_cpu", False):
        return _from_cpu_layout(packed, state)
    codes = packed.contiguous().view(torch.uint8).view(-1)
    scales = {"scale_absmax": state.state2.absmax, "scale_offset": state.offset} if state.nested else {}
    return QuantizedTensor(state.quant_type, shape, state.dtype, size, codes, state.absmax.view(-1), **scales)


def _from_cpu_layout(packed: torch.Tensor, state: Any) -> QuantizedTensor:
    """Undo what bitsandbytes does on a CPU with AVX512-BF16: codes of 32 rows interleaved, scales ``[blocks, rows]``.

    Its own way back, which ``state_dict`` takes, returns the scales transposed (0.50.2).
    """
    rows, columns = state.shape
    pairs = packed.reshape(-1, 32)
    codes = torch.cat([pairs & 15, pairs >> 4], 1).view(rows // 32, columns // 2, 32, 2).transpose(1, 2)
    codes = codes[..., 0] << 4 | codes[..., 1]
    scale = state.absmax.T.float().reshape(-1)
    return QuantizedTensor(
        state.quant_type, state.shape, state.original_dtype, state.blocksize, codes.reshape(-1), scale
    )


def _absmax(scale: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row, so that a 127th of it is `scale` again.

    Several float32 have the same 127th, nearly; bitsandbytes' own are float16 values, so these come first.
    """
    product = scale * 127
    up, down = (product.nextafter(product.new_tensor(end)) for end in (math.inf, -math.inf))
    absmax = product
    for candidate in (down, up, product, product.half().float()):
        absmax = candidate.where(candidate / 127 == scale, absmax)
    return absmax
