"""Equal to bitsandbytes, bit for bit, on its CPU backend."""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from course_lib.quantization import dynamic_levels, fp4_levels, int8_linear, nf4_levels, quantize, vectorwise_int8
from course_lib.quantization.packing import unpack

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes has no macOS wheels")
theirs = bitsandbytes.functional

#: Before 0.50 its CPU backend rounded FP4's levels to four decimals, looked scales up differently, rounded a short last block
#: in the input's dtype, gave zero blocks another code, and refused an odd number of values.
CURRENT = Version(version("bitsandbytes")) >= Version("0.50")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(64,), (1, 64), (3, 40), (128, 96), (5, 1000), (3, 4096), (2, 3, 50)]
ODD_SHAPES = [(1,), (3, 5), (7, 33), (63, 129)]


@pytest.fixture(autouse=True)
def uncompiled():
    """Without the seconds that bitsandbytes' torch.compile takes for each shape; what it computes is the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def weights(shape, dtype):
    tensor = torch.randn(shape).mul_(0.05).to(dtype)
    tensor.view(-1)[::97] *= 20
    return tensor


def restored_by_them(packed, state):
    # Their AVX-512 kernel takes a wrong scale where a row is not a whole number of blocks; one long row avoids it.
    state.shape = torch.Size([state.shape.numel()])
    return theirs.dequantize_4bit(packed, state)


def test_tables_are_theirs():
    assert torch.equal(nf4_levels(), theirs.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(fp4_levels(), theirs.get_4bit_type("fp4", device="cpu"))
    assert torch.equal(dynamic_levels(), theirs.create_dynamic_map())


@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_four_bit_codes_scales_and_values_are_theirs(scheme, dtype, block_size):
    for shape in SHAPES + ODD_SHAPES * CURRENT:
        tensor = weights(shape, dtype)
        ours = quantize(tensor, scheme, block_size=block_size)
        packed, state = theirs.quantize_4bit(tensor, blocksize=block_size, quant_type=scheme)
        assert torch.equal(ours.scale, state.absmax)
        if CURRENT:
            assert torch.equal(ours.codes, packed.view(-1))
            assert torch.equal(ours.dequantize().view(-1), restored_by_them(packed, state).view(-1))
        else:
            levels = nf4_levels() if scheme == "nf4" else fp4_levels()
            same = levels[ours.unpacked().long()] == levels[unpack(packed.view(-1), 4, tensor.numel()).long()]
            assert same.float().mean() > 0.95


@pytest.mark.parametrize("block_size", [64, 256, 4096])
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_double_quantisation_is_theirs(scheme, block_size):
    for shape in [(64,), (7, 50), (512, 640)]:
        for dtype in DTYPES:
            tensor = weights(shape, dtype)
            ours = quantize(tensor, scheme, block_size=block_size, double_quant=True)
            packed, state = theirs.quantize_4bit(
                tensor, blocksize=block_size, quant_type=scheme, compress_statistics=True
            )
            assert torch.equal(ours.scale_offset, state.offset)
            assert torch.equal(ours.scale_absmax, state.state2.absmax)
            if CURRENT:
                assert torch.equal(ours.codes, packed.view(-1))
                assert torch.equal(ours.scale, state.absmax.view(-1))
                assert torch.equal(ours.dequantize().view(-1), restored_by_them(packed, state).view(-1))
            elif ours.scale.numel() > 1:
                assert (ours.scale.int() - state.absmax.view(-1).int()).abs().max() <= 1


@pytest.mark.skipif(not CURRENT, reason="their codes for zeros changed in 0.50")
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_blocks_of_zeros_are_theirs(scheme):
    for shape, zeros in (((4, 64), slice(1, 3)), ((70,), slice(64, 70)), ((33,), slice(0, 33))):
        tensor = torch.randn(shape)
        tensor[zeros] = 0
        ours, (packed, state) = quantize(tensor, scheme), theirs.quantize_4bit(tensor, blocksize=64, quant_type=scheme)
        assert torch.equal(ours.codes, packed.view(-1))
        assert torch.equal(ours.scale, state.absmax)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rows_are_their_vectorwise_quantisation(dtype):
    for shape in ((1, 5), (33, 128), (40, 77)):
        # Values on a coarse grid fall on ties, where the order of a product and a division shows.
        for tensor in (weights(shape, dtype), (torch.randn(shape) * 8).round().add(1).to(dtype)):
            codes, absmax, _ = theirs.int8_vectorwise_quant(tensor.clone())
            ours = quantize(tensor, "int8", block_size="row")
            assert torch.equal(ours.codes, codes)
            torch.testing.assert_close(ours.scale[:, 0] * 127, absmax, rtol=1e-6, atol=0)
            rowwise = vectorwise_int8(tensor)
            assert torch.equal(rowwise.codes, codes)
            assert torch.equal(rowwise.absmax, absmax)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outlier_columns_are_theirs(dtype):
    for rows in (1, 2, 30):
        activations = torch.randn(rows, 96).to(dtype)
        activations[:, 7] *= 40
        activations[-1, 50] = -6
        codes, absmax, columns = theirs.int8_vectorwise_quant(activations.clone(), threshold=6.0)
        ours = vectorwise_int8(activations, 6.0)
        assert torch.equal(ours.outlier_columns, columns)
        assert torch.equal(ours.codes, codes)
        assert torch.equal(ours.absmax, absmax)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_int8_product_is_theirs_within_rounding(threshold, bias):
    inputs = torch.randn(2, 9, 192).half()
    inputs[..., 5] *= 30
    weight, bias = torch.randn(64, 192).half() * 0.05, torch.randn(64).half() if bias else None
    codes, absmax, _ = theirs.int8_vectorwise_quant(weight.clone())
    state = bitsandbytes.MatmulLtState()
    state.CB, state.SCB, state.threshold = codes, absmax, threshold
    state.has_fp16_weights = state.is_training = False
    expected = bitsandbytes.matmul(inputs, codes, bias=bias, state=state)
    ours = int8_linear(inputs, quantize(weight, "int8", block_size="row"), bias, threshold=threshold or None)
    torch.testing.assert_close(ours, expected, rtol=2**-9, atol=2e-3)
