"""The rotary kernel does what apply_rope does: in the interpreter at small sizes, and on a card, if there is one, at real size."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.positions import apply_rope, rope_cos_sin, rope_frequencies

pytest.importorskip("triton", reason="Triton exists for Linux only")
from course_lib.kernels.flash_attention import INTERPRETED
from course_lib.kernels.rope import rope, rope_qk

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="neither Triton's interpreter nor a card"
)
#: Fresh inputs in every run; in CI the same ones each time, so that a run judges the change.
SEEDS = random.Random(0 if os.environ.get("CI") else None)
DTYPES = [torch.float16, torch.float32, torch.float64]
LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])
Table = tuple[torch.Tensor, torch.Tensor]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEEDS.randrange(2**31))).to(DEVICE, dtype)


def tables(*shape: int, pairs: int, factor: float = 1.0) -> Table:
    """Return cosines and sines of random positions of a shape."""
    positions = torch.tensor([SEEDS.randrange(100_000) for _ in range(torch.Size(shape).numel())]).view(shape)
    inv_freq = rope_frequencies(2 * pairs)[0] if pairs else torch.empty(0)
    cos, sin = rope_cos_sin(positions, inv_freq, factor)
    return cos.to(DEVICE), sin.to(DEVICE)


def in_memory(x: torch.Tensor, order: list[int], margin: int = 0) -> torch.Tensor:
    """Return a tensor's copy with its axes in another order in memory, and NaN before and after each of the last one's rows."""
    there = torch.nn.functional.pad(x.permute(order), (margin, margin), value=torch.nan).contiguous()
    return there[..., margin : there.shape[-1] - margin].permute([order.index(axis) for axis in range(x.ndim)])


def run(
    call: Callable[..., torch.Tensor], x: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a call's result and gradient; memory that it allocates holds NaN at first."""
    leaf = x.detach().requires_grad_()
    empty = torch.Tensor.new_empty
    with mock.patch.object(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan)):
        output = call(leaf)
        (gradient,) = torch.autograd.grad(output, leaf, upstream.to(output.dtype))
    return output.detach(), gradient


def check(call: Callable[..., torch.Tensor], x: torch.Tensor, cos_sin: Table, layout: str = "half") -> None:
    """Compare a call's result and gradient with float64: at most twice the error of apply_rope in this dtype, and one rounding."""
    upstream = draw(*x.shape)
    exact = run(
        lambda x: apply_rope(x, *(table.double() for table in cos_sin), layout), x.double(), upstream.to(x.dtype)
    )
    plain = run(lambda x: apply_rope(x, *cos_sin, layout), x, upstream)
    for name, found, theirs, truth in zip(("output", "gradient"), run(call, x, upstream), plain, exact, strict=True):
        assert found.shape == x.shape, name
        assert found.dtype == x.dtype, name
        if x.numel():
            error, allowed = ((one.double() - truth).abs().amax().item() for one in (found, theirs))
            rounding = torch.finfo(x.dtype).eps * truth.abs().amax().item()
            assert error <= 2 * allowed + rounding, f"{name}: error {error:.2e}, apply_rope's {allowed:.2e}"


