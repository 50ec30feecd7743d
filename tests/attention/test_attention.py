"""Every backend computes attention as exactly as plain PyTorch does, forward and backward, for every call it accepts."""

import functools
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_attention import INFINITY, Call, calls, plain_attention

from course_lib.attention import attention, blockwise

BACKENDS = ("reference", "blockwise", "sdpa", "triton")
EXAMPLES = {"reference": 50, "blockwise": 120, "sdpa": 70, "triton": 40}
HALVES = (torch.float16, torch.bfloat16)


def backend_of(name):
    """Return a backend as a function that returns output and log-sum-exp (None from sdpa, which has none)."""
    if name == "sdpa":
        return lambda *tensors, **rules: (attention(*tensors, backend=name, **rules), None)
    return functools.partial(attention, backend=name, return_lse=True)


def small_blocks(rows, scores):
    """Let blocks have so few rows and scores that small inputs have many of them."""
    return mock.patch.multiple(blockwise, BLOCK_ROWS=rows, HEAD_SCORES=scores, ALL_SCORES=1)


def errors(exact, found):
    """Return for each result the largest error against float64."""
    largest = {}
    for name, right in exact.items():
        mine = found[name].double()
        assert mine.shape == right.shape, name
        if name == "lse":
            assert torch.equal(mine == -INFINITY, right == -INFINITY), "a row is blind that should see, or sees"
            mine, right = (one.masked_fill(right == -INFINITY, 0) for one in (mine, right))
            mine, right = (
                mine / (1 + right.abs()),
                right / (1 + right.abs()),
            )  # an additive mask may be the end of the range
        largest[name] = (mine - right).abs().max().item() if right.numel() else 0.0
    return largest


def assert_as_exact_as_plain(call: Call, attend, **options):
    """Compare with float64: the error may be twice that of the formula in the same dtype, plus one rounding of the terms.

    The formula may be lucky, so its error is the largest of several runs: on this call, with its numbers moved by a rounding,
    and on fresh calls of this kind; more, the fewer the numbers. In float64 it is that in float32, scaled down, and four times
    that, for there we compare with the formula itself.
    """
    dtype, eps = call.q.dtype, torch.finfo(call.q.dtype).eps
    plain_dtype, scaled = dtype, 1.0
    if dtype == torch.float64:
        plain_dtype, scaled = torch.float32, 4 * eps / torch.finfo(torch.float32).eps
    exact = call.run(plain_attention, torch.float64, **options)
    accepted = dict.fromkeys(exact, 0.0)
    seeds = range(4 + 80 // (1 + call.q.numel()))
    pairs = [(call, call)]
    pairs += [(call, call.nudged(seed)) for seed in seeds]
    pairs += [(one, one) for one in map(call.fresh, seeds)]
    for of, run in pairs:
        right = exact if of is call else of.run(plain_attention, torch.float64, **options)
        for name, error in errors(right, run.run(plain_attention, plain_dtype, **options)).items():
            accepted[name] = max(accepted[name], scaled * error)
    found = call.run(attend, dtype, **options)
    assert all(found[name].dtype == dtype for name in ("output", "q_grad", "k_grad", "v_grad"))
    assert "lse" not in found or found["lse"].dtype == torch.promote_types(dtype, torch.float32)
    terms = call.terms(exact, **options)
    for name, error in errors(exact, found).items():
        limit = 2 * accepted[name] + eps * terms[name]
        assert error <= limit, f"{name}: error {error:.2e}, accepted {limit:.2e}: {call!r}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_is_at_most_twice_that_of_plain_pytorch(backend):
    dtypes = (torch.float16, torch.float32) if backend == "triton" else (*HALVES, torch.float32, torch.float64)

    @settings(max_examples=EXAMPLES[backend], suppress_health_check=[HealthCheck.too_slow])
    @given(calls(dtypes, softcap=backend != "sdpa"), st.integers(1, 9), st.integers(1, 40))
    def check(call, rows, scores):
        if backend == "sdpa":  # PyTorch's gradient is wrong in rows that hold the lowest numbers only
            lse = plain_attention(call.q.double(), call.k.double(), call.v.double(), **call.rules)[1]
            call.output_grad[(lse < -1e4) & (lse != -INFINITY)] = 0
        with mock.patch.multiple(blockwise, BLOCK_ROWS=rows, HEAD_SCORES=scores, ALL_SCORES=scores):
            assert_as_exact_as_plain(call, backend_of(backend), with_lse=backend != "sdpa")

    check()


# ---- gradients


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (4, 2, 1), (2, 1, 2, 3), (2, 4, 2, 3), (1, 3), (1,)])
def test_floating_mask_gets_its_gradient_summed_over_broadcast_axes(backend, shape):
    torch.manual_seed(len(shape))
    q, k, v = torch.randn(2, 4, 2, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    rules = {"causal": True, "attention_mask": torch.randn(shape)}
    call = Call(q, k, v, rules, torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2))
    with mock.patch.multiple(blockwise, BLOCK_ROWS=2, HEAD_SCORES=2, ALL_SCORES=2):
        assert_as_exact_as_plain(call, backend_of(backend), with_lse=backend != "sdpa", mask_grad=True)


