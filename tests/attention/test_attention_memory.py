"""The reference holds every score; blockwise attention holds a block. Both are measured to the byte."""

import pytest
import torch

from course_lib import benchmark
from course_lib.attention import attention
from course_lib.memory import peak_memory


def extra(tokens, backward=False, **options):
    """Return the peak, in bytes, beyond the inputs: one head of 64."""
    q, k, v = (torch.randn(1, 1, tokens, 64, requires_grad=backward) for _ in range(3))
    with peak_memory("cpu") as peak:
        output = attention(q, k, v, **options)
        if backward:
            output.sum().backward()
    return peak.bytes


def assert_affine(peaks):
    terms = benchmark.terms(peaks)
    longest = max(peaks)
    assert sum(terms) == pytest.approx(peaks[longest], rel=0.02), "the fit must say what was measured"
    assert abs(terms.quadratic_share) < 0.02, peaks


def test_reference_grows_with_the_square():
    peaks = {tokens: extra(tokens, backend="reference") for tokens in (1024, 2048, 4096)}
    assert benchmark.exponent(peaks) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 5.0, "causal": True, "sliding_window": 700}], ids=str
)
def test_blockwise_grows_with_the_length(options):
    lengths = [1024, 2048, 4096, 8192, 16384] if options.get("causal") else [1024, 2048, 4096, 8192]
    peaks = {tokens: extra(tokens, backend="blockwise", **options) for tokens in lengths}
    assert_affine(peaks)
    assert peaks[lengths[-1]] < lengths[-1] ** 2  # a quarter of one matrix of scores


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=str)
def test_blockwise_backward_grows_with_the_length(options):
    lengths = [1024, 2048, 4096, 8192] if options else [1024, 2048, 4096]
    assert_affine({tokens: extra(tokens, backward=True, backend="blockwise", **options) for tokens in lengths})


def test_blockwise_does_not_repeat_keys_and_values():
    """Four query heads for each KV head: K and V are not even copied once."""
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 16384, 64), torch.randn(1, 2, 16384, 64)
    with peak_memory("cpu") as peak:
        attention(q, k, v, backend="blockwise")
    assert peak.bytes < k.nbytes / 8