@settings(max_examples=40)
@given(st.data())
def test_any_call_is_apply_rope(data: st.DataObject) -> None:
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    axes, head_dim, length = integers(2, 4), integers(1, 40), integers(0, 20)
    shape = [*(integers(0, 5) for _ in range(axes - 2)), length, head_dim]
    pairs = integers(0, head_dim // 2)
    own = axes > 2 and data.draw(st.booleans())
    rows = [data.draw(st.sampled_from([1, shape[0]])), length] if own else [length]
    cos_sin = tables(*rows, pairs=pairs, factor=data.draw(st.sampled_from([1.0, 1.2])))
    if data.draw(st.booleans()):
        cos_sin = (in_memory(cos_sin[0], [*range(cos_sin[0].ndim)][::-1]), cos_sin[1])
    layout = data.draw(st.sampled_from(["half", "interleaved"]))
    order, margin = data.draw(st.permutations(range(axes))), integers(0, 3)
    x = in_memory(draw(*shape, dtype=data.draw(st.sampled_from(DTYPES))), order, margin)

    check(lambda x: rope(x, *cos_sin, layout=layout), x, cos_sin, layout)

    outside = x._base.isnan()
    result = rope(x, *cos_sin, layout=layout)
    with torch.no_grad():
        assert rope(x, *cos_sin, layout=layout, inplace=True) is x
    assert torch.equal(x, result)
    assert torch.equal(x._base.isnan(), outside), "something beside x was written"


@settings(max_examples=8)
@given(st.data())
def test_queries_and_keys_in_one_launch_are_as_in_two(data: st.DataObject) -> None:
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    batch, length, query_heads, kv_heads, pairs = (integers(1, high) for high in (3, 5, 9, 4, 20))
    layout = data.draw(st.sampled_from(["half", "interleaved"]))
    cos_sin = tables(batch, length, pairs=pairs)
    q = draw(batch, length, query_heads, 2 * pairs + integers(0, 9)).transpose(1, 2)
    k = draw(batch, kv_heads, length, 2 * pairs + integers(0, 9), dtype=data.draw(st.sampled_from(DTYPES)))
    both = rope_qk(q, k, *cos_sin, layout=layout)
    for one, turned in zip((q, k), both, strict=True):
        assert torch.equal(turned, rope(one, *cos_sin, layout=layout))
    check(lambda q: rope_qk(q, k, *cos_sin, layout=layout)[0], q, cos_sin, layout)
    check(lambda k: rope_qk(q, k, *cos_sin, layout=layout)[1], k, cos_sin, layout)
    assert all(
        one is turned for one, turned in zip((q, k), rope_qk(q, k, *cos_sin, layout=layout, inplace=True), strict=True)
    )
    assert torch.equal(q, both[0])
    assert torch.equal(k, both[1])


@LAYOUTS
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (128, 64), (80, 40), (256, 128), (576, 32), (96, 1)])
def test_head_dims_of_real_models(head_dim: int, pairs: int, layout: str) -> None:
    cos_sin = tables(7, pairs=pairs)
    x = draw(2, 7, 9, head_dim, dtype=torch.float16).transpose(1, 2)
    check(lambda x: rope(x, *cos_sin, layout=layout), x, cos_sin, layout)


@LAYOUTS
def test_more_heads_than_a_program_holds_at_once(layout: str) -> None:
    cos_sin = tables(3, pairs=64)
    check(lambda x: rope(x, *cos_sin, layout=layout), draw(1, 70, 3, 128), cos_sin, layout)


@LAYOUTS
def test_packed_sequences_are_turned_as_each_alone(layout: str) -> None:
    lengths, inv_freq = [4, 1, 0, 9], rope_frequencies(16)[0]
    x = draw(sum(lengths), 3, 16)
    cos, sin = rope_cos_sin(torch.cat([torch.arange(length) for length in lengths]), inv_freq)
    packed = rope(x.transpose(0, 1), cos.to(DEVICE), sin.to(DEVICE), layout=layout).transpose(0, 1)
    assert packed.is_contiguous()
    for one, turned in zip(x.split(lengths), packed.split(lengths), strict=True):
        alone = [table.to(DEVICE) for table in rope_cos_sin(torch.arange(len(one)), inv_freq)]
        assert torch.equal(turned.transpose(0, 1), rope(one.transpose(0, 1), *alone, layout=layout))


@pytest.mark.parametrize("size", [0, 1, 2])
def test_empty_inputs_give_empty_results(size: int) -> None:
    shape = [2, 3, 5, 8]
    shape[size] = 0
    x, cos_sin = draw(*shape).requires_grad_(), tables(shape[2], pairs=4)
    output = rope(x, *cos_sin)
    output.sum().backward()
    assert output.shape == x.grad.shape == x.shape
    q, k = rope_qk(draw(shape[0], 2, shape[2], 8), x, *cos_sin)
    assert (q.shape[1], k.shape) == (2, x.shape)


