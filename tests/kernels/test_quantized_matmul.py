"""The kernels multiply by a quantised weight as by its values: in the interpreter at small sizes, on a card, if there is one, at real."""

import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from course_lib.quantization import QuantizedTensor, dynamic_levels, fp4_levels, nf4_levels, quantize

pytest.importorskip("triton", reason="Triton exists for Linux only")
from course_lib.kernels import quantized_matmul as library
from course_lib.kernels.flash_attention import INTERPRETED
from course_lib.kernels.quantized_matmul import MATVEC_ROWS, quantized_matmul, quantized_matmul_refusal

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="neither Triton's interpreter nor a card"
)
#: Fresh inputs in every run; in CI the same ones each time, so that a run judges the change.
SEEDS = random.Random(0 if os.environ.get("CI") else None)
DTYPES = [torch.float16, torch.float32]
SCHEMES = {
    "int8": {},
    "int8 rows": {"block_size": "row"},
    "int8 whole": {"block_size": "tensor"},
    "int8 zero-point": {"zero_point": True},
    "int4": {"block_size": 32},
    "int4 rows": {"block_size": "row"},
    "int4 whole": {"block_size": "tensor"},
    "int4 zero-point": {"zero_point": True},
    "nf4": {},
    "nf4 double": {"double_quant": True},
    "fp4": {"block_size": 256},
    "fp4 double": {"block_size": 16, "double_quant": True},
}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEEDS.randrange(2**31))).to(DEVICE, dtype)