RULES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": 2},
    "capped": {"softcap": 1.5, "causal": True, "scale": 0.7},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "everything": {"softcap": 2.0, "causal": True, "sliding_window": 3, "alibi_slopes": torch.tensor([0.3, 0.2])},
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_gradients_are_those_of_finite_differences(backend, rules):
    """In float64, with a mask that has a gradient; the first rows are blind where the rule is causal."""
    options = dict(RULES[rules])
    if backend == "sdpa":
        options.pop("softcap", None)

    def call(q, k, v, mask):
        results = backend_of(backend)(q, k, v, attention_mask=mask, **options)
        # A row that sees nothing has a log-sum-exp of minus infinity, which differences cannot cross.
        return results[0], (q.sum() if results[1] is None else results[1].clamp(min=-1e3))

    shapes = (1, 2, 4, 3), (1, 1, 3, 3), (1, 1, 3, 2), (1, 1, 4, 3)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    with mock.patch.multiple(blockwise, BLOCK_ROWS=4, HEAD_SCORES=8, ALL_SCORES=8):
        assert torch.autograd.gradcheck(call, inputs)


def test_blockwise_has_one_derivative_and_says_so():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    with pytest.raises(
        RuntimeError, match="second derivative, which blockwise attention has not; backend='reference' has one"
    ):
        torch.autograd.grad(attention(q, q, q, backend="blockwise").sum(), q, create_graph=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_blockwise_gives_gradients_to_those_who_ask(wanted):
    leaves = [torch.randn(1, 2, 3, 4, requires_grad=index in wanted) for index in range(3)]
    attention(*leaves, backend="blockwise").sum().backward()
    assert [one.grad is not None for one in leaves] == [index in wanted for index in range(3)]


# ---- blockwise alone


@pytest.mark.parametrize(("query_len", "kv_len"), [(700, 700), (300, 1000), (1000, 300), (1, 3000)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "sliding_window": 100}, {"sliding_window": 33}]
)
def test_blocks_of_the_size_in_use_fit_together(query_len, kv_len, options):
    q, k, v = torch.randn(1, 4, query_len, 16), torch.randn(1, 2, kv_len, 16), torch.randn(1, 2, kv_len, 8)
    call = Call(q, k, v, options, torch.randn(1, 4, query_len, 8), torch.randn(1, 4, query_len))
    assert_as_exact_as_plain(call, backend_of("blockwise"))


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "sliding_window": 5}, {"sliding_window": 5}])
@pytest.mark.parametrize(("query_len", "kv_len"), [(24, 24), (8, 24), (24, 8)])
def test_blocks_that_no_row_sees_are_skipped(query_len, kv_len, options):
    rows = columns = 4
    q, k, v = torch.randn(1, 1, query_len, 8), torch.randn(1, 1, kv_len, 8), torch.eye(kv_len)[None, None]
    visible = plain_attention(q, k, v, **options)[0][0, 0] > 0
    calls_made = []

    def update(scores, *others):
        calls_made.append(scores.shape)
        original(scores, *others)

    original = blockwise.update
    with mock.patch.multiple(blockwise, BLOCK_ROWS=rows, HEAD_SCORES=rows * columns, ALL_SCORES=1, update=update):
        attention(q, k, v, backend="blockwise", **options)
    needed = 0
    for block in visible.split(rows):
        seen = block.any(0).nonzero()
        needed += 0 if len(seen) == 0 else -(-int(seen.max() - seen.min() + 1) // columns)
    assert len(calls_made) == needed


def test_blockwise_computes_in_its_own_precision_under_autocast():
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    upstream = torch.randn(1, 2, 9, 16)
    outside = attention(q, k, v, backend="blockwise")
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention(q, k, v, backend="blockwise")
        assert torch.equal(inside, outside)
        gradients = torch.autograd.grad(inside, (q, k, v), upstream)
    for mine, right in zip(gradients, torch.autograd.grad(outside, (q, k, v), upstream), strict=True):
        assert torch.equal(mine, right)
