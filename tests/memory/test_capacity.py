"""The largest context: what fits and the next does not, for any model, card and storage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.memory import cards, estimate, kv_cache_bytes, largest_context, published_names
from course_lib.memory.estimate import BITSANDBYTES, OURS

DENSE = (*BITSANDBYTES, *OURS, "fp8")  # mxfp4 converts experts, which few models have


@settings(max_examples=60)
@given(
    model=st.sampled_from(published_names()),
    card=st.sampled_from(cards()),
    batch=st.integers(1, 40),
    quantization=st.sampled_from((None, *DENSE)),
    kv_cache_dtype=st.sampled_from((None, "float16", "int8", "int4")),
    chunk=st.sampled_from((None, 1, 512, 100_000)),
)
def test_it_fits_and_one_token_more_does_not(model, card, batch, quantization, kv_cache_dtype, chunk):
    options = {
        "dtype": "bfloat16",
        "batch_size": batch,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
    }
    found = largest_context(model, card, prefill_chunk=chunk, **options)

    def fits(tokens):
        prompt = min(tokens, chunk or tokens)
        needed = estimate(model, prompt_tokens=prompt, new_tokens=tokens - prompt, **options)
        return needed.fits(card.memory_bytes)

    assert found == 0 or fits(found)
    assert not fits(found + 1)


def test_every_way_to_name_a_card_gives_the_same():
    (card,) = (card for card in cards() if card.name == "L4")
    found = {largest_context("llama-3.1-8b", how) for how in (card, "L4", "l4", card.memory_bytes)}
    assert len(found) == 1
    assert found.pop() > 0


def test_weights_that_leave_no_room_give_no_context():
    weights = estimate("smollm2-135m").weights
    assert largest_context("smollm2-135m", weights) == 0
    assert largest_context("llama-3.1-70b", "H100 SXM") == 0


def test_by_hand_for_a_model_whose_activations_stay_small():
    """Beyond the chunk only the cache grows: 2 * 30 layers * 3 heads * 64 values of 2 bytes."""
    needed = estimate("smollm2-135m", prompt_tokens=16)
    per_token = kv_cache_bytes("smollm2-135m", 1)
    assert per_token == 2 * 30 * 3 * 64 * 2
    room = needed.total + 984 * per_token
    assert largest_context("smollm2-135m", room, prefill_chunk=16) == 1_000
    assert largest_context("smollm2-135m", room - 1, prefill_chunk=16) == 999


def test_a_cache_that_does_not_grow_has_no_limit():
    windowed = {
        "model_type": "mistral",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "vocab_size": 100,
        "sliding_window": 32,
    }
    assert largest_context(windowed, 10**9, prefill_chunk=64) == 2**40
    assert 0 < largest_context(windowed, 10**9) < 2**40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"card": "H10"}, "H100 SXM, ..., got"),
        ({"card": "abacus!!"}, "got 'abacus!!'"),
        ({"card": 0}, "card must be a whole number of at least 1, got 0"),
        ({"card": 2.5}, "card must be a whole number of at least 1, got 2.5"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"model": "smollm3"}, "neither a published name"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype must be one of"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        largest_context(**{"model": "smollm2-135m", "card": "L4", **arguments})
