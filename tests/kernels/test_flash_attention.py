"""The Triton kernels keep attention's promises: in the interpreter at small sizes, and on a card, if there is one, at real size."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.attention.reference import reference_attention
from course_lib.attention.rules import Rules, positions
from course_lib.positions import alibi_slopes

pytest.importorskip("triton", reason="Triton exists for Linux only")
from course_lib.kernels import flash_attention as module
from course_lib.kernels.flash_attention import configuration, flash_attention, flash_attention_varlen, refusal

INTERPRETED = module.INTERPRETED
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="neither Triton's interpreter nor a card"
)
#: Fresh inputs in every run; in CI the same ones each time, so that a run judges the change.
SEEDS = random.Random(0 if os.environ.get("CI") else None)
LOWEST = torch.finfo(torch.float32).min
NAMES = ("output", "lse", "dq", "dk", "dv")


def draw(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None, device: str = DEVICE
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEEDS.randrange(2**31) if seed is None else seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def inputs(
    batch: int = 1,
    query_heads: int = 1,
    kv_heads: int = 1,
    query_len: int = 70,
    kv_len: int = 70,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    return [
        draw(batch, query_heads, query_len, head_dim, dtype=dtype),
        draw(batch, kv_heads, kv_len, head_dim, dtype=dtype),
        draw(batch, kv_heads, kv_len, value_dim or head_dim, dtype=dtype),
    ]


def run(
    call: Callable[..., tuple[torch.Tensor, torch.Tensor]], tensors: list[torch.Tensor], seed: int
) -> list[torch.Tensor]:
    """Return output, log-sum-exp and gradients of a call; the gradients that arrive depend on the seed alone."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output, lse = call(*leaves)
    # Where the log of the sum is lost in the maximum, autograd's gradient of logsumexp is wrong.
    seen = lse > -1e20
    grad_output = draw(*output.shape, seed=seed, device=output.device).to(output.dtype)
    grad_lse = draw(*lse.shape, seed=seed + 1, device=lse.device).to(lse.dtype) * seen
    grads = torch.autograd.grad((output, lse), leaves, (grad_output, grad_lse))
    return [output.detach(), lse.detach(), *grads]


