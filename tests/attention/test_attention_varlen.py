"""Packed sequences give what each would give alone, on every backend."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import INFINITY, plain_attention

from course_lib.attention import attention_varlen

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)
EXAMPLES = {"reference": 20, "blockwise": 20, "sdpa": 20, "triton": 12}


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "triton", "auto"])
def test_packed_sequences_equal_each_alone(backend):
    @settings(max_examples=EXAMPLES.get(backend, 20))
    @given(
        LENGTHS, st.booleans(), st.integers(1, 12) | st.none(), st.integers(0, 2), st.booleans(), st.integers(0, 2**32)
    )
    def check(lengths, causal, window, slopes, capped, seed):
        generator = torch.Generator().manual_seed(seed)
        queries, keys = zip(*lengths, strict=True)
        q, k, v = (
            torch.randn(total, heads, size, generator=generator, requires_grad=True)
            for total, heads, size in ((sum(queries), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, 5))
        )
        rules = {"causal": causal, "sliding_window": window, "softcap": 2.0 if capped and backend != "sdpa" else None}
        table = torch.rand(len(lengths), 4, generator=generator) if slopes else None
        if slopes == 1:
            table = table[:1].expand(len(lengths), -1)
        with_lse = backend != "sdpa"
        results = attention_varlen(
            q, k, v,
            cu_seqlens_q=starts(queries), cu_seqlens_k=starts(keys, torch.int64),
            alibi_slopes=table[0] if slopes == 1 else table, return_lse=with_lse, backend=backend, **rules,
        )  # fmt: skip
        output, lse = results if with_lse else (results, None)
        expected, sums = [], []
        for one, ((a, b), (c, d)) in enumerate(zip(pairwise(starts(queries)), pairwise(starts(keys)), strict=True)):
            alone = [tensor.double().transpose(0, 1)[None] for tensor in (q[a:b], k[c:d], v[c:d])]
            found, total = plain_attention(*alone, alibi_slopes=None if table is None else table[one], **rules)
            expected.append(found[0].transpose(0, 1))
            sums.append(total[0].T)
        expected, sums = torch.cat(expected), torch.cat(sums)
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)
        if with_lse:
            assert lse.shape == (sum(queries), 4)
            assert torch.equal(lse == -INFINITY, sums == -INFINITY)
            torch.testing.assert_close(lse.double(), sums, atol=2e-5, rtol=2e-5)
        upstream = torch.randn(output.shape, generator=generator)
        mine = torch.autograd.grad(output, (q, k, v), upstream, allow_unused=True)
        right = torch.autograd.grad(expected, (q, k, v), upstream.double(), allow_unused=True)
        for one, other in zip(mine, right, strict=True):
            one, other = (torch.zeros(()) if x is None or x.numel() == 0 else x for x in (one, other))
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

    check()