def test_results_are_laid_out_as_what_is_turned() -> None:
    cos_sin = tables(5, pairs=4)
    assert rope(draw(2, 3, 5, 8), *cos_sin).is_contiguous()
    fused = draw(2, 5, 9, 8)
    assert rope(fused[:, :, 3:6].transpose(1, 2), *cos_sin).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 2, 40, 16), (2**30, 2**14, 2**8, 1)),
        ((2, 2, 40, 16), (2**14, 2**31 + 2**20, 2**8, 1)),
        ((2, 1, 40, 16), (2**14, 2**15, 2**26, 1)),
        # Beyond 32 bits not within what a program holds at once, but from its first head or token to the first of all.
        ((1, 40, 2, 130), (2**15, 2**26, 2**8, 1)),
        ((2, 1, 136, 130), (2**14, 2**15, 2**24, 1)),
    ],
    ids=["sequences", "heads", "tokens", "blocks of heads", "blocks of tokens"],
)
@LAYOUTS
def test_offsets_are_64_bit(layout: str, shape: tuple[int, ...], strides: tuple[int, ...], tmp_path: Path) -> None:
    # What is far apart lies in a sparse file, of which almost nothing exists.
    if DEVICE == "cuda":
        memory = torch.empty(2**32, dtype=torch.float16, device=DEVICE)
    else:
        path = tmp_path / "sparse"
        with path.open("wb") as file:
            file.truncate(2**33)
        memory = torch.from_file(str(path), shared=True, size=2**32, dtype=torch.float16)
    near, pairs = draw(*shape, dtype=torch.float16), shape[-1] // 2 - 1
    cos_sin = [table.half() for table in tables(shape[2], pairs=pairs)]
    wanted = rope(near, *cos_sin, layout=layout)
    far = memory.as_strided(shape, strides)
    far.copy_(near)
    assert torch.equal(rope(far, *cos_sin, layout=layout), wanted)
    assert torch.equal(rope(far, *cos_sin, layout=layout, inplace=True), wanted)
    there = memory.as_strided((2, shape[2], pairs), (1, strides[2], 2))
    for table, copy in zip(cos_sin, there, strict=True):
        copy.copy_(table)
    assert torch.equal(rope(near, *there.unbind(), layout=layout), wanted)


# ---- gradients


@LAYOUTS
def test_gradients_of_any_order_are_those_of_the_formula(layout: str) -> None:
    cos_sin = tables(5, pairs=3, factor=1.3)
    x = draw(2, 2, 5, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope(x, *cos_sin, layout=layout), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: rope(x, *cos_sin, layout=layout), x, fast_mode=True)


def test_gradients_reach_those_who_ask_and_may_be_expanded() -> None:
    cos_sin = tables(5, pairs=4)
    for asks in ((True, False), (False, True)):
        q, k = (draw(2, heads, 5, 8).requires_grad_(one) for heads, one in zip((4, 2), asks, strict=True))
        turned = rope_qk(q, k, *cos_sin)
        (turned[0].sum() + turned[1].sum()).backward()
        for x, one in zip((q, k), asks, strict=True):
            assert (x.grad is not None) == one
            if one:
                (expected,) = torch.autograd.grad(apply_rope(x, *cos_sin).sum(), x)
                torch.testing.assert_close(x.grad, expected)
    q, k = (draw(2, heads, 5, 8).requires_grad_() for heads in (4, 2))
    rope_qk(q, k, *cos_sin)[1].sum().backward()
    assert q.grad is None


def test_in_place_is_refused_where_a_gradient_is_wanted_and_fine_without() -> None:
    x, cos_sin = draw(2, 5, 8).requires_grad_(), tables(5, pairs=4)
    before = x.detach().clone()
    with pytest.raises(ValueError, match="inplace is True and x requires a gradient"):
        rope(x, *cos_sin, inplace=True)
    assert torch.equal(x, before)
    with torch.no_grad():
        rope(x, *cos_sin, inplace=True)
    with torch.inference_mode():
        other = before.clone()
        assert torch.equal(rope(other, *cos_sin, inplace=True), x)