def errors_of(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Return the largest error of each result where the exact one is finite."""
    return [
        ((one.double() - truth)[torch.isfinite(truth)].abs().amax().item() if torch.isfinite(truth).any() else 0.0)
        for one, truth in zip(found, exact, strict=True)
    ]


def roundings_of_scores(
    tensors: list[torch.Tensor], output: torch.Tensor, rules: Rules, seed: int
) -> tuple[float, float, float, float, float]:
    """Return by how much the results move at most where a score is off by the roundings of its terms in float32.

    Going back, scores are computed again, perhaps with their products added in another order. The weights of a row then no longer
    have the sum 1, as they have in plain PyTorch even where a score is wrong.
    """
    q, k, v = (tensor.double() for tensor in tensors)
    if not output.numel() or not k.numel():
        return (0.0,) * 5
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = rules.shape(q @ k.mT, *positions(q.shape[2], k.shape[2], q.device), rules.attention_mask)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    grad = draw(*output.shape, seed=seed, device=DEVICE).double()
    grad_lse = draw(*output.shape[:3], seed=seed + 1, device=DEVICE).double()
    # Half of it for the sum, half for its scale and what is added.
    terms = torch.finfo(torch.float32).eps * abs(rules.scale) * (q.abs() @ k.abs().mT)
    spread = (weights @ v.square() - output.square()).clamp(min=0.0).sqrt() * terms.amax(-1, keepdim=True)
    moves = weights * (terms + (weights * terms).sum(-1, keepdim=True))
    dscores = abs(rules.scale) * moves * (grad @ v.mT + (grad_lse - (grad * output).sum(-1))[..., None]).abs()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dscores.mT @ q.abs(), moves.mT @ grad.abs()))
    # A row that sees one key has its score for a log-sum-exp: a sum that can be much smaller than its terms.
    return tuple(x.max().item() for x in (spread, terms, dscores @ k.abs(), dk, dv))


def assert_accurate(
    kernel: list[torch.Tensor],
    plain: list[float],
    exact: list[torch.Tensor],
    allowance: list[float],
    roundings: float,
) -> None:
    """Against float64 the kernel errs at most twice as much as plain PyTorch in the same dtype, plus roundings of the result."""
    for name, ours, allowed, truth, extra in zip(NAMES, kernel, plain, exact, allowance, strict=True):
        assert ours.shape == truth.shape, name
        finite = torch.isfinite(truth)
        assert torch.equal(ours[~finite].double(), truth[~finite]), f"{name}: infinities differ"
        assert torch.isfinite(ours[finite]).all(), f"{name}: not finite"
        if finite.any():
            (error,) = errors_of([ours], [truth])
            rounding = roundings * torch.finfo(ours.dtype).eps * truth[finite].abs().max().item()
            assert error <= 2 * allowed + rounding + extra, f"{name}: error {error:.2e}, plain PyTorch's {allowed:.2e}"


def check(tensors: list[torch.Tensor], **rules: object) -> None:
    """Compare the kernels' output, log-sum-exp and gradients with the reference in float64."""
    rules.setdefault("scale", tensors[0].shape[-1] ** -0.5)
    compare(partial(flash_attention, **rules), tensors)


def compare(call: partial, tensors: list[torch.Tensor], expected: Rules | None = None) -> None:
    rules, seed = expected or Rules(**call.keywords), SEEDS.randrange(2**31)
    reference = partial(reference_attention, rules=rules)
    exact = run(reference, [tensor.double() for tensor in tensors], seed)
    # The gradient of a score is a weight times dO.V - dO.O. Where one key has all the weight the two are equal, and a kernel that
    # has the second from the rounded output, as every flash attention, is left with that rounding.
    products = exact[0] * draw(*exact[0].shape, seed=seed, device=DEVICE)
    rounding = torch.finfo(torch.float32).eps * products.abs().sum(-1)
    if tensors[0].dtype != torch.float32:
        rounding += torch.finfo(tensors[0].dtype).eps / 2 * products.norm(dim=-1)
    rest = rounding.amax().item() * abs(rules.scale) if products.numel() else 0.0
    scores = roundings_of_scores(tensors, exact[0], rules, seed)
    # Plain PyTorch may be lucky once, so its error is the largest on these numbers and on two sets a rounding away.
    plain = errors_of(run(reference, tensors, seed), exact)
    for _ in range(2):
        near = [one + one * torch.finfo(one.dtype).eps * draw(*one.shape, dtype=one.dtype) for one in tensors]
        beside = run(reference, [one.double() for one in near], seed)
        plain = list(map(max, plain, errors_of(run(reference, near, seed), beside)))
    largest = [tensor.abs().amax().item() if tensor.numel() else 0.0 for tensor in tensors]
    assert_accurate(
        run(call, tensors, seed),
        plain,
        exact,
        [x + y for x, y in zip(scores, (0.0, 0.0, rest * largest[1], rest * largest[0], 0.0), strict=True)],
        # The interpreter's products add term after term, PyTorch's in blocks.
        max(1.0, tensors[0].shape[-1] ** 0.5 / 4),
    )


# ---- lengths, dimensions, heads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("query_len", "kv_len"), [(1, 1), (1, 70), (70, 1), (64, 64), (97, 97), (40, 133), (133, 40), (65, 129)]
)
def test_lengths_align_at_the_end_of_the_keys(query_len: int, kv_len: int, causal: bool) -> None:
    check(inputs(query_len=query_len, kv_len=kv_len), causal=causal)


@pytest.mark.parametrize(("query_len", "kv_len"), [(0, 70), (70, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_lengths_give_zeros_and_zero_gradients(query_len: int, kv_len: int, causal: bool) -> None:
    check(inputs(batch=2, query_len=query_len, kv_len=kv_len), causal=causal)


def test_empty_batch_gives_an_empty_result() -> None:
    output, lse = flash_attention(*inputs(batch=0), scale=1.0)
    assert output.shape == (0, 1, 70, 16)
    assert lse.shape == (0, 1, 70)


@pytest.mark.parametrize("head_dim", [1, 40, 59, 80, 96, 111, 256])
def test_any_head_dim(head_dim: int) -> None:
    check(inputs(query_len=37, kv_len=45, head_dim=head_dim), causal=True)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(40, 24), (16, 80), (128, 1)])
def test_value_dim_may_differ(head_dim: int, value_dim: int) -> None:
    check(inputs(query_len=37, kv_len=45, head_dim=head_dim, value_dim=value_dim), causal=True)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (6, 2), (4, 4), (3, 1)])
