"""LLM.int8(): what outlier columns cost, and what leaving them out saves."""

import math

import pytest
import torch

from course_lib.quantization import int8_linear, quantize, vectorwise_int8


def layer(dtype=torch.float32, outliers=0):
    inputs, weight = torch.randn(12, 256), torch.randn(48, 256) * 0.05
    inputs[:, :outliers] *= 60
    return inputs.to(dtype), quantize(weight.to(dtype), "int8", block_size="row")


def relative_error(result, inputs, weight):
    exact = inputs.double() @ weight.dequantize(torch.float64).double().T
    return float((result.double() - exact).norm() / exact.norm())


def test_leaving_outlier_columns_out_undoes_their_harm():
    inputs, weight = layer(outliers=2)
    with_all = relative_error(int8_linear(inputs, weight, threshold=None), inputs, weight)
    apart = relative_error(int8_linear(inputs, weight), inputs, weight)
    assert apart < with_all / 10


def test_without_outliers_the_threshold_makes_no_difference():
    inputs, weight = layer()
    inputs = inputs.clamp(-5.9, 5.9)
    assert torch.equal(int8_linear(inputs, weight), int8_linear(inputs, weight, threshold=None))


def test_columns_are_chosen_by_any_row():
    matrix = torch.randn(5, 20).clamp(-3, 3)
    matrix[3, 11], matrix[0, 2] = 6.0, -80.0
    quantised = vectorwise_int8(matrix, 6.0)
    assert quantised.outlier_columns.tolist() == [2, 11]
    assert (quantised.codes[:, [2, 11]] == 0).all()
    assert quantised.absmax.max() <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_result_has_the_inputs_dtype_and_leading_axes(dtype):
    inputs, weight = layer(dtype, outliers=1)
    bias = torch.randn(48, dtype=dtype)
    result = int8_linear(inputs.view(2, 2, 3, 256), weight, bias)
    assert result.dtype == dtype
    assert result.shape == (2, 2, 3, 48)
    assert torch.equal(result.view(12, 48), int8_linear(inputs, weight, bias))
    assert int8_linear(inputs[:0], weight).shape == (0, 48)


def test_rows_of_zeros_give_zero():
    inputs, weight = layer()
    inputs[4] = 0
    result = int8_linear(inputs, weight)
    assert (result[4] == 0).all()
    assert result.isfinite().all()


def test_inputs_too_large_for_float16_are_outliers():
    inputs, weight = layer()
    inputs[2, 9] = 1e6
    assert relative_error(int8_linear(inputs, weight), inputs, weight) < 0.01


def test_what_is_not_accepted_is_named():
    inputs, weight = layer()
    inputs[0, 0] = math.nan
    with pytest.raises(ValueError, match="inputs has 1 of 3072 values that are NaN or infinite"):
        int8_linear(inputs, weight)
    with pytest.raises(ValueError, match=r"weight is QuantizedTensor\(nf4.*; a symmetric int8 matrix"):
        int8_linear(torch.ones(1, 64), quantize(torch.randn(2, 64), "nf4"))
    with pytest.raises(ValueError, match=r"matrix has shape \[3\]; \[rows, columns\] is needed"):
        vectorwise_int8(torch.ones(3))
    with pytest.raises(ValueError, match="threshold is 0; a positive number or None"):
        vectorwise_int8(torch.ones(3, 3), 0)
