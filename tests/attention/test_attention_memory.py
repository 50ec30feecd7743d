"""The reference holds every score; blockwise attention holds a block. Both are measured to the byte."""

import pytest
import torch

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


def quadratic_share(lengths, peaks):
    """Fit a + b N + c N^2 and return the share of the last term at the greatest length."""
    lengths = torch.tensor(lengths, dtype=torch.float64)
    powers = torch.stack([lengths**power for power in range(3)], dim=1)
    scaled = powers / powers[-1]
    terms = torch.linalg.lstsq(scaled, torch.tensor(peaks, dtype=torch.float64)[:, None]).solution[:, 0]
    assert terms.sum() == pytest.approx(peaks[-1], rel=0.02), "the fit must say what was measured"
    return (terms[2] / terms.sum()).item()


def test_reference_grows_with_the_square():
    lengths = [1024, 2048, 4096]
    peaks = torch.tensor([extra(n, backend="reference") for n in lengths], dtype=torch.float64)
    exponents = (peaks[1:] / peaks[:-1]).log2()
    assert ((exponents - 2).abs() < 0.1).all(), exponents


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 5.0, "causal": True, "sliding_window": 700}], ids=str
)
def test_blockwise_grows_with_the_length(options):
    lengths = [1024, 2048, 4096, 8192, 16384] if options.get("causal") else [1024, 2048, 4096, 8192]
    peaks = [extra(n, backend="blockwise", **options) for n in lengths]
    assert abs(quadratic_share(lengths, peaks)) < 0.02, peaks
    assert peaks[-1] < lengths[-1] ** 2  # a quarter of one matrix of scores


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=str)
def test_blockwise_backward_grows_with_the_length(options):
    lengths = [1024, 2048, 4096, 8192] if options else [1024, 2048, 4096]
    peaks = [extra(n, backward=True, backend="blockwise", **options) for n in lengths]
    assert abs(quadratic_share(lengths, peaks)) < 0.02, peaks


def test_blockwise_does_not_repeat_keys_and_values():
    """Four query heads for each KV head: K and V are not even copied once."""
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 16384, 64), torch.randn(1, 2, 16384, 64)
    with peak_memory("cpu") as peak:
        attention(q, k, v, backend="blockwise")
    assert peak.bytes < k.nbytes / 8
