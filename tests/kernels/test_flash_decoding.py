"""Decoding attends to a cache as the formula does, in PyTorch and in the kernel: in the interpreter small, on a card, if there is one, at real sizes."""

import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.kernels.flash_decoding import Codes, decoding_refusal, flash_decoding, merge

try:
    import triton

    from course_lib.kernels import flash_decoding_launch as library
    from course_lib.kernels.flash_attention import INTERPRETED
except ImportError:
    triton, INTERPRETED = None, True

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD and not INTERPRETED else "cpu"
#: Fresh inputs in every run; in CI the same ones each time, so that a run judges the change.
SEEDS = random.Random(0 if os.environ.get("CI") else None)
runs_kernel = pytest.mark.skipif(
    triton is None or (not INTERPRETED and not CARD), reason="neither Triton's interpreter nor a card"
)
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=runs_kernel)])


def draw(*shape, dtype=torch.float32, seed=None):
    seed = SEEDS.randrange(2**31) if seed is None else seed
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# ---- the formula


def plain(
    q, keys, values, lengths, dtype, *, ahead=0, scale=None, sliding_window=None, sinks=0, softcap=None, slopes=None
):
    """Compute in one dtype, with all scores of a sequence at once; keys and values are lists, one for each sequence."""
    rows, scale = q.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    found = []
    for index, length in enumerate(lengths):
        group = q.shape[1] // keys[index].shape[0]
        k, v = (x[:, :length].to(dtype).repeat_interleave(group, dim=0) for x in (keys[index], values[index]))
        scores = q[index].to(dtype) @ k.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = length + ahead - rows + torch.arange(rows)[:, None] - torch.arange(length)
        if slopes is not None:
            slope = slopes[index if len(slopes) > 1 else 0].to(scores)
            scores = scores - slope[:, None, None] * distance.to(scores).abs()
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= (distance >= sliding_window) & (torch.arange(length) >= sinks)
        scores = scores.masked_fill(hidden.to(DEVICE), -torch.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        found.append(
            (
                weights @ v,
                torch.logsumexp(torch.cat((scores, scores.new_full((*scores.shape[:2], 1), -torch.inf)), -1), -1),
            )
        )
    outputs, sums = zip(*found, strict=True)
    return torch.stack(outputs), torch.stack(sums)


def dequantised(store, dtype):
    """Turn codes into values by the definition of `Codes`, without its own method."""
    codes = store.codes.to(torch.int64)
    if store.bits == 4:
        wide = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=torch.int64, device=codes.device)
        wide[..., 0::2], wide[..., 1::2] = codes // 16, codes % 16
        codes = wide
    axis = -2 if store.axis == "channel" else -1
    scale, offset = (x.to(dtype).repeat_interleave(store.group, dim=axis) for x in (store.scale, store.offset))
    return offset + scale * codes.to(dtype)