def test_pytorch_notices_what_in_place_destroys() -> None:
    weight, x = draw(8).requires_grad_(), draw(2, 5, 8)
    product = (x * weight).sum()
    rope(x, *tables(5, pairs=4), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# ---- the comparison itself would notice


@pytest.mark.parametrize("fault", ["other layout", "turned back", "one position off", "rest turned", "no gradient"])
def test_planted_faults_are_caught(fault: str) -> None:
    x, (cos, sin) = draw(2, 3, 6, 12), tables(6, pairs=4)
    wrong = {
        "other layout": lambda x: rope(x, cos, sin, layout="interleaved"),
        "turned back": lambda x: rope(x, cos, -sin),
        "one position off": lambda x: rope(x, cos.roll(1, 0), sin.roll(1, 0)),
        "rest turned": lambda x: torch.cat((rope(x[..., :8], cos, sin), x[..., 8:].flip(-1)), -1),
        "no gradient": lambda x: rope(x.detach(), cos, sin) + 0 * x,
    }[fault]
    check(lambda x: rope(x, cos, sin), x, (cos, sin))
    with pytest.raises(AssertionError, match="error"):
        check(wrong, x, (cos, sin))


# ---- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "neox"}, "layout is 'neox'; accepted are half, interleaved"),
        ({"x": torch.zeros(2, 5, 6)}, "cos has 4 columns and x a head_dim of 6"),
        ({"x": torch.zeros(2, 3, 8)}, "cos has 5 positions and x 3; they must be equal"),
        ({"sin": torch.zeros(5, 3)}, r"cos has shape \[5, 4\] and sin \[5, 3\]"),
        ({"x": torch.zeros(8)}, "x has 1 axes and cos 2"),
        ({"x": torch.zeros(1, 1, 1, 5, 8)}, "x has 5 axes and cos 2"),
        ({"cos": torch.zeros(4), "sin": torch.zeros(4)}, "x has 3 axes and cos 1"),
        ({"cos": torch.zeros(3, 5, 4), "sin": torch.zeros(3, 5, 4)}, "cos has 3 sequences and x 2"),
        ({"x": torch.zeros(2, 5, 8, dtype=torch.int64)}, "x is torch.int64; float16"),
        ({"cos": torch.zeros(5, 4, requires_grad=True)}, "cos or sin requires a gradient"),
        ({"x": torch.zeros(2, 1, 8).expand(2, 5, 8), "inplace": True}, "inplace is True and x is expanded"),
        ({"cos": torch.zeros(5, 4, device="meta")}, "they must be on one device"),
    ],
)
def test_what_is_not_accepted_gets_one_sentence(change: dict, message: str) -> None:
    arguments = {"x": torch.zeros(2, 5, 8), "cos": torch.zeros(5, 4), "sin": torch.zeros(5, 4)} | change
    arguments |= {
        name: value.to(DEVICE) for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.is_cpu
    }
    with pytest.raises(ValueError, match=message) as caught:
        rope(**arguments)
    assert "\n" not in str(caught.value)


def test_queries_and_keys_are_named() -> None:
    q, k, cos_sin = draw(2, 3, 5, 8), draw(2, 1, 5, 6), tables(5, pairs=4)
    with pytest.raises(ValueError, match="cos has 4 columns and k a head_dim of 6"):
        rope_qk(q, k, *cos_sin)
    with pytest.raises(ValueError, match="q has 2 sequences and k 1; they must be equal"):
        rope_qk(q, q[:1], *cos_sin)


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter rounds bfloat16 wrongly")
def test_bfloat16_is_refused_in_the_interpreter_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="interpreter cuts results in bfloat16 off") as caught:
        rope(draw(2, 5, 8, dtype=torch.bfloat16), *tables(5, pairs=4))
    assert "\n" not in str(caught.value)


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    code = (
        "import torch; from course_lib.kernels.rope import rope\n"
        "try: rope(torch.zeros(5, 8), torch.zeros(5, 4), torch.zeros(5, 4))\n"
        "except ValueError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "x cannot be turned by the kernel" in found.stdout
    assert "TRITON_INTERPRET=1" in found.stdout


# ---- on a card


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("head_dim", "pairs"), [(128, 64), (80, 20), (576, 32)])
def test_real_sizes_on_a_card(head_dim: int, pairs: int, dtype: torch.dtype, layout: str) -> None:
    cos_sin = tables(2, 3001, pairs=pairs)
    x = draw(2, 3001, 12, head_dim, dtype=dtype).transpose(1, 2)
    check(lambda x: rope(x, *cos_sin, layout=layout), x, cos_sin, layout)
    wanted = rope(x, *cos_sin, layout=layout)
    assert torch.equal(rope(x, *cos_sin, layout=layout, inplace=True), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_more_than_2_to_the_31_elements_on_a_card() -> None:
    x, cos_sin = torch.randn(1, 2**19 + 1, 33, 128, dtype=torch.bfloat16, device="cuda"), tables(2**19 + 1, pairs=64)
    tail, wanted = x[:, -50:].transpose(1, 2).clone(), [table[-50:] for table in cos_sin]
    turned = rope(x.transpose(1, 2), *cos_sin, inplace=True)
    torch.testing.assert_close(turned[:, :, -50:], apply_rope(tail, *wanted))
