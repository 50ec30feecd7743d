"""ALiBi's slopes are the published ones for every count of heads, and its bias is what models in use compute."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from course_lib.positions import alibi_bias, alibi_slopes

COUNTS = range(1, 41)


def published(heads):
    """The rule as the paper's authors state it: a geometric sequence, and every other term of the next for what is left."""
    if math.log2(heads).is_integer():
        start = 2 ** (-8 / heads)
        return [start * start**head for head in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return published(below) + published(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", COUNTS)
def test_slopes_are_the_published_ones(heads):
    slopes = alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    assert slopes.shape == (heads,)
    torch.testing.assert_close(slopes, torch.tensor(published(heads)), rtol=1e-6, atol=0)


def test_slopes_of_eight_and_twelve_heads_are_known():
    eight = [2.0**-power for power in range(1, 9)]
    assert alibi_slopes(8).tolist() == eight
    between = [2.0 ** -(power - 0.5) for power in range(1, 5)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(eight + between), rtol=1e-7, atol=0)


@pytest.mark.parametrize("heads", COUNTS)
def test_bias_is_that_of_mpt(heads):
    theirs = build_mpt_alibi_tensor(heads, 7)  # what the last query adds
    torch.testing.assert_close(alibi_bias(heads, 1, 7), theirs.view(heads, 1, 7), rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", COUNTS)
def test_bias_is_that_of_bloom_but_for_a_number_in_each_row_that_softmax_drops(heads):
    theirs = build_alibi_tensor(torch.ones(1, 6), heads, torch.float32).view(heads, 1, 6)
    difference = (alibi_bias(heads, 6, 6) - theirs).tril()
    own_position = difference.diagonal(dim1=1, dim2=2)[..., None]
    torch.testing.assert_close(difference, own_position.expand(heads, 6, 6).tril(), rtol=1e-5, atol=1e-6)


@given(st.integers(1, 9), st.integers(0, 7), st.integers(0, 7))
def test_bias_is_minus_slope_times_distance_from_the_last_positions(heads, query_len, kv_len):
    bias = alibi_bias(heads, query_len, kv_len)
    assert bias.shape == (heads, query_len, kv_len)
    for head, slope in enumerate(alibi_slopes(heads).tolist()):
        for row in range(query_len):
            for key in range(kv_len):
                distance = abs(kv_len - query_len + row - key)
                assert bias[head, row, key].item() == pytest.approx(-slope * distance, rel=1e-6)


@pytest.mark.parametrize("heads", [0, -1, 2.0, True, "8", None])
def test_bad_count_of_heads_is_one_sentence(heads):
    for call in (alibi_slopes, lambda count: alibi_bias(count, 2, 2)):
        with pytest.raises(ValueError, match=r"^num_heads is .*; a whole number of at least 1 is needed$"):
            call(heads)


@pytest.mark.parametrize("name", ["query_len", "kv_len"])
@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_bad_length_is_one_sentence(name, size):
    with pytest.raises(ValueError, match=rf"^{name} is {size!r}; a whole number of at least 0 is needed$"):
        alibi_bias(2, **({"query_len": 3, "kv_len": 3} | {name: size}))
