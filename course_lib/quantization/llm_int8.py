"""LLM.int8(): products of 8-bit integers, with the few columns of large activations kept out of them.

Dettmers et al., arXiv:2208.07339; derived in chapter 03.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from course_lib.quantization.functional import check_tensor
from course_lib.quantization.tensor import QuantizedTensor

#: Magnitude from which an activation is an outlier, as in the paper.
THRESHOLD = 6.0


class VectorwiseInt8(NamedTuple):
    """A matrix with one scale a row: codes int8 ``[rows, columns]``, absmax float32 ``[rows]``, outlier columns int64 ``[n]``.

    Value = code * absmax / 127. Codes in outlier columns are 0.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    outlier_columns: torch.Tensor


def vectorwise_int8(matrix: torch.Tensor, threshold: float | None = None) -> VectorwiseInt8:
    """Quantise each row of a matrix to int8, columns with outliers left out.

    Parameters
    ----------
    matrix : Tensor
        float32, float16 or bfloat16 ``[rows, columns]``, finite.
    threshold : float, optional
        A column with a magnitude of at least this is left out; by default none is.

    Returns
    -------
    VectorwiseInt8
        Equal to bitsandbytes' ``int8_vectorwise_quant``. Values below the threshold in a column left out still count for
        their row's absmax, as they do there.

    Raises
    ------
    TypeError, ValueError
        As `quantize` raises them; ValueError also if `matrix` has not two axes, or the threshold is not positive.
    """
    check_tensor(matrix, "matrix")
    if matrix.ndim != 2:
        raise ValueError(f"matrix has shape {list(matrix.shape)}; [rows, columns] is needed")
    if threshold is not None and not threshold > 0:
        raise ValueError(f"threshold is {threshold}; a positive number or None is accepted")
    return _vectorwise(matrix, threshold)


def _vectorwise(matrix: torch.Tensor, threshold: float | None) -> VectorwiseInt8:
    outliers = torch.zeros(0, dtype=torch.long, device=matrix.device)
    if threshold is not None:
        large = matrix.abs() >= threshold
        outliers = large.any(0).nonzero().view(-1)
        matrix = matrix.masked_fill(large, 0)
    absmax = matrix.abs().amax(1).float() if matrix.shape[1] else matrix.new_zeros(len(matrix), dtype=torch.float32)
    codes = (matrix * (127.0 / absmax[:, None])).round()
    codes = codes.where(absmax[:, None] > 0, 0).to(torch.int8)
    return VectorwiseInt8(codes.index_fill(1, outliers, 0), absmax, outliers)


def int8_linear(
    inputs: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    threshold: float | None = THRESHOLD,
) -> torch.Tensor:
    """Multiply by a weight in int8: quantise the inputs' rows, multiply integers, scale, add the outlier columns' product.

    Parameters
    ----------
    inputs : Tensor
        Floating point ``[..., in_features]``, finite. As in bitsandbytes they are rounded to float16 before they are quantised.
    weight : QuantizedTensor
        ``[out_features, in_features]``, of ``quantize(weight, "int8", block_size="row")``.
    bias : Tensor, optional
        ``[out_features]``.
    threshold : float, optional
        Columns in which an input is at least this large are multiplied in the inputs' dtype, with the weight dequantised
        there; None multiplies all in int8.

    Returns
    -------
    Tensor
        ``[..., out_features]`` in the inputs' dtype. What is an outlier depends on all rows of a call, so a row's result
        depends slightly on the rows beside it.

    Raises
    ------
    TypeError
        If inputs are of another dtype than float32, float16 or bfloat16.
    ValueError
        If inputs are NaN or infinite, or the weight is stored in another way.
    """
    if weight.scheme != "int8" or weight.zero_point is not None or weight.scale.shape != (weight.shape[0], 1):
        raise ValueError(
            f"weight is {weight}; a symmetric int8 matrix with one scale a row (block_size='row') is needed"
        )
    check_tensor(inputs, "inputs")
    rows = inputs.reshape(-1, weight.shape[1])
    limit = torch.finfo(torch.float16).max
    quantised = _vectorwise(rows.clamp(-limit, limit).half(), threshold)
    # Products of codes are whole numbers, which float32 adds exactly to 2**24 and within one part in 2**24 beyond.
    product = quantised.codes.float() @ weight.codes.float().T
    product *= (quantised.absmax[:, None] / 127) * weight.scale.T
    if bias is not None:
        product += bias
    output = product.to(inputs.dtype)
    columns = quantised.outlier_columns
    if len(columns):
        output += functional.linear(rows[:, columns], (weight.codes[:, columns] * weight.scale).to(inputs.dtype))
    return output.view(*inputs.shape[:-1], weight.shape[0])
