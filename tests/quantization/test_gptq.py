"""Error-compensated rounding: better where inputs are correlated, plain rounding where they are not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.quantization import Hessian, quantize, quantize_compensated


def correlated_inputs(rows, features):
    mixing = torch.eye(features) + torch.randn(features, features) / features**0.5
    return torch.randn(rows, features) @ mixing @ mixing * torch.rand(features).add(0.1)


def hessian_of(inputs):
    hessian = Hessian(inputs.shape[-1])
    hessian.add(inputs)
    return hessian.matrix


def output_error(inputs, weight, quantised):
    return float((inputs @ (quantised.dequantize() - weight).T).norm())


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("block_size", [32, 48, 64, "row"])
@pytest.mark.parametrize("scheme", ["int4", "int3", "int2"])
def test_outputs_on_correlated_inputs_lose_less_than_two_thirds(scheme, block_size, zero_point):
    inputs, weight = correlated_inputs(2048, 160), torch.randn(64, 160)
    options = {"block_size": block_size, "zero_point": zero_point}
    plain = quantize(weight, scheme, **options)
    compensated = quantize_compensated(weight, hessian_of(inputs), scheme, **options)
    unseen = torch.cat([inputs[1024:], inputs[:1024]]) + 0.01 * torch.randn(2048, 160)
    assert output_error(unseen, weight, compensated) < 0.67 * output_error(unseen, weight, plain)
    assert compensated.nbytes == plain.nbytes
    assert all(compensated.tensors[name].shape == tensor.shape for name, tensor in plain.tensors.items())
    assert torch.equal(compensated.scale, plain.scale)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 150), st.sampled_from(["int8", "int4", "int3", "int2"]), st.booleans())
def test_uncorrelated_inputs_leave_plain_rounding(rows, columns, scheme, zero_point):
    weight = torch.randn(rows, columns)
    for hessian in (torch.diag(torch.rand(columns) + 0.1), torch.zeros(columns, columns)):
        plain = quantize(weight, scheme, zero_point=zero_point)
        compensated = quantize_compensated(weight, hessian, scheme, zero_point=zero_point)
        assert all(torch.equal(compensated.tensors[name], plain.tensors[name]) for name in plain.tensors)


def test_rounding_follows_the_formula_of_the_paper():
    """Against the literal algorithm: invert, round a column, spread its error, strike the column out of the inverse."""
    weight, hessian = torch.randn(5, 24), hessian_of(correlated_inputs(100, 24))
    compensated = quantize_compensated(weight, hessian, "int3", block_size=24)
    scale = quantize(weight, "int3", block_size=24).scale.double()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(24)
    left, restored = weight.double().clone(), torch.empty(5, 24).double()
    inverse = torch.linalg.inv(damped)
    for column in hessian.diagonal().argsort(descending=True).tolist():
        restored[:, column] = (left[:, column] / scale[:, 0]).round().clamp(-4, 3) * scale[:, 0]
        error = (left[:, column] - restored[:, column]) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        inverse -= inverse[:, column, None] * inverse[column] / inverse[column, column]
    torch.testing.assert_close(compensated.dequantize(torch.float64), restored, rtol=1e-6, atol=1e-6)


def test_inputs_that_never_vary_do_no_harm():
    inputs, weight = correlated_inputs(500, 64), torch.randn(16, 64)
    inputs[:, 10] = 0
    inputs[:, 20] = inputs[:, 21]
    compensated = quantize_compensated(weight, hessian_of(inputs), "int4")
    assert compensated.dequantize().isfinite().all()
    assert torch.equal(compensated.codes, quantize_compensated(weight, hessian_of(inputs), "int4").codes)


def test_batches_add_up_and_their_scale_cancels():
    inputs, weight = correlated_inputs(300, 48), torch.randn(7, 48)
    parts = Hessian(48)
    parts.add(inputs[:100].view(4, 25, 48))
    parts.add(inputs[100:])
    torch.testing.assert_close(parts.matrix, inputs.double().T @ inputs.double())
    codes = [quantize_compensated(weight, parts.matrix * factor, "int3").codes for factor in (1.0, 2.0**-12)]
    assert torch.equal(*codes)


def test_empty_weights_pass_through():
    assert quantize_compensated(torch.zeros(3, 0), torch.zeros(0, 0), "int4").dequantize().shape == (3, 0)
    assert quantize_compensated(torch.zeros(0, 3), torch.eye(3), "int4").dequantize().shape == (0, 3)


@pytest.mark.parametrize(
    ("weight", "hessian", "scheme", "options", "message"),
    [
        (torch.ones(2, 3), torch.eye(2), "int4", {}, r"weight has shape \[2, 3\] and hessian \[2, 2\]"),
        (torch.ones(2, 3), torch.eye(3), "nf4", {}, "scheme is 'nf4'; accepted are int8, int4, int3, int2"),
        (torch.ones(2, 3), torch.eye(3), "int4", {"block_size": "tensor"}, "block_size is 'tensor'"),
        (torch.ones(2, 3), torch.eye(3), "int4", {"damping": 0.0}, "damping is 0.0; a positive number"),
        (torch.ones(2, 3), torch.eye(3) * math.nan, "int4", {}, "hessian has values that are NaN"),
        (torch.ones(2, 3), torch.eye(3) - 0.9, "int4", {}, "hessian is not positive definite"),
        (torch.ones(2, 3) * math.inf, torch.eye(3), "int4", {}, "weight has 6 of 6 values that are NaN or infinite"),
    ],
)
def test_what_is_not_accepted_is_named(weight, hessian, scheme, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_compensated(weight, hessian, scheme, **options)
    with pytest.raises(ValueError, match="inputs has 1 of 3 values that are NaN"):
        Hessian(3).add(torch.tensor([1.0, math.nan, 2.0]))