def weight(out_features: int, in_features: int, name: str = "nf4", **options: object) -> QuantizedTensor:
    """Return a quantised weight with an outlier here and there, and a row of zeros."""
    values = draw(out_features, in_features) * 0.05
    values.view(-1)[::97] *= 20
    values[out_features // 2 : out_features // 2 + 1] = 0
    return quantize(values, name.split()[0], **(SCHEMES[name] | options))


def multiply(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None, **changes: object
) -> torch.Tensor:
    """Call the library on a weight, or on something else in a tensor's place; memory that it allocates holds NaN at first."""
    levels = {"nf4": nf4_levels, "fp4": fp4_levels}.get(weight.scheme, lambda: None)()
    scale_levels = dynamic_levels() if weight.scale_absmax is not None else None
    arguments = weight.tensors | {"scheme": weight.scheme, "shape": weight.shape, "block_size": weight.block_size}
    for name, table in (("levels", levels), ("scale_levels", scale_levels)):
        arguments[name] = None if table is None else table.to(DEVICE)
    empty = torch.Tensor.new_empty

    def poisoned(like: torch.Tensor, *size: int, **options: object) -> torch.Tensor:
        made = empty(like, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        return quantized_matmul(x, bias=bias, **(arguments | changes))


def check(output: torch.Tensor, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> None:
    """Compare with float64: at most twice the error of PyTorch's product with the same values in this dtype, and roundings.

    The roundings are one of the result, and two in float32 of a sum of magnitudes: in a small product PyTorch can be lucky.
    """
    values = weight.dequantize(torch.float32).double()
    exact = functional.linear(x.double(), values, None if bias is None else bias.double())
    plain = functional.linear(x, weight.dequantize(x.dtype), None if bias is None else bias.to(x.dtype))
    assert output.shape == exact.shape
    assert output.dtype == x.dtype
    assert output.is_contiguous()
    if output.numel():
        error, allowed = ((one.double() - exact).abs().amax().item() for one in (output, plain))
        rounding = torch.finfo(x.dtype).eps * exact.abs().amax().item()
        rounding += 2 * torch.finfo(torch.float32).eps * functional.linear(x.double().abs(), values.abs()).amax().item()
        assert error <= 2 * allowed + rounding, f"error {error:.2e}, PyTorch's {allowed:.2e}"


def in_memory(x: torch.Tensor, order: list[int], margin: int) -> torch.Tensor:
    """Return a tensor's copy with its axes in another order in memory, and NaN before and after each of the last one's rows."""
    there = functional.pad(x.permute(order), (margin, margin), value=torch.nan).contiguous()
    return there[..., margin : there.shape[-1] - margin].permute([order.index(axis) for axis in range(x.ndim)])


@settings(max_examples=60)
@given(st.data())
def test_any_call_is_the_product_with_the_values(data: st.DataObject) -> None:
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    out_features = integers(0, 40)
    in_features = data.draw(st.one_of(st.integers(0, 200), st.integers(1, 40).map(lambda blocks: 32 * blocks)))
    name = data.draw(st.sampled_from(list(SCHEMES)))
    # The shape's odd blocks do not fit words or rows.
    options = data.draw(st.sampled_from([{}, {}, {"block_size": 10}, {"block_size": 96}, {"block_size": 1}]))
    quantised = weight(out_features, in_features, name, **options)
    axes = [*data.draw(st.lists(st.integers(0, 5), max_size=3)), in_features]
    dtype = data.draw(st.sampled_from(DTYPES))
    x = in_memory(draw(*axes, dtype=dtype), data.draw(st.permutations(range(len(axes)))), integers(0, 2))
    bias = draw(out_features, dtype=data.draw(st.sampled_from(DTYPES))) if data.draw(st.booleans()) else None
    with mock.patch.object(library, "_processors", return_value=data.draw(st.sampled_from([1, 50]))):
        check(multiply(x, quantised, bias), x, quantised, bias)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17, 33, 70])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_at_every_number_of_rows(name: str, rows: int) -> None:
    for out_features, in_features, dtype in ((24, 192, torch.float16), (9, 35, torch.float32)):
        quantised = weight(out_features, in_features, name)
        x, bias = draw(rows, in_features, dtype=dtype), draw(out_features, dtype=dtype)
        check(multiply(x, quantised, bias), x, quantised, bias)


@pytest.mark.parametrize("in_features", [8, 24, 40, 64, 136, 576, 1100, 4112])
@pytest.mark.parametrize("name", ["int8", "int4", "int4 zero-point", "nf4 double"])
def test_columns_that_are_no_whole_number_of_runs_words_or_warps(name: str, in_features: int) -> None:
    quantised = weight(7, in_features, name)
    for rows in (1, 6):
        x = draw(rows, in_features)
        check(multiply(x, quantised), x, quantised)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_columns_divided_among_programs_are_added_up_the_same_in_every_run(name: str, rows: int) -> None:
    quantised, x, bias = weight(10, 3300, name), draw(rows, 3300, dtype=torch.float16), draw(10, dtype=torch.float16)
    with mock.patch.object(library, "_processors", return_value=10):
        found = [multiply(x, quantised, bias) for _ in range(2)]
    planned = library.plan(x, quantised.scheme, 10, quantised.block_size, capability="interpreter", processors=10)
    assert planned.shares > 1
    check(found[0], x, quantised, bias)
    assert torch.equal(*found)


@pytest.mark.parametrize("size", ["rows", "out_features", "in_features"])
def test_empty_sizes_give_empty_results_or_the_bias(size: str) -> None:
    for name in SCHEMES:
        sizes = {"rows": 3, "out_features": 5, "in_features": 64} | {size: 0}
        quantised = weight(sizes["out_features"], sizes["in_features"], name)
        x, bias = draw(2, sizes["rows"], sizes["in_features"]), draw(sizes["out_features"])
        check(multiply(x, quantised, bias), x, quantised, bias)


def test_inputs_are_left_as_they_were() -> None:
    quantised, x, bias = weight(9, 192, "nf4 double"), draw(3, 192), draw(9)
    before = [one.clone() for one in (x, bias, *quantised.tensors.values())]
    multiply(x, quantised, bias)
    assert all(torch.equal(*pair) for pair in zip((x, bias, *quantised.tensors.values()), before, strict=True))


@pytest.mark.parametrize("rows", [3, 6])
def test_x_in_any_strides_and_codes_that_begin_at_any_byte(rows: int) -> None:
    quantised = weight(9, 192, "int4")
    shifted = torch.empty(quantised.codes.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view_as(quantised.codes)
    shifted.copy_(quantised.codes)
    for x in (draw(192, rows).T, draw(2 * rows, 192)[::2], draw(192).expand(rows, 192), draw(rows, 400)[:, 1:193]):
        check(multiply(x, quantised), x, quantised)
        check(multiply(x, quantised, codes=shifted), x, quantised)


def test_rows_of_x_far_apart_in_memory(tmp_path: Path) -> None:
    # What is far apart lies in a sparse file, of which almost nothing exists.
    stride = 2**31 + 2**20
    if DEVICE == "cuda":
        memory = torch.empty(2 * stride, dtype=torch.float16, device=DEVICE)
    else:
        path = tmp_path / "sparse"
        with path.open("wb") as file:
            file.truncate(4 * stride)
        memory = torch.from_file(str(path), shared=True, size=2 * stride, dtype=torch.float16)
    quantised = weight(8, 64)
    for rows in (MATVEC_ROWS, 6):
        near = draw(rows, 64, dtype=torch.float16)
        far = memory.as_strided((rows, 64), (stride // (rows - 1), 1))
        far.copy_(near)
        assert torch.equal(multiply(far, quantised), multiply(near, quantised))


# ---- bitsandbytes


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_weights_that_bitsandbytes_quantised(scheme: str, double_quant: bool) -> None:
    theirs = pytest.importorskip("bitsandbytes", reason="bitsandbytes has no macOS wheels").functional
    values = draw(40, 576) * 0.05
    with torch.compiler.set_stance("force_eager"):
        packed, state = theirs.quantize_4bit(values, blocksize=64, quant_type=scheme, compress_statistics=double_quant)
        restored = theirs.dequantize_4bit(packed, state)
    found = {"levels": state.code}
    if double_quant:
        found |= {"scale_absmax": state.state2.absmax, "scale_offset": state.offset, "scale_levels": state.state2.code}
    for rows in (1, 5):
        x = draw(rows, 576)
        output = quantized_matmul(
            x, packed, state.absmax, scheme=state.quant_type, shape=state.shape, block_size=state.blocksize, **found
        )
        torch.testing.assert_close(output, x @ restored.T, rtol=1e-5, atol=1e-5)


# ---- the comparison itself would notice


@pytest.mark.parametrize(
    "fault", ["nibbles swapped", "next block's scale", "code of zero", "next row", "no bias", "one code"]
)
def test_planted_faults_are_caught(fault: str) -> None:
    quantised, x, bias = weight(9, 192, "int4 zero-point"), draw(2, 192, dtype=torch.float16), draw(9)
    codes = quantised.codes
    flipped = codes.clone()
    flipped[3, 17] ^= 0x40
    wrong = {
        "nibbles swapped": {"codes": codes >> 4 | codes << 4},
        "next block's scale": {"scale": quantised.scale.roll(1, -1)},
        "code of zero": {"zero_point": quantised.zero_point + 1},
        "next row": {"codes": codes.roll(1, 0)},
        "no bias": {"bias": None},
        "one code": {"codes": flipped},
    }[fault]
    check(multiply(x, quantised, bias), x, quantised, bias)
    with pytest.raises(AssertionError, match="error"):
        check(multiply(x, quantised, **({"bias": bias} | wrong)), x, quantised, bias)


# ---- refusals


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nf4", {"scheme": "int3"}, "scheme is 'int3'; accepted are int8, int4, nf4, fp4"),
        ("nf4", {"shape": (5, 64, 1)}, r"shape is \(5, 64, 1\); \(out_features, in_features\) is needed"),
        ("nf4", {"block_size": 0}, "block_size is 0"),
        ("nf4", {"block_size": 32}, "scale is torch.float32 with 5 elements; torch.float32 with 10 is needed"),
        ("nf4", {"shape": (5, 65)}, "codes is torch.uint8 with 160 elements; torch.uint8 with 163 is needed"),
        ("nf4", {"levels": None}, "levels is None; torch.float32 with 16 is needed"),
        ("nf4", {"levels": torch.zeros(16, dtype=torch.float64)}, "levels is torch.float64"),
        ("nf4", {"zero_point": torch.zeros(5, 1)}, "zero_point is torch.float32 with 5 elements; it must be None"),
        ("nf4", {"scale_absmax": torch.zeros(1)}, "scale is torch.float32"),
        ("nf4 double", {"scale_offset": None}, "scale_offset is None"),
        ("nf4 double", {"scale_levels": None}, "scale_levels is None"),
        ("nf4 double", {"scale_absmax": torch.zeros(2)}, "scale_absmax is torch.float32 with 2 elements"),
        ("int8", {"codes": torch.zeros(5, 64, dtype=torch.uint8)}, "codes is torch.uint8"),
        ("int8", {"levels": torch.zeros(16)}, "levels is torch.float32 with 16 elements; it must be None"),
        ("int4", {"zero_point": torch.zeros(5, 3, dtype=torch.uint8)}, "zero_point is torch.uint8 with 15"),
        ("int8", {"scale": torch.zeros(5, 1, device="meta")}, "scale is on meta and codes on"),
        ("int8", {"x": torch.zeros(2, 63)}, r"x has shape \[2, 63\]; \[..., 64\] is needed"),
        ("int8", {"x": torch.tensor(1.0)}, r"x has shape \[\]"),
        ("int8", {"x": torch.zeros(2, 64, dtype=torch.float64)}, "x is torch.float64"),
        ("int8", {"x": torch.zeros(2, 64, device="meta")}, "x is on meta and codes on"),
        ("int8", {"bias": torch.zeros(4)}, r"bias is torch.float32 of shape \[4\]; floating \[5\] is needed"),
        ("int8", {"bias": torch.zeros(5, dtype=torch.int64)}, "bias is torch.int64"),
        ("int8", {"x": torch.zeros(2, 64, requires_grad=True)}, "computes no gradients"),
        ("int8", {"bias": torch.zeros(5, requires_grad=True)}, "computes no gradients"),
    ],
)
def test_what_is_not_accepted_gets_one_sentence(name: str, change: dict, message: str) -> None:
    arguments = {"x": torch.zeros(2, 64), "bias": None} | change
    arguments |= {key: one.to(DEVICE) for key, one in arguments.items() if isinstance(one, torch.Tensor) and one.is_cpu}
    with pytest.raises(ValueError, match=message) as caught:
        multiply(weight=weight(5, 64, name), **arguments)
    assert "\n" not in str(caught.value)


def test_the_refusal_is_known_before_the_call() -> None:
    x = draw(2, 64)
    assert quantized_matmul_refusal(x, "nf4") is None
    assert "the weight is int3" in quantized_matmul_refusal(x, "int3")
    assert "x is torch.float64" in quantized_matmul_refusal(x.double(), "nf4")
    assert "no_grad" in quantized_matmul_refusal(x.requires_grad_(), "nf4")
    with torch.no_grad():
        assert quantized_matmul_refusal(x, "nf4", draw(5).requires_grad_()) is None


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter rounds bfloat16 wrongly")
def test_bfloat16_is_refused_in_the_interpreter_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="interpreter cuts results in bfloat16 off") as caught:
        multiply(draw(2, 64, dtype=torch.bfloat16), weight(5, 64))
    assert "\n" not in str(caught.value)


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    code = (
        "import torch; from course_lib.kernels.quantized_matmul import quantized_matmul_refusal\n"
        "print(quantized_matmul_refusal(torch.zeros(1, 64), 'int8'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "TRITON_INTERPRET=1" in found.stdout


def test_few_rows_take_no_tensor_cores_and_every_card_has_a_configuration() -> None:
    for capability in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942"):
        for rows in (1, MATVEC_ROWS, MATVEC_ROWS + 1, 17, 33, 4096):
            cut = library.configuration(rows, 4096, 4, torch.float16, capability)
            assert rows > MATVEC_ROWS or cut.block_m >= rows
            assert all(size & (size - 1) == 0 for size in cut[:5])


# ---- on a card


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 4, 16, 50, 512])
@pytest.mark.parametrize("name", SCHEMES)
def test_real_sizes_on_a_card(name: str, rows: int, dtype: torch.dtype) -> None:
    for out_features, in_features in ((4096, 4096), (1024, 14336), (257, 4100)):
        quantised, x = weight(out_features, in_features, name), draw(rows, in_features, dtype=dtype)
        check(multiply(x, quantised), x, quantised)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_more_than_2_to_the_31_bytes_of_codes_on_a_card() -> None:
    shape = (2**17 + 8, 2**15)
    codes = torch.randint(0, 256, (shape[0] * shape[1] // 2,), dtype=torch.uint8, device="cuda")
    scale = torch.rand(shape[0] * shape[1] // 64, device="cuda")
    quantised = QuantizedTensor("nf4", torch.Size(shape), torch.float16, 64, codes, scale)
    tail = QuantizedTensor(
        "nf4", torch.Size((8, shape[1])), torch.float16, 64, codes[-4 * shape[1] :], scale[-8 * shape[1] // 64 :]
    )
    for rows in (1, 16):
        x = draw(rows, shape[1], dtype=torch.float16)
        check(multiply(x, quantised)[:, -8:].contiguous(), x, tail)
