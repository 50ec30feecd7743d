"""What attention promises where others went wrong. Each promise is checked on every backend, and fails when its fault is planted."""

import inspect
import itertools

import pytest
import torch
from plain_attention import INFINITY, LAYOUTS, lay_out, plain_attention
from test_attention import BACKENDS, backend_of

from course_lib.attention import arguments, blockwise, reference, rules, sdpa
from course_lib.kernels import flash_attention
from course_lib.positions import alibi_slopes

WITH_LSE = [name for name in BACKENDS if name != "sdpa"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def draw(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def weights(backend, query_len, kv_len, **options):
    """Return the weights of one head with equal dot products: with the unit matrix as values they are the output."""
    q, k, v = torch.zeros(1, 1, query_len, 8), torch.zeros(1, 1, kv_len, 8), torch.eye(kv_len)[None, None]
    return backend_of(backend)(q, k, v, **options)[0][0, 0]


def seen(backend, query_len, kv_len, **options):
    """Return what each row sees, as a picture."""
    rows = weights(backend, query_len, kv_len, **options)
    return ["".join("x" if weight > 0 else "." for weight in row) for row in rows.tolist()]


def close(found, expected, tolerance=2e-5):
    """Assert that nothing is NaN and all is near."""
    assert not found.isnan().any()
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(found[~finite], expected[~finite])
    assert ((found - expected)[finite].abs() <= tolerance * (1 + expected[finite].abs())).all()


# ---- alignment of lengths


@every_backend
def test_last_query_stands_at_the_last_key(backend):
    assert seen(backend, 3, 5, causal=True) == ["xxx..", "xxxx.", "xxxxx"]
    assert seen(backend, 1, 4, causal=True) == ["xxxx"]
    assert seen(backend, 3, 3, causal=True) == ["x..", "xx.", "xxx"]


@every_backend
def test_queries_before_the_first_key_are_zero_and_have_no_gradient(backend):
    assert seen(backend, 4, 2, causal=True) == ["..", "..", "x.", "xx"]
    q, k, v = (one.requires_grad_() for one in draw((2, 4, 5, 8), (2, 2, 2, 8), (2, 2, 2, 8)))
    output, lse = backend_of(backend)(q, k, v, causal=True)
    assert (output[:, :, :3] == 0).all()
    assert (output[:, :, 3:] != 0).all()
    if lse is not None:
        assert torch.equal(lse == -INFINITY, torch.tensor([True] * 3 + [False] * 2).expand(2, 4, 5))
    q_grad, *others = torch.autograd.grad(output.sum(), (q, k, v))
    assert (q_grad[:, :, :3] == 0).all()
    assert all(one.isfinite().all() for one in (q_grad, *others))


# ---- rows that see nothing


@every_backend
@pytest.mark.parametrize("kind", ["boolean", "additive", "with slopes"])
def test_fully_masked_row_is_zero_and_has_no_gradient(backend, kind):
    visible = torch.tensor([[True, False, True], [False, False, False]])[:, None, None].expand(2, 1, 4, 3)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -INFINITY) if kind == "additive" else visible
    slopes = alibi_slopes(2) if kind == "with slopes" else None
    q, k, v = (one.requires_grad_() for one in draw((2, 2, 4, 8), (2, 2, 3, 8), (2, 2, 3, 8)))
    output, lse = backend_of(backend)(q, k, v, attention_mask=mask, alibi_slopes=slopes)
    close(output[0], plain_attention(q, k, v, attention_mask=mask, alibi_slopes=slopes)[0][0])
    assert (output[1] == 0).all()
    assert lse is None or (lse[1] == -INFINITY).all()
    for gradient in torch.autograd.grad(output, (q, k, v), torch.randn_like(output)):
        assert gradient.isfinite().all()
        assert (gradient[1] == 0).all()


@pytest.mark.parametrize("backend", WITH_LSE)
def test_parts_merge_by_their_log_sum_exp_though_some_are_empty(backend):
    """Three sequences, keys in four parts, of which one has no keys at all and others are masked for some sequences."""
    q, k, v = draw((3, 4, 2, 8), (3, 2, 9, 8), (3, 2, 9, 8))
    mask = (torch.arange(9) < torch.tensor([[9], [2], [0]]))[:, None, None]
    attend = backend_of(backend)
    parts = [(k[:, :, a:b], v[:, :, a:b], mask[..., a:b]) for a, b in itertools.pairwise((0, 4, 4, 6, 9))]
    outputs, sums = zip(*(attend(q, *kv, attention_mask=part) for *kv, part in parts), strict=True)
    merged = torch.stack(sums).logsumexp(0)
    shares = torch.exp(torch.stack(sums) - merged.clamp(min=torch.finfo(torch.float32).min))
    output = sum(share[..., None] * one for share, one in zip(shares, outputs, strict=True))
    expected, lse = plain_attention(q, k, v, attention_mask=mask)
    close(merged, lse)
    close(output, expected)
    assert (output[2] == 0).all()


@every_backend
def test_row_of_lowest_numbers_attends_uniformly(backend):
    """Masks often hide by the lowest finite number. A row of nothing else is then a plain average, as softmax says."""
    mask = torch.full((3, 5), torch.finfo(torch.float32).min)
    mask[0, 2] = 0
    q, k, v = draw((1, 1, 3, 8), (1, 1, 5, 8), (1, 1, 5, 8))
    output, _ = backend_of(backend)(q, k, v, attention_mask=mask)
    close(output[:, :, 0], v[:, :, 2])
    close(output[:, :, 1:], v.mean(2, keepdim=True).expand(1, 1, 2, 8))


# ---- sizes and strides


@every_backend
@pytest.mark.parametrize("head_dim", [1, 40, 59, 80, 96, 111, 256])
def test_any_head_dim(backend, head_dim):
    q, k, v = draw((1, 2, 3, head_dim), (1, 2, 20, head_dim), (1, 2, 20, head_dim))
    close(
        backend_of(backend)(q, k, v, causal=True)[0], plain_attention(*(x.double() for x in (q, k, v)), causal=True)[0]
    )


@every_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(backend, layout):
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
    q, k, v = (lay_out(layout, shape, torch.randn) for shape in shapes)
    close(backend_of(backend)(q, k, v)[0], plain_attention(q, k, v)[0])


@every_backend
def test_query_heads_share_keys_in_runs(backend):
    """Query head h reads KV head h // group, not h % kv_heads."""
    q, k, v = draw((1, 6, 2, 8), (1, 2, 3, 8), (1, 2, 3, 8))
    output, _ = backend_of(backend)(q, k, v)
    for head in range(6):
        alone, _ = plain_attention(q[:, head : head + 1], k[:, head // 3, None], v[:, head // 3, None])
        close(output[:, head], alone[:, 0])


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scale_may_be_zero_or_negative(backend, scale, dtype):
    q, k, v = draw((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), dtype=dtype)
    expected, _ = plain_attention(q.double(), k.double(), v.double(), scale=scale, causal=True)
    close(backend_of(backend)(q, k, v, scale=scale, causal=True)[0], expected, tolerance=5e-3)


# ---- windows, softcap, slopes


@every_backend
def test_window_counts_the_own_position(backend):
    assert seen(backend, 4, 4, causal=True, sliding_window=2) == ["x...", "xx..", ".xx.", "..xx"]
    assert seen(backend, 3, 3, causal=True, sliding_window=1) == ["x..", ".x.", "..x"]
    assert seen(backend, 4, 4, sliding_window=2) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert seen(backend, 2, 5, causal=True, sliding_window=3) == [".xxx.", "..xxx"]


@every_backend
@pytest.mark.parametrize("window", [5, 2**31, 2**63, 2**70])
def test_window_may_be_greater_than_every_length(backend, window):
    assert seen(backend, 2, 5, sliding_window=window) == ["xxxxx", "xxxxx"]
    assert seen(backend, 2, 5, causal=True, sliding_window=window) == ["xxxx.", "xxxxx"]


@pytest.mark.parametrize("backend", WITH_LSE)
def test_softcap_comes_after_scale_and_before_every_mask(backend):
    q, k, v = draw((1, 1, 4, 8), (1, 1, 6, 8), (1, 1, 6, 6))
    v = torch.eye(6)[None, None]
    added = torch.where(torch.rand(4, 6) < 0.3, -60.0, torch.randn(4, 6))
    options = {
        "causal": True,
        "scale": 3.0,
        "softcap": 2.0,
        "attention_mask": added,
        "alibi_slopes": torch.tensor([0.7]),
    }
    found, _ = backend_of(backend)(q, k, v, **options)
    for row in range(4):
        exponentials = []
        for column in range(6):
            score = 2.0 * torch.tanh(3.0 * (q[0, 0, row] @ k[0, 0, column]) / 2.0)
            score = score - 0.7 * abs(2 + row - column) + added[row, column]
            exponentials.append(score.exp() if column <= 2 + row else torch.tensor(0.0))
        close(found[0, 0, row], torch.stack(exponentials) / sum(exponentials))


@every_backend
def test_score_falls_with_distance_to_both_sides(backend):
    rows = weights(backend, 3, 5, alibi_slopes=torch.tensor([0.5]))
    distance = torch.tensor([[2, 1, 0, 1, 2], [3, 2, 1, 0, 1], [4, 3, 2, 1, 0]])
    close(rows, torch.softmax(-0.5 * distance, dim=-1))


@every_backend
def test_slopes_belong_to_the_heads_of_the_whole_layer(backend):
    """A device that holds heads 4 to 6 of 12 computes what the whole layer computes there."""
    q, k, v = draw((2, 12, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8))
    slopes = alibi_slopes(12)
    whole, _ = plain_attention(q, k, v, alibi_slopes=slopes)
    part, _ = backend_of(backend)(q[:, 3:6], k[:, 1:2], v[:, 1:2], alibi_slopes=slopes[3:6])
    close(part, whole[:, 3:6])


# ---- the interpreter


@pytest.mark.parametrize("backend", ["triton"])
def test_bfloat16_in_the_interpreter_is_refused_in_one_sentence(backend):
    q, k, v = draw(*[(1, 1, 4, 16)] * 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"interpreter multiplies the raw bits of bfloat16") as caught:
        backend_of(backend)(q, k, v)
    assert "\n" not in str(caught.value)


# ---- planted faults

CAUSALITY = "ahead > 0 if self.causal else None"
HIDING = "scores.masked_fill(hidden, -torch.inf)"
FAULTS = [
    (test_last_query_stands_at_the_last_key, "reference", rules, "(kv_len - query_len, kv_len, ", "(query_len, "),
    (test_last_query_stands_at_the_last_key, "reference", rules, CAUSALITY, "ahead >= 0 if self.causal else None"),
    (test_last_query_stands_at_the_last_key, "sdpa", sdpa, "aligned = query_len == kv_len", "aligned = True"),
    (test_last_query_stands_at_the_last_key, "blockwise", blockwise, "self.kv_len - self.query_len + ", ""),
    (test_queries_before_the_first_key_are_zero_and_have_no_gradient, "reference", rules, "-torch.inf", "-1e30"),
    (test_queries_before_the_first_key_are_zero_and_have_no_gradient, "blockwise", blockwise, ".clamp(min=1)", ""),
    (test_fully_masked_row_is_zero_and_has_no_gradient, "reference", reference, "scores.masked_fill(blind, 0.0)", "scores"),
    (test_fully_masked_row_is_zero_and_has_no_gradient, "reference", reference, ".masked_fill(blind, 0.0).to", ".to"),
    (test_fully_masked_row_is_zero_and_has_no_gradient, "blockwise", blockwise, "torch.finfo(blocks.working).min", "-torch.inf"),
    (test_fully_masked_row_is_zero_and_has_no_gradient, "sdpa", sdpa, "output.masked_fill(blind, 0.0)", "output"),
    (test_parts_merge_by_their_log_sum_exp_though_some_are_empty, "reference", reference, "[..., 0], -torch.inf)", "[..., 0], 0.0)"),
    (test_parts_merge_by_their_log_sum_exp_though_some_are_empty, "blockwise", blockwise, "totals.log()", "totals.clamp(min=1).log()"),
    (test_row_of_lowest_numbers_attends_uniformly, "blockwise", rules, "mask.to(scores.dtype)", "1.4427 * mask.to(scores.dtype)"),
    (test_row_of_lowest_numbers_attends_uniformly, "sdpa", sdpa, "bias.masked_fill(blind, 0.0)", "bias * 1.4427"),
    (test_any_head_dim, "blockwise", arguments, "math.sqrt(head_dim)", "math.sqrt(1 << (head_dim - 1).bit_length())"),
    (test_any_strides, "reference", reference, "q.reshape(", "q.as_strided(q.shape, torch.empty(q.shape).stride()).reshape("),
    (test_query_heads_share_keys_in_runs, "blockwise", blockwise, "x[:, :, rows].to", "x[:, :, rows].unflatten(1, (-1, self.kv_heads)).transpose(1, 2).flatten(1, 2).to"),
    (test_scale_may_be_zero_or_negative, "sdpa", sdpa, "and rules.scale > 0", ""),
    (test_window_counts_the_own_position, "reference", rules, "<= -reach", "< -reach"),
    (test_window_counts_the_own_position, "blockwise", blockwise, "else window - 1", "else window - 2"),
    (test_window_counts_the_own_position, "sdpa", rules, "-ahead.abs()", "ahead"),
    (test_softcap_comes_after_scale_and_before_every_mask, "reference", rules, "scores = scores * self.scale", "scores = scores * 1.0"),
    (test_softcap_comes_after_scale_and_before_every_mask, "reference", rules, "scores + mask.to(scores.dtype)", "self.softcap * torch.tanh((scores + mask.to(scores.dtype)) / self.softcap)"),
    (test_softcap_comes_after_scale_and_before_every_mask, "blockwise", rules, HIDING, f"self.softcap * torch.tanh({HIDING} / self.softcap)"),
    (test_score_falls_with_distance_to_both_sides, "sdpa", rules, "(queries[:, None] - keys).abs()", "(queries[:, None] - keys)"),
    (test_slopes_belong_to_the_heads_of_the_whole_layer, "reference", rules, "self.alibi_slopes.to(", "__import__('course_lib.positions').positions.alibi_slopes(scores.shape[1])[None].to("),
    (test_bfloat16_in_the_interpreter_is_refused_in_one_sentence, "triton", flash_attention, "q.dtype == torch.bfloat16", "False"),
]  # fmt: skip


def plant(monkeypatch, module, right, wrong):
    """Replace text in the source of a module, and give its functions and methods the code that comes out."""
    source = inspect.getsource(module)
    assert right in source, f"{right!r} is no longer in {module.__name__}: plant this fault anew"
    changed: dict = {"__name__": module.__name__}
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), changed)
    owners = [(module, changed)]
    owners += [
        (one, vars(changed[name])) for name, one in vars(module).items() if inspect.isclass(one) and name in changed
    ]
    for owner, names in owners:
        for name, one in list(vars(owner).items()):
            one, other = getattr(one, "__func__", one), getattr(names.get(name), "__func__", names.get(name))
            if inspect.isfunction(one) and inspect.isfunction(other) and one.__code__ != other.__code__:
                monkeypatch.setattr(one, "__code__", other.__code__)


@pytest.mark.parametrize(("promise", "backend", "module", "right", "wrong"), FAULTS)
def test_promise_fails_on_a_planted_fault(monkeypatch, promise, backend, module, right, wrong):
    cases = [mark.args[1] for mark in getattr(promise, "pytestmark", []) if mark.args[0] != "backend"]
    plant(monkeypatch, module, right, wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_all(promise, backend, cases)


def check_all(promise, backend, cases):
    for values in itertools.product(*cases):
        promise(backend, *values)