def test_query_heads_share_the_keys_of_their_group(query_heads: int, kv_heads: int) -> None:
    check(inputs(batch=2, query_heads=query_heads, kv_heads=kv_heads, query_len=33, kv_len=50), causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.05, 0.0, -0.3])
def test_any_finite_scale(dtype: torch.dtype, scale: float) -> None:
    check(inputs(dtype=dtype, query_len=40), scale=scale, causal=True)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = inputs(query_len=50, kv_len=50)
    check([q * 100, k * 100, v], causal=True)


# ---- strides and addresses


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (3, 5), value=torch.nan)[..., 3:-5]


def last_axis_apart(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def one_sequence_for_all(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x)


def one_row_for_all(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, :1].expand_as(x)


@pytest.mark.parametrize("layout", [transposed, padded, last_axis_apart, one_sequence_for_all, one_row_for_all])
def test_any_strides(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check([layout(x) for x in inputs(batch=2, query_heads=2, kv_heads=2, query_len=40, kv_len=50)], causal=True)


def test_output_is_laid_out_like_the_queries() -> None:
    q, k, v = (transposed(x) for x in inputs(value_dim=8))
    output, _ = flash_attention(q, k, v, scale=1.0)
    assert output.transpose(1, 2).is_contiguous()
    output, _ = flash_attention(*inputs(), scale=1.0)
    assert output.is_contiguous()


@pytest.mark.parametrize("far_axis", [0, 1, 2])
def test_offsets_are_64_bit(far_axis: int, tmp_path: Path) -> None:
    # Sequences, heads or rows lie 2**31 elements apart in a sparse file, of which almost nothing exists.
    strides = [2**15, 2**14, 2**8, 1]
    strides[far_axis] = 2**26 if far_axis == 2 else 2**31 + 2**20
    if DEVICE == "cuda":
        memory = torch.empty(2**32, dtype=torch.float16, device=DEVICE)
    else:
        path = tmp_path / "sparse"
        with path.open("wb") as file:
            file.truncate(2**33)
        memory = torch.from_file(str(path), shared=True, size=2**32, dtype=torch.float16)
    near = inputs(batch=2, query_heads=2, kv_heads=2, query_len=40, kv_len=40, dtype=torch.float16)
    near.append(draw(2, 2, 40, 40, dtype=torch.float16))
    far = [memory.as_strided(x.shape, strides, 64 * place) for place, x in enumerate(near)]
    results = []
    for *qkv, mask in (near, far):
        if qkv[0] is far[0]:
            for there, here in zip(far, near, strict=True):
                there.copy_(here)
        results.append(run(partial(flash_attention, scale=0.25, causal=True, attention_mask=mask), qkv, seed=0))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


# ---- rules


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("query_len", "kv_len", "window"),
    [(99, 99, 1), (99, 99, 20), (140, 140, 40), (99, 99, 98), (50, 150, 20), (150, 50, 20)],
)
def test_window_counts_the_own_position(query_len: int, kv_len: int, window: int, causal: bool) -> None:
    check(inputs(query_len=query_len, kv_len=kv_len), causal=causal, sliding_window=window)


def test_window_of_one_sees_only_itself() -> None:
    q, k, v = inputs(query_heads=1, query_len=100, kv_len=100)
    output, _ = flash_attention(q, k, v, scale=0.3, causal=True, sliding_window=1)
    torch.testing.assert_close(output, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("query_len", [30, 80])
def test_alibi_for_heads_that_are_no_power_of_two(query_len: int, causal: bool) -> None:
    slopes = alibi_slopes(6)[None].to(DEVICE)
    check(inputs(query_heads=6, kv_heads=2, query_len=query_len, kv_len=50), causal=causal, alibi_slopes=slopes)


def test_alibi_slopes_may_differ_by_sequence() -> None:
    check(inputs(batch=3, query_heads=2, query_len=20, kv_len=20), causal=True, alibi_slopes=draw(3, 2).abs())


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_softcap_bounds_scores_before_anything_is_hidden(softcap: float, dtype: torch.dtype) -> None:
    check(inputs(dtype=dtype), softcap=softcap, causal=True, sliding_window=30, scale=1.0)


@pytest.mark.parametrize("rows_and_columns", [(1, 1), (1, 70), (40, 1), (40, 70)])
@pytest.mark.parametrize("batch_and_heads", [(1, 2), (2, 1), (2, 2)])
def test_masks_broadcast(batch_and_heads: tuple[int, int], rows_and_columns: tuple[int, int]) -> None:
    mask = draw(*batch_and_heads, *rows_and_columns)
    tensors = inputs(batch=2, query_heads=2, kv_heads=1, query_len=40, kv_len=70)
    for attention_mask in (mask > -0.5, mask) if batch_and_heads == (2, 2) else (mask > -0.5,):
        check(tensors, attention_mask=attention_mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_additive_masks_of_any_floating_dtype(dtype: torch.dtype) -> None:
    check(inputs(), attention_mask=draw(1, 1, 70, 70, dtype=dtype), causal=True)


def test_expanded_and_transposed_masks_are_read_where_they_are() -> None:
    mask = draw(70, 40).t() > 0
    check(inputs(batch=2, query_heads=2, query_len=40), attention_mask=mask.expand(2, 2, 40, 70))


@pytest.mark.parametrize("lowest", [LOWEST, -1e30, -10000.0])
def test_rows_of_the_lowest_number_attend_uniformly(lowest: float) -> None:
    mask = torch.zeros(1, 1, 70, 70, device=DEVICE)
    mask[:, :, 3] = lowest
    mask[:, :, 4, 20:] = lowest
    mask[:, :, 5, 20:] = -torch.inf
    mask[:, :, 6] = -torch.inf
    q, k, v = inputs()
    check([q, k, v], attention_mask=mask)
    if lowest < -1e20:
        output, _ = flash_attention(q, k, v, scale=0.25, attention_mask=mask)
        torch.testing.assert_close(output[:, :, 3], v.mean(dim=2).expand_as(output[:, :, 3]))


def test_all_rules_together() -> None:
    check(
        inputs(batch=1, query_heads=6, kv_heads=3, query_len=80, kv_len=100, head_dim=40, value_dim=24),
        causal=True,
        sliding_window=60,
        softcap=5.0,
        alibi_slopes=alibi_slopes(6)[None].to(DEVICE),
        attention_mask=draw(1, 6, 1, 100) > -1,
    )


@settings(max_examples=8)
@given(st.data())
def test_random_calls_agree_with_float64(data: st.DataObject) -> None:
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    kv_heads, batch, query_len, kv_len = integers(1, 2), integers(1, 2), integers(1, 100), integers(1, 100)
    heads = kv_heads * integers(1, 2)
    rules: dict[str, object] = {"causal": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        rules["sliding_window"] = integers(1, 110)
    if data.draw(st.booleans()):
        rules["softcap"] = data.draw(st.floats(0.5, 50))
    if data.draw(st.booleans()):
        rules["alibi_slopes"] = draw(1, heads).abs()
    if data.draw(st.booleans()):
        mask = draw(*(data.draw(st.sampled_from([1, size])) for size in (batch, heads, query_len, kv_len)))
        rules["attention_mask"] = mask > 0 if data.draw(st.booleans()) else mask
    dtype = data.draw(st.sampled_from([torch.float16, torch.float32]))
    check(inputs(batch, heads, kv_heads, query_len, kv_len, integers(1, 48), integers(1, 48), dtype), **rules)


# ---- rows that see nothing, log-sum-exp, memory


def test_blind_rows_are_zero_with_zero_gradients() -> None:
    tensors = inputs(query_len=100, kv_len=60)
    mask = torch.ones(1, 1, 100, 60, dtype=torch.bool, device=DEVICE)
    mask[:, :, 70] = False
    blind = torch.zeros(100, dtype=torch.bool, device=DEVICE)
    blind[:40] = blind[70] = True
    output, lse, dq, dk, dv = run(
        partial(flash_attention, scale=0.3, causal=True, attention_mask=mask), tensors, seed=0
    )
    assert (output[:, :, blind] == 0).all()
    assert (lse[:, :, blind] == -torch.inf).all()
    assert (dq[:, :, blind] == 0).all()
    assert all(torch.isfinite(x).all() for x in (output, dq, dk, dv))


def test_whatever_gradient_arrives_at_a_blind_lse_is_ignored() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(query_len=50, kv_len=20))
    _, lse = flash_attention(q, k, v, scale=0.3, causal=True)
    grads = torch.autograd.grad(lse, (q, k, v), torch.where(torch.isfinite(lse), 1.0, torch.nan))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_a_gradient_of_the_lse_alone_reaches_queries_and_keys() -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    ours = torch.autograd.grad(flash_attention(*tensors, scale=0.3, causal=True)[1].sum(), tensors[:2])
    theirs = torch.autograd.grad(reference_attention(*tensors, Rules(0.3, causal=True))[1].sum(), tensors[:2])
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_gradients_are_computed_for_those_who_ask(wanted: tuple[int, ...]) -> None:
    tensors = inputs(query_len=40, kv_len=40)
    for index in wanted:
        tensors[index].requires_grad_()
    flash_attention(*tensors, scale=0.3)[0].sum().backward()
    expected = [x.detach().requires_grad_() for x in tensors]
    reference_attention(*expected, Rules(0.3))[0].sum().backward()
    for index, (got, truth) in enumerate(zip(tensors, expected, strict=True)):
        assert (got.grad is not None) == (index in wanted)
        if index in wanted:
            torch.testing.assert_close(got.grad, truth.grad)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is allocated empty with NaN, so that an element nobody writes is seen."""
    fill = lambda make: lambda *args, **kwargs: make(*args, **kwargs).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(torch, "empty", fill(torch.empty))
    monkeypatch.setattr(torch, "empty_like", fill(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", fill(torch.Tensor.new_empty))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("query_len", "kv_len"), [(70, 45), (45, 70), (5, 0), (0, 5)])
def test_every_element_of_every_result_is_written(query_len: int, kv_len: int) -> None:
    tensors = inputs(batch=2, query_heads=4, kv_heads=2, query_len=query_len, kv_len=kv_len, head_dim=24, value_dim=40)
    results = run(partial(flash_attention, scale=0.3, causal=True, sliding_window=9), tensors, seed=0)
    assert not any(torch.isnan(result).any() for result in results)


def test_two_runs_give_the_same_bits() -> None:
    tensors = inputs(query_heads=6, kv_heads=2, dtype=torch.float16)
    call = partial(flash_attention, scale=0.3, causal=True)
    for first, second in zip(run(call, tensors, 0), run(call, tensors, 0), strict=True):
        assert torch.equal(first, second)


# ---- packed sequences


def packed(lengths: list[int], heads: int, dim: int) -> torch.Tensor:
    return draw(sum(lengths), heads, dim)


def starts(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("queries", "keys", "rules"),
    [
        ([70, 1, 33], [70, 1, 33], {"causal": True}),
        ([5, 0, 40], [64, 7, 40], {}),
        ([5, 0, 40], [64, 7, 40], {"causal": True, "sliding_window": 7, "softcap": 3.0}),
        ([40, 9], [0, 30], {"causal": True}),
        ([0, 0], [3, 0], {}),
        ([0], [0], {}),
        ([90], [30], {"causal": True}),
    ],
)
def test_packed_sequences_equal_single_ones(queries: list[int], keys: list[int], rules: dict[str, object]) -> None:
    q, k, v = packed(queries, 2, 24), packed(keys, 1, 24), packed(keys, 1, 16)
    slopes = draw(len(queries), 2).abs()

    def together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
        cumulative = {"cu_seqlens_q": starts(queries), "cu_seqlens_k": starts(keys, torch.int64)}
        return flash_attention_varlen(q, k, v, **cumulative, **lengths, scale=0.3, alibi_slopes=slopes, **rules)

    def singly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = zip(q.split(queries), k.split(keys), v.split(keys), slopes.split(1), strict=True)
        results = [
            flash_attention(*(x.transpose(0, 1)[None] for x in qkv), scale=0.3, alibi_slopes=slope, **rules)
            for *qkv, slope in pieces
        ]
        outputs, sums = (torch.cat([result[index][0].transpose(0, 1) for result in results]) for index in (0, 1))
        return outputs, sums

    for name, ours, theirs in zip(NAMES, run(together, [q, k, v], 3), run(singly, [q, k, v], 3), strict=True):
        assert ours.shape == theirs.shape, name
        assert torch.equal(ours, theirs), name


def test_packed_tensors_may_have_any_strides() -> None:
    qkv = draw(50, 3, 4, 16)
    lengths = {
        "max_seqlen_q": 30,
        "max_seqlen_k": 30,
        "cu_seqlens_q": starts([20, 30]),
        "cu_seqlens_k": starts([20, 30]),
    }
    output, lse = flash_attention_varlen(*qkv.unbind(1), **lengths, scale=0.3, causal=True)
    again, lse_again = flash_attention_varlen(
        *(x.contiguous() for x in qkv.unbind(1)), **lengths, scale=0.3, causal=True
    )
    assert torch.equal(output, again)
    assert torch.equal(lse, lse_again)


# ---- the comparison itself would notice


@pytest.mark.parametrize(
    "fault",
    [
        "top-left alignment",
        "window one wider",
        "another cap",
        "no slope",
        "heads in turn",
        "scale forgotten",
        "gradient of the lse forgotten",
    ],
)
def test_planted_faults_are_caught(fault: str) -> None:
    tensors = inputs(query_heads=4, kv_heads=2, query_len=30, kv_len=40)
    rules: dict[str, object] = {
        "scale": 0.25,
        "causal": True,
        "sliding_window": 10,
        "softcap": 2.0,
        "alibi_slopes": alibi_slopes(4)[None].to(DEVICE),
    }
    planted = dict(rules)
    call: Callable[..., tuple[torch.Tensor, torch.Tensor]] = flash_attention
    if fault == "top-left alignment":
        visible = torch.ones(30, 40, dtype=torch.bool, device=DEVICE).tril().triu(-9)
        planted |= {"causal": False, "sliding_window": None, "attention_mask": visible[None, None]}
    elif fault == "window one wider":
        planted["sliding_window"] = 11
    elif fault == "another cap":
        planted["softcap"] = 2.1
    elif fault == "no slope":
        planted["alibi_slopes"] = None
    elif fault == "scale forgotten":
        planted["scale"] = 1.0
    elif fault == "heads in turn":
        call = lambda q, k, v, **rules: flash_attention(q, k.flip(1), v.flip(1), **rules)  # noqa: E731
    else:
        call = lambda *args, **rules: (lambda o, lse: (o, lse.detach() + 0 * o.sum()))(*flash_attention(*args, **rules))  # noqa: E731
    compare(partial(flash_attention, **rules), tensors)
    with pytest.raises(AssertionError, match=r"error|infinities"):
        compare(partial(call, **planted), tensors, expected=Rules(**rules))


# ---- refusals and configurations


def test_float64_is_refused() -> None:
    assert "float64" in refusal(torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=DEVICE))


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter cannot multiply bfloat16")
def test_bfloat16_is_refused_in_the_interpreter_in_one_sentence() -> None:
    reason = refusal(torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16))
    assert "bfloat16" in reason
    assert "float32 or float16" in reason
    assert "\n" not in reason
    assert refusal(torch.zeros(1, 1, 1, 1)) is None


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    code = (
        "import torch; from course_lib.kernels.flash_attention import refusal; print(refusal(torch.zeros(1, 1, 1, 1)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "TRITON_INTERPRET=1" in found.stdout


@pytest.mark.parametrize(
    "capability", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "sm_999"]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kernel", ["forward", "delta", "dkdv", "dq"])
def test_every_card_has_a_configuration_that_triton_accepts(kernel: str, dtype: str, capability: str) -> None:
    for head_dim in (1, 64, 65, 128, 256):
        for masked in (False, True):
            cut = configuration(kernel, head_dim, dtype, capability, masked)
            assert all(size >= 16 and size & (size - 1) == 0 for size in cut[:2])
            assert cut.num_warps in (4, 8)
            assert 1 <= cut.num_stages <= 4


# ---- on a card


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"causal": True},
        {"causal": True, "sliding_window": 300},
        {"causal": True, "softcap": 20.0},
        {"causal": True, "alibi_slopes": "slopes"},
        {"attention_mask": "boolean"},
        {"attention_mask": "additive", "causal": True},
    ],
    ids=str,
)
def test_real_sizes_on_a_card(rules: dict[str, object], head_dim: int) -> None:
    lengths = {"query_len": 2000, "kv_len": 2100}
    rules = dict(rules)
    if "alibi_slopes" in rules:
        rules["alibi_slopes"] = alibi_slopes(4)[None].to(DEVICE)
    if "attention_mask" in rules:
        mask = draw(2, 1, 2000, 2100)
        rules["attention_mask"] = mask > 0 if rules["attention_mask"] == "boolean" else mask.bfloat16()
    for dtype in (torch.bfloat16, torch.float16):
        check([transposed(x) for x in inputs(2, 4, 2, **lengths, head_dim=head_dim, dtype=dtype)], **rules)
