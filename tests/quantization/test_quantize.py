"""Quantising a tensor: what it may lose, how it is stored, what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.quantization import SCHEMES, fp4_levels, nf4_levels, quantize
from course_lib.quantization.packing import pack, unpack

INTEGERS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
TABLES = {"nf4": nf4_levels, "fp4": fp4_levels}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Largest relative error of rounding once to the dtype.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(1, 5), st.integers(60, 200))
block_sizes = st.sampled_from([1, 2, 7, 32, 64, 4096, "row", "tensor"])


@st.composite
def tensors(draw, dtypes=DTYPES):
    """Tensors of any shape and strides, with blocks of zeros, large outliers and all magnitudes that a weight may have."""
    shape, seed = draw(shapes), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-3, 0.02, 1.0, 300.0]))
    kind = draw(st.sampled_from(["normal", "positive", "sparse", "outlier", "grid"]))
    if kind == "positive":
        tensor = tensor.abs()
    elif kind == "sparse":
        tensor *= torch.rand(shape, generator=generator) < 0.1
    elif kind == "outlier" and tensor.numel():
        tensor.view(-1)[seed % tensor.numel()] *= 50
    elif kind == "grid":
        tensor = (tensor * 8).round() / 8
    tensor = tensor.to(draw(st.sampled_from(dtypes)))
    if tensor.ndim > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


def steps_of(quantised):
    """Each value's step, in float64 and the tensor's shape."""
    rows = quantised.scale.shape[0]
    columns = math.prod(quantised.shape) // rows if rows else 0
    each = quantised.scale.double().repeat_interleave(quantised.block_size, 1)[:, :columns]
    return each.reshape(quantised.shape)


@given(tensors(), st.sampled_from(sorted(INTEGERS)), block_sizes, st.booleans())
def test_integer_round_trip_moves_no_value_by_more_than_half_a_step(tensor, scheme, block_size, zero_point):
    quantised = quantize(tensor, scheme, block_size=block_size, zero_point=zero_point)
    restored = quantised.dequantize()
    assert restored.shape == tensor.shape
    assert restored.dtype == tensor.dtype
    # The step itself is rounded to float32, and 255 of them add its error up; the result is rounded to the dtype.
    slack = 1e-6 * 255 * steps_of(quantised) + restored.double().abs() * ROUNDING[tensor.dtype] + 2.0**-24
    assert ((restored.double() - tensor.double()).abs() <= steps_of(quantised) / 2 + slack).all()


@given(tensors(), st.sampled_from(sorted(TABLES)), block_sizes)
def test_table_round_trip_takes_the_nearest_level(tensor, scheme, block_size):
    quantised = quantize(tensor, scheme, block_size=block_size)
    flat, levels = tensor.reshape(-1).double(), TABLES[scheme]().double()
    absmax = quantised.scale.double().repeat_interleave(quantised.block_size)[: flat.numel()]
    nearest = (flat[:, None] - levels * absmax[:, None]).abs().amin(1)
    error = (quantised.dequantize(torch.float32).reshape(-1).double() - flat).abs()
    assert (error <= nearest + 1e-6 * absmax).all()


@given(tensors(dtypes=(torch.float32,)), st.sampled_from(SCHEMES), block_sizes)
def test_quantising_what_was_quantised_changes_nothing(tensor, scheme, block_size):
    once = quantize(tensor, scheme, block_size=block_size)
    twice = quantize(once.dequantize(), scheme, block_size=block_size)
    torch.testing.assert_close(twice.dequantize(), once.dequantize(), rtol=1e-6, atol=0)
    if scheme != "fp4":  # which has two codes for zero
        assert torch.equal(twice.codes, once.codes)


@given(tensors(), st.sampled_from(SCHEMES), block_sizes, st.booleans())
def test_strides_make_no_difference(tensor, scheme, block_size, sliced):
    if sliced and tensor.ndim:
        tensor = torch.stack([tensor, -tensor], -1)[..., 0]
    quantised = quantize(tensor, scheme, block_size=block_size)
    same = quantize(tensor.contiguous(), scheme, block_size=block_size)
    assert all(torch.equal(quantised.tensors[name], same.tensors[name]) for name in same.tensors)
    expanded = torch.zeros(1, 1).expand(3, 5)
    assert torch.equal(quantize(expanded, scheme).dequantize(), expanded)


@given(
    st.integers(1, 6), st.integers(1, 300), st.sampled_from(SCHEMES), st.sampled_from([1, 5, 64, 4096]), st.booleans()
)
def test_nbytes_are_codes_without_gaps_and_one_scale_a_block(rows, columns, scheme, block_size, option):
    integer = scheme in INTEGERS
    options = {"zero_point" if integer else "double_quant": option}
    quantised = quantize(torch.randn(rows, columns), scheme, block_size=block_size, **options)
    assert quantised.nbytes == sum(t.numel() * t.element_size() for t in quantised.tensors.values())
    if integer:
        blocks = rows * math.ceil(columns / block_size)
        assert quantised.nbytes == rows * math.ceil(columns * INTEGERS[scheme] / 8) + blocks * (4 + option)
    else:
        blocks = math.ceil(rows * columns / block_size)
        constants = blocks + 4 * math.ceil(blocks / 256) + 4 if option else 4 * blocks
        assert quantised.nbytes == math.ceil(rows * columns / 2) + constants
    assert quantised.bits_per_value == pytest.approx(8 * quantised.nbytes / (rows * columns))


def test_double_quantisation_saves_0_373_bit_a_weight():
    weight = torch.randn(512, 1024)
    plain, double = (quantize(weight, "nf4", double_quant=double).bits_per_value for double in (False, True))
    assert plain == 4.5
    assert plain - double == pytest.approx(0.373, abs=5e-4)


def test_double_quantisation_hardly_adds_to_the_error():
    weight = torch.randn(64, 640)
    plain, double = (quantize(weight, "nf4", double_quant=double).dequantize() for double in (False, True))
    assert (double - weight).norm() < 1.01 * (plain - weight).norm()


def test_row_and_tensor_are_blocks_of_that_size():
    weight = torch.randn(6, 48)
    for scheme in SCHEMES:
        row, numbered = quantize(weight, scheme, block_size="row"), quantize(weight, scheme, block_size=48)
        assert torch.equal(row.codes, numbered.codes)
        assert row.scale.numel() == 6
        assert quantize(weight, scheme, block_size="tensor").scale.numel() == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_short_last_block_leaves_the_others_as_they_are(scheme):
    values = torch.randn(64 * 3 + 11)
    values[-1] = 1000
    whole, start = quantize(values, scheme).dequantize(), quantize(values[: 64 * 3], scheme).dequantize()
    assert torch.equal(whole[: 64 * 3], start)
    assert torch.equal(whole[64 * 3 :], quantize(values[64 * 3 :], scheme).dequantize())


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zero_beside_other_blocks(scheme, zero_point):
    values = torch.randn(3, 64)
    values[1] = 0
    restored = quantize(values, scheme, zero_point=zero_point and scheme in INTEGERS).dequantize()
    assert (restored[1] == 0).all()
    assert restored.isfinite().all()
    assert (restored[0] != 0).any()


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_all_zeros_and_one_block_survive_double_quantisation(scheme, double_quant):
    for values in (torch.zeros(300), torch.randn(10)):
        restored = quantize(values, scheme, double_quant=double_quant).dequantize()
        assert (restored - values).abs().max() <= 0.3 * values.abs().max()


@pytest.mark.parametrize("block_size", [1, 64, "row", "tensor"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_empty_tensors_come_back_empty(scheme, block_size):
    for shape in ((0,), (0, 2), (2, 0), (0, 0), (3, 0, 2), (0, 3, 4)):
        for option in (False, True):
            options = {"zero_point" if scheme in INTEGERS else "double_quant": option}
            quantised = quantize(torch.zeros(shape, dtype=torch.float16), scheme, block_size=block_size, **options)
            assert quantised.dequantize().shape == shape
            assert quantised.dequantize().dtype == torch.float16
            assert quantised.codes.nbytes == 0


def test_zero_point_wastes_no_code_on_a_lopsided_block():
    positive = torch.rand(64, 64)
    errors = [(quantize(positive, "int4", zero_point=z).dequantize() - positive).norm() for z in (False, True)]
    assert errors[1] < 0.6 * errors[0]


def test_values_at_the_edge_of_float_types_come_back_finite():
    for dtype, largest in ((torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, 3e38)):
        extreme = torch.tensor([largest, -largest, 0.0, 1.0], dtype=dtype)
        for scheme in SCHEMES:
            for zero_point in (False, True)[: 1 + (scheme in INTEGERS)]:
                restored = quantize(extreme, scheme, zero_point=zero_point).dequantize()
                assert restored.isfinite().all()
                assert (restored[:2].double() / extreme[:2].double() - 1).abs().max() < 0.5


def test_dequantising_to_another_dtype_rounds_once():
    quantised = quantize(torch.randn(5, 70), "nf4")
    assert torch.equal(quantised.dequantize(torch.bfloat16), quantised.dequantize().bfloat16())


def test_quantising_asks_for_no_gradient():
    assert not quantize(torch.randn(3, 4, requires_grad=True), "int4").dequantize().requires_grad


@given(st.integers(1, 8), st.integers(0, 70), st.data())
def test_packing_undone_gives_the_codes(bits, count, data):
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=2 * count, max_size=2 * count)))
    codes = codes.long().view(2, count)
    packed = pack(codes, bits)
    assert packed.shape[-1] == math.ceil(count * bits / 8)
    assert torch.equal(unpack(packed, bits, count).long(), codes)


def test_packing_starts_at_the_highest_bit():
    assert pack(torch.tensor([0xA, 0x5, 0xF]), 4).tolist() == [0xA5, 0xF0]
    assert pack(torch.tensor([3, 0, 1, 2, 3]), 2).tolist() == [0b11000110, 0b11000000]
    assert pack(torch.tensor([0b101, 0b011, 0b110]), 3).tolist() == [0b10101111, 0b00000000]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_and_infinity_are_refused_by_name(scheme, wrong):
    values = torch.randn(3, 40, dtype=torch.float16)
    values[1, 3] = wrong
    with pytest.raises(ValueError, match=r"^tensor has 1 of 120 values that are NaN or infinite"):
        quantize(values, scheme)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (torch.ones(2, dtype=torch.int32), "int8"),
            TypeError,
            r"tensor is torch.int32; .* float32, float16 or bfloat16",
        ),
        (([1.0], "int8"), TypeError, "tensor is list"),
        ((torch.ones(2), "int5"), ValueError, "scheme is 'int5'; accepted are int8, int4, int3, int2, nf4, fp4"),
        (
            (torch.ones(2), "nf4", {"block_size": 0}),
            ValueError,
            "block_size must be a whole number of at least 1, got 0",
        ),
        ((torch.ones(2), "nf4", {"block_size": "column"}), ValueError, "block_size is 'column'; accepted are"),
        ((torch.ones(2), "nf4", {"zero_point": True}), ValueError, "zero_point=True is for integer schemes"),
        ((torch.ones(2), "int4", {"double_quant": True}), ValueError, "double_quant=True is for nf4 and fp4, not int4"),
    ],
)
def test_what_is_not_accepted_is_named(arguments, error, message):
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error, match=message):
        quantize(*positional, **options)