def quantised(batch, heads, tokens, dim, bits, group, axis):
    codes = torch.randint(0, 256, (batch, heads, tokens, dim * bits // 8), dtype=torch.uint8).to(DEVICE)
    shape = (batch, heads, tokens // group, dim) if axis == "channel" else (batch, heads, tokens, dim // group)
    scale = (draw(*shape).abs() + 0.1).bfloat16() * (4 / 2**bits)
    return Codes(codes, scale, (draw(*shape) - 2).bfloat16(), bits, group, axis)


# ---- calls


@dataclass
class Call:
    """What a call is made of; sizes as in the documentation."""

    batch: int = 2
    kv_heads: int = 2
    group: int = 3
    rows: int = 2
    head_dim: int = 16
    value_dim: int = 16
    capacity: int = 48
    page: int = 0
    bits: int = 0
    codes_group: int = 16
    dtype: torch.dtype = torch.float32
    lengths: tuple = (37, 20)
    rules: tuple = ()
    alibi: int = 0  # rows of slopes

    def made(self):
        """Return positional arguments, keyword arguments, and keys and values of each sequence in float64 and the call's dtype."""
        q = draw(self.batch, self.rows, self.kv_heads * self.group, self.head_dim, dtype=self.dtype).transpose(1, 2)
        kwargs = {"lengths": torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE), **dict(self.rules)}
        if self.alibi:
            kwargs["alibi_slopes"] = draw(1 if self.alibi == 1 else self.batch, self.kv_heads * self.group).abs()
        if self.bits:
            k = quantised(
                self.batch, self.kv_heads, self.capacity, self.head_dim, self.bits, self.codes_group, "channel"
            )
            divisor = max(g for g in range(1, 17) if self.value_dim % g == 0)
            v = quantised(self.batch, self.kv_heads, self.capacity, self.value_dim, self.bits, divisor, "token")
            seen = [[dequantised(x, dtype) for x in (k, v)] for dtype in (torch.float64, self.dtype)]
            return (q, k, v), kwargs, *seen
        if not self.page:
            k, v = (
                draw(self.batch, self.kv_heads, self.capacity, dim, dtype=self.dtype)
                for dim in (self.head_dim, self.value_dim)
            )
            seen = [k.clone(), v.clone()]
            for sequence, length in enumerate(self.lengths):
                k[sequence, :, length:] = v[sequence, :, length:] = torch.nan  # poison
            return (q, k, v), kwargs, seen, seen
        # Pools whose axes lie in another order, with more blocks than are needed; what no sequence holds is poison.
        used = [-(-length // self.page) for length in self.lengths]
        blocks = -(-self.capacity // self.page)
        order, pools, seen = torch.randperm(sum(used) + 3), [], []
        table = torch.full((self.batch, blocks), 2**31 - 1, dtype=torch.int32)
        for dim in (self.head_dim, self.value_dim):
            pool = torch.full(
                (self.kv_heads, len(order), self.page, dim), torch.nan, dtype=self.dtype, device=DEVICE
            ).transpose(0, 1)
            sequences, first = [], 0
            for sequence, length in enumerate(self.lengths):
                own = order[first : first + used[sequence]]
                table[sequence, : len(own)] = own.int()
                content = draw(self.kv_heads, length, dim, dtype=self.dtype)
                for number, block in enumerate(own.tolist()):
                    part = content[:, number * self.page : (number + 1) * self.page]
                    pool[block, :, : part.shape[1]] = part
                sequences.append(content)
                first += len(own)
            pools.append(pool)
            seen.append(sequences)
        return (q, *pools), kwargs | {"block_table": table.to(DEVICE)}, seen, seen

    def check(self, backend, processors=7):
        """Run it; memory that is allocated holds NaN at first; at most twice as wrong as the formula in its dtype."""
        arguments, kwargs, exact_kv, plain_kv = self.made()
        empty = torch.Tensor.new_empty

        def poisoned(like, *size, **options):
            made = empty(like, *size, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        with mock.patch.object(torch.Tensor, "new_empty", poisoned):
            if backend == "triton":
                with mock.patch.object(library, "multiprocessors", return_value=processors):
                    output, lse = flash_decoding(*arguments, **kwargs, return_lse=True, backend=backend)
            else:
                output, lse = flash_decoding(*arguments, **kwargs, return_lse=True, backend=backend)
                alone = flash_decoding(*arguments, **kwargs, backend=backend)
                torch.testing.assert_close(
                    alone,
                    output,
                    rtol=1e-2 if self.dtype != torch.float32 else 1e-4,
                    atol=1e-2 if self.dtype != torch.float32 else 1e-4,
                )
        q, rules = (
            arguments[0],
            {
                name: value
                for name, value in kwargs.items()
                if name in ("ahead", "scale", "sliding_window", "sinks", "softcap")
            },
        )
        rules["slopes"] = kwargs.get("alibi_slopes")
        assert output.dtype == self.dtype
        assert lse.dtype == torch.float32
        assert output.shape == (*q.shape[:3], self.value_dim)
        assert lse.shape == q.shape[:3]
        if self.batch == 0:
            return
        exact = plain(q, *exact_kv, self.lengths, torch.float64, **rules)
        usual = plain(q, *plain_kv, self.lengths, self.dtype, **rules)
        blind = exact[1] == -torch.inf
        assert torch.equal(lse == -torch.inf, blind)
        assert not output[blind].any()
        # Where the formula happens to be exact, some roundings of float32 are left, or that of the result. And a score is a sum
        # that can be much smaller than its terms, which are added in one order or another.
        longest = [
            max((x.double().norm(dim=-1).max().item() for x in part if x.numel()), default=0.0)
            for part in (q, exact_kv[0])
        ]
        scale = abs(q.shape[-1] ** -0.5 if rules.get("scale") is None else rules["scale"])
        rounding = torch.finfo(self.dtype).eps * (4 if self.dtype == torch.float32 else 1)
        rounding += torch.finfo(torch.float32).eps / 2 * scale * longest[0] * longest[1]
        for found, truth, other in zip((output, lse), exact, usual, strict=True):
            truth = truth.masked_fill(truth == -torch.inf, 0.0)
            other, found = (x.masked_fill(x == -torch.inf, 0.0).double() for x in (other, found))
            assert (found - truth).abs().max() <= 2 * (other - truth).abs().max() + rounding * max(
                1.0, truth.abs().max()
            )


@st.composite
def calls(draw_, *, dtypes):
    some = lambda low, high: draw_(st.integers(low, high))  # noqa: E731
    kind = draw_(st.sampled_from(["contiguous", "paged", "codes"]))
    batch, capacity = some(0, 3), some(0, 70)
    call = Call(
        batch, some(1, 3), some(1, 4), draw_(st.sampled_from([1, 1, 2, 5, 16])), some(1, 40), some(1, 40), capacity
    )
    if kind == "paged":
        call.page = draw_(st.sampled_from([16, 32, 5]))
    if kind == "codes":
        call.codes_group = draw_(st.sampled_from([16, 32, 48]))
        call.capacity = -(-capacity // call.codes_group) * call.codes_group
        call.bits, call.head_dim, call.value_dim = draw_(st.sampled_from([8, 4])), 2 * some(1, 20), 2 * some(1, 20)
    call.dtype = draw_(st.sampled_from(dtypes))
    call.lengths = tuple(some(0, call.capacity) for _ in range(batch))
    rules = {"ahead": draw_(st.sampled_from([0, 0, 1, 30])), "scale": draw_(st.sampled_from([None, 0.3, -0.2]))}
    if draw_(st.booleans()):
        rules |= {"sliding_window": some(1, 90), "sinks": draw_(st.sampled_from([0, 3, 20]))}
    if draw_(st.booleans()):
        rules["softcap"] = 3.0
    call.rules, call.alibi = tuple(rules.items()), draw_(st.sampled_from([0, 0, 1, 2]))
    return call


@settings(max_examples=100)
@given(calls(dtypes=[torch.float32, torch.float16, torch.bfloat16]))
def test_pytorch_attends_as_the_formula_does(call):
    call.check("torch")


@runs_kernel
@settings(max_examples=25)
@given(calls(dtypes=[torch.float32, torch.float16]), st.sampled_from([1, 4, 40]))
def test_kernel_attends_as_the_formula_does(call, processors):
    call.check("triton", processors)


# ---- named cases, some of which generated ones may miss


@runs_kernel
@pytest.mark.parametrize("dim", [80, 128, 256])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_sizes_of_real_heads(dim, bits):
    Call(1, 1, 4, 1, dim, dim, 64, bits=bits, codes_group=64, lengths=(50,)).check("triton")


@BACKENDS
def test_a_group_larger_than_a_tile_is_several_tiles(backend):
    Call(1, 1, 71, 2, 8, 8, 20, lengths=(20,)).check(backend)


@BACKENDS
@pytest.mark.parametrize("page", [16, 64, 256])
def test_blocks_of_a_pool_of_any_strides(backend, page):
    for rules in ((), (("sliding_window", 5), ("sinks", 2))):
        Call(page=page, capacity=300, lengths=(290, 3), rules=rules).check(backend)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_pytorch_takes_a_pool_in_any_order_of_its_axes(order):
    pool, q = draw(5, 2, 16, 8), draw(2, 4, 1, 8)
    table = torch.tensor([[3, 1], [0, 4]], device=DEVICE)
    back = [order.index(axis) for axis in range(4)]
    moved = pool.permute(order).contiguous().permute(back)
    assert moved.stride() == pool.stride() if order == (0, 1, 2, 3) else moved.stride() != pool.stride()
    found = flash_decoding(q, moved, moved, block_table=table, backend="torch")
    keys = torch.stack([torch.cat([pool[block] for block in row], dim=1) for row in table])
    torch.testing.assert_close(found.double(), plain(q, keys, keys, (32, 32), torch.float64)[0], rtol=1e-5, atol=1e-5)


@BACKENDS
def test_blocks_outside_the_window_may_be_gone(backend):
    """A cache with a window gives such blocks away: their entries of the table may hold anything."""
    call = Call(page=16, capacity=112, lengths=(110, 60), rules=(("sliding_window", 20),))
    (q, k, v), kwargs, seen, _ = call.made()
    kwargs["block_table"][0, :5] = -7
    kwargs["block_table"][1, :2] = 2**30
    found = flash_decoding(q, k, v, **kwargs, backend=backend)
    torch.testing.assert_close(
        found.double(), plain(q, *seen, call.lengths, torch.float64, sliding_window=20)[0], rtol=1e-5, atol=1e-5
    )


@BACKENDS
def test_strides_of_everything(backend):
    """Each axis of each tensor at distances of its own, the last one's two included."""
    q, k, v = draw(2, 3, 6, 2, 16)[:, 1], draw(2, 2, 40, 16, 2)[..., 1], draw(40, 2, 2, 16).permute(1, 2, 0, 3)
    slopes, lengths = draw(6, 2).abs().T, torch.tensor([33, 9, 40, 1], device=DEVICE)[::2]
    found = flash_decoding(q, k, v, lengths=lengths, alibi_slopes=slopes, backend=backend)
    exact, _ = plain(q, k, v, lengths.tolist(), torch.float64, slopes=slopes)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert found.stride(-1) == 1


@runs_kernel
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_in_any_strides(bits):
    """Rows that do not consist of whole words, or do not begin at one, and scales with strides of their own."""
    for dim, offset in ((16, 0), (16, 2), (10, 0)):
        call = Call(head_dim=dim, value_dim=dim, bits=bits)
        (q, k, v), kwargs, (keys, values), _ = call.made()
        moved = []
        for store in (k, v):
            room = torch.zeros(*store.codes.shape[:3], store.codes.shape[3] + 4, dtype=torch.uint8, device=DEVICE)
            codes = room[..., offset : offset + store.codes.shape[3]].copy_(store.codes)
            moved.append(replace(store, codes=codes, scale=store.scale.mT.contiguous().mT))
        found = flash_decoding(q, *moved, **kwargs, backend="triton")
        torch.testing.assert_close(
            found.double(), plain(q, keys, values, call.lengths, torch.float64)[0], rtol=1e-5, atol=1e-5
        )


@runs_kernel
def test_both_backends_agree_on_every_row():
    arguments, kwargs, *_ = Call(rules=(("sliding_window", 9), ("sinks", 2))).made()
    first, second = (
        flash_decoding(*arguments, **kwargs, return_lse=True, backend=name) for name in ("torch", "triton")
    )
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_a_cache_in_two_parts_merges_into_one(backend):
    """Codes first, then what is not yet quantised: the query stands behind both."""
    q, k, v = draw(2, 6, 3, 16), draw(2, 2, 44, 16), draw(2, 2, 44, 16)
    whole = flash_decoding(q, k, v, return_lse=True, backend=backend)
    old = flash_decoding(q, k[:, :, :32], v[:, :, :32], ahead=12, return_lse=True, backend=backend)
    new = flash_decoding(q, k[:, :, 32:], v[:, :, 32:], return_lse=True, backend=backend)
    for found, expected in zip(merge(*zip(old, new, strict=True)), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_merging_parts_that_saw_nothing():
    outputs, lses = (
        [draw(2, 4), torch.zeros(2, 4), torch.zeros(2, 4)],
        [draw(2), torch.full((2,), -torch.inf), torch.full((2,), -torch.inf)],
    )
    output, lse = merge(outputs, lses)
    torch.testing.assert_close(output, outputs[0])
    torch.testing.assert_close(lse, lses[0])
    output, lse = merge(outputs[1:], lses[1:])
    assert not output.any()
    assert (lse == -torch.inf).all()


@BACKENDS
@pytest.mark.parametrize("lengths", [(0, 0), (0, 33)])
def test_an_empty_sequence_is_zero_and_minus_infinity(backend, lengths):
    Call(lengths=lengths).check(backend, processors=40)
    Call(lengths=lengths, page=16).check(backend, processors=1)


@BACKENDS
def test_no_sequences_and_no_room(backend):
    for call in (
        Call(batch=0, lengths=()),
        Call(capacity=0, lengths=(0, 0)),
        Call(page=16, capacity=0, lengths=(0, 0)),
    ):
        call.check(backend)


@BACKENDS
def test_without_lengths_all_keys_are_seen(backend):
    q, k = draw(2, 4, 1, 8), draw(2, 2, 30, 8)
    assert torch.equal(
        flash_decoding(q, k, k, backend=backend),
        flash_decoding(q, k, k, lengths=torch.tensor([30, 30]).to(DEVICE), backend=backend),
    )


@runs_kernel
def test_more_splits_than_blocks_of_a_short_sequence():
    """Splits of the short sequence are empty, those of the long one are not."""
    for lengths in ((200, 1), (1, 200), (200, 0)):
        Call(kv_heads=1, capacity=200, lengths=lengths).check("triton", processors=100)


@runs_kernel
def test_two_runs_give_the_same_bits():
    arguments, kwargs, *_ = Call(capacity=200, lengths=(200, 130)).made()
    first, second = (flash_decoding(*arguments, **kwargs, backend="triton") for _ in range(2))
    assert torch.equal(first, second)


@runs_kernel
def test_a_length_beyond_the_room_reads_nothing_beyond_it():
    q, k = draw(1, 2, 1, 8), draw(2, 1, 20, 8)
    k[1] = torch.nan  # what follows in memory
    found = flash_decoding(q, k[:1], k[:1], lengths=torch.tensor([40], device=DEVICE), ahead=0, backend="triton")
    assert not found.isnan().any()
    with pytest.raises(ValueError, match=r"lengths holds 40; at most 20"):
        flash_decoding(q, k[:1], k[:1], lengths=torch.tensor([40], device=DEVICE), backend="torch")


# ---- what is read, and by how many programs


@pytest.mark.skipif(triton is None or not INTERPRETED, reason="only the interpreter can be listened to")
@pytest.mark.parametrize(
    ("rules", "seen"), [({}, 320), ({"sliding_window": 20}, 20), ({"sliding_window": 20, "sinks": 3}, 23)]
)
def test_each_key_that_is_seen_is_read_once_for_all_heads_of_its_group(rules, seen, moved):
    q, k, v = draw(1, 8, 1, 16), draw(1, 2, 320, 16), draw(1, 2, 320, 16)
    with mock.patch.object(library, "multiprocessors", return_value=1):
        flash_decoding(q, k, v, **rules, backend="triton")
    data = 2 * 2 * seen * 16 * 4
    assert data <= sum(moved) <= data + 4 * (2 * 8 * 16 + 8) + 64


@pytest.mark.skipif(triton is None or not INTERPRETED, reason="only the interpreter can be listened to")
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_read_as_codes(bits, moved):
    k, v = quantised(1, 2, 64, 32, bits, 16, "channel"), quantised(1, 2, 64, 32, bits, 16, "token")
    with mock.patch.object(library, "multiprocessors", return_value=1):
        flash_decoding(draw(1, 8, 1, 32), k, v, backend="triton")
    stored = sum(x.nbytes for store in (k, v) for x in (store.codes, store.scale, store.offset))
    assert stored <= sum(moved) <= stored + 4 * (2 * 8 * 32 + 8) + 64


@pytest.mark.skipif(triton is None, reason="Triton exists for Linux")
def test_splits_fill_a_card_and_are_no_more_than_needed():
    slots = 264
    assert library.splits(256, 64, slots) == 1, "the card is full without"
    assert library.splits(8, 64, slots) == 32, "each of 8 heads by 32 programs, of two blocks each"
    assert library.splits(8, 1, slots) == 1, "one block cannot be divided"
    assert library.splits(8, 100_000, slots) <= library.MOST_SPLITS
    for programs in range(1, 600, 7):
        for blocks in (1, 5, 64, 1000):
            count = library.splits(programs, blocks, slots)
            assert 1 <= count <= max(1, blocks // library.LEAST_BLOCKS)


# ---- what is accepted


def arguments(**changes):
    made = {"q": draw(2, 4, 1, 8), "k": draw(2, 2, 20, 8), "v": draw(2, 2, 20, 8)} | changes
    return (made.pop("q"), made.pop("k"), made.pop("v")), made


WRONG = {
    "rows": ({"q": torch.zeros(2, 4, 17, 8)}, ValueError, "17 rows; 1 to 16"),
    "no rows": ({"q": torch.zeros(2, 4, 0, 8)}, ValueError, "0 rows; 1 to 16"),
    "axes": ({"q": torch.zeros(4, 1, 8)}, ValueError, "q has 3 axes"),
    "dtype": (
        {"k": torch.zeros(2, 2, 20, 8, dtype=torch.float16)},
        TypeError,
        "q is torch.float32 and k torch.float16",
    ),
    "heads": ({"q": torch.zeros(2, 3, 1, 8)}, ValueError, "must be a multiple"),
    "head_dim": ({"k": torch.zeros(2, 2, 20, 7)}, ValueError, "head_dim one"),
    "tokens": ({"v": torch.zeros(2, 2, 19, 8)}, ValueError, "first three axes"),
    "batch": ({"q": torch.zeros(3, 4, 1, 8)}, ValueError, "q has 3 sequences and k 2"),
    "lengths": ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, r"lengths has shape \[3\]"),
    "dtype of lengths": ({"lengths": torch.zeros(2)}, TypeError, "lengths is torch.float32"),
    "block_table": ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, r"block_table has shape \[2\]"),
    "ahead": ({"ahead": -1}, ValueError, "ahead is -1"),
    "sinks": ({"sinks": -1}, ValueError, "sinks -1"),
    "window": ({"sliding_window": 0}, ValueError, "sliding_window 0"),
    "softcap": ({"softcap": 0.0}, ValueError, r"softcap is 0\.0"),
    "slopes": ({"alibi_slopes": torch.zeros(3)}, ValueError, r"alibi_slopes has shape \[1, 3\]"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_clear_sentence(case):
    changes, error, words = WRONG[case]
    positional, named = arguments(
        **{name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    )
    with pytest.raises(error, match=words):
        flash_decoding(*positional, **named)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 2}, "bits 2"),
        ({"axis": "head"}, "axis 'head'"),
        ({"group": 3}, "groups of 3"),
        ({"group": 0}, "groups of 0"),
        ({"scale": torch.zeros(2, 2, 20, 8)}, r"a scale of \[2, 2, 20, 8\]"),
        ({"codes": torch.zeros(2, 2, 32, 16, dtype=torch.int8)}, "torch.int8"),
    ],
)
def test_codes_that_do_not_fit_are_one_clear_sentence(changes, words):
    k = replace(
        quantised(2, 2, 32, 16, 8, 16, "channel"),
        **{name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changes.items()},
    )
    with pytest.raises(ValueError, match=words):
        flash_decoding(draw(2, 4, 1, 16), k, draw(2, 2, 32, 16))


@runs_kernel
def test_what_the_kernel_does_not_take_pytorch_does():
    k, v = quantised(2, 2, 32, 16, 8, 16, "channel"), quantised(2, 2, 32, 16, 8, 16, "token")
    odd = quantised(2, 2, 30, 16, 8, 10, "channel"), quantised(2, 2, 30, 16, 8, 16, "token")
    table = torch.tensor([[1], [0]], device=DEVICE)
    q = draw(2, 4, 1, 16)
    wide = (draw(2, 4, 1, 300), *(draw(2, 2, 9, 300) for _ in range(2)))
    for (q_, k_, v_), named, words in (
        ((q.double(), *(x.double() for x in wide[1:])), {}, "float64"),
        (wide, {}, "at most 256"),
        ((q, v, k), {}, "by channel"),
        ((q, *odd), {}, "multiples of 16"),
        ((q, k, dequantised(v, torch.float32)), {}, "neither"),
        ((q, k, v), {"block_table": table}, "block table"),
        ((draw(2, 4, 1, 16).requires_grad_(), *(draw(2, 2, 9, 16) for _ in range(2))), {}, "gradient"),
    ):
        q_ = q_ if q_.shape[-1] == (k_.codes if isinstance(k_, Codes) else k_).shape[-1] else q_.new_ones(2, 4, 1, 300)
        assert words in decoding_refusal(q_, k_, v_, named.get("block_table"))
        with pytest.raises(ValueError, match=words):
            flash_decoding(q_, k_, v_, **named, backend="triton")
        found = flash_decoding(q_, k_, v_, **named)
        keys, values = (dequantised(x, torch.float64) if isinstance(x, Codes) else x.double() for x in (k_, v_))
        order = [1, 0] if named else [0, 1]
        exact, _ = plain(q_.double(), keys[order], values[order], [keys.shape[2]] * 2, torch.float64)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_pytorch_has_gradients():
    q, k, v = (draw(1, 2, size, 4, dtype=torch.float64).requires_grad_() for size in (3, 5, 5))
    call = lambda *tensors: flash_decoding(*tensors, sliding_window=3, sinks=1)  # noqa: E731
    if DEVICE == "cpu":
        assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter rounds bfloat16 wrongly")
@runs_kernel
def test_bfloat16_in_the_interpreter_is_one_clear_sentence():
    q, k = draw(1, 2, 1, 8, dtype=torch.bfloat16), draw(1, 2, 9, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter"):
        flash_decoding(q, k, k, backend="triton")


def test_without_triton_pytorch_attends():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; real = u.find_spec; u.find_spec = lambda name, *rest: None if name == 'triton' else real(name, *rest)\n"
        "import torch; from course_lib.kernels.flash_decoding import decoding_refusal, flash_decoding\n"
        "q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 5, 8)\n"
        "assert 'not installed' in decoding_refusal(q, k, k)\n"
        "assert torch.allclose(flash_decoding(q, k, k), torch.ones(1, 2, 1, 8))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- on a card: bfloat16, real sizes, and pools larger than 32-bit offsets reach


@pytest.mark.gpu
@pytest.mark.skipif(not CARD, reason="needs a card of compute capability 8.0 or more")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(("dim", "kv_heads", "group"), [(64, 3, 3), (128, 8, 4), (256, 1, 8), (80, 32, 1)])
def test_real_sizes_on_a_card(dtype, rows, dim, kv_heads, group):
    for options in ({}, {"page": 16}, {"page": 256}, {"bits": 8, "codes_group": 64}, {"bits": 4, "codes_group": 64}):
        for rules in ((), (("sliding_window", 1000), ("sinks", 4)), (("softcap", 30.0), ("ahead", 9))):
            Call(
                3, kv_heads, group, rows, dim, dim, 4096, dtype=dtype, lengths=(4096, 1, 3333), rules=rules, **options
            ).check("triton", 132)


@pytest.mark.gpu
@pytest.mark.skipif(
    not CARD or torch.cuda.get_device_properties(0).total_memory < 2e10, reason="needs a card with 20 GB of memory"
)
def test_blocks_beyond_2_to_the_31_elements_on_a_card():
    pool = torch.zeros(2**31 // (8 * 16 * 128) + 64, 8, 16, 128, dtype=torch.float16, device="cuda")
    table = torch.arange(len(pool) - 40, len(pool), device="cuda", dtype=torch.int32).flip(0)[None]
    pool[-40:] = draw(40, 8, 16, 128, dtype=torch.float16)
    q = draw(1, 32, 1, 128, dtype=torch.float16)
    own = pool[-40:].contiguous()
    near = torch.arange(40, device="cuda", dtype=torch.int32).flip(0)[None]
    assert torch.equal(flash_decoding(q, pool, pool, block_table=table), flash_decoding(q, own, own, block_table=near))
